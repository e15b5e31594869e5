"""What an experiment leaves behind: figures, a table of numbers, and the report over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torchcmdp as tc
from torchcmdp.plotting.results import MEASURES

from ..program import mean_and_half, table, write_table
from . import simplex
from .claims import RULES, Finding, by_instance, findings, interval, overall
from .experiment import OWN, REPLAY, Outcome
from .presets import DELTA, PRESETS, RIVALS_COMMAND, SAFE_BY, SCALES, STRIDE, WC_OPS, Preset, instance, instances

INTRODUCTION = f"""The paper publishes neither its instances nor its horizons, so these instances were drawn from `random_cmdp`
by the seeds below before their results were looked at: for every experiment its own seed and one every {STRIDE:,} after it, of
which those are passed over in which the best policy is safe anyway. Their costs are shifted so that the constraints bind; with a
single state an arm that pays more also costs more. `theory` plays the paper's constants; `practical` and `small` multiply the
bonuses and the transition radii of every learner that has them by {SCALES["practical"]:g} and {SCALES["small"]:g}; in `tuned`
every learner has the constants that `{RIVALS_COMMAND}` found for it, by the same search on the same instances.

OptCMDP plays with three kinds of radii: *matched* to WC-OPS's, as *published*, where a cost's radius is that of a variable in
[-1, 1], and *literal*, where the published radius, meant for costs in [0, 1], is rescaled to [-1, 1] and so twice as large.
OptPrimalDual has matched radii and is told the true Slater gap; its bonus is L times the sum of the radii over n successors, so
its transition radii are those of the family divided by L n (n the widest layer): with WC-OPS's own it would not move. PDB-PS,
whose radii are matched, is our addition, and a reconstruction. Adversaries are the paper's, turned against the learner; their
costs leave one policy safe by {SAFE_BY:g} in every pair. Such an adversary gives each learner a sequence of its own, so each of
these experiments is also played as a replay, to all learners, of the sequence recorded on every instance against a single run of
WC-OPS."""

REALISED = """V sums <g_t, q_t> over the episodes. Where costs are stochastic ours takes for g_t the mean costs, which has the
same expectation as the paper's, with realised ones, and less noise. Beside it the sum of the costs that were met along the paths
walked."""

FEW = "**These are {instances} instances, where the design asks for {enough}: a trial of the machinery, not a finding.**"


def write_experiment(outcomes: Sequence[Outcome]) -> None:
    """The figures and the summary of one experiment, whose outcomes differ in their family."""
    folder, preset = outcomes[0].job.folder, PRESETS[outcomes[0].job.preset]
    folder.mkdir(parents=True, exist_ok=True)
    for sequence, suffix in ((OWN, ""), (REPLAY, "-replay")):
        if all(outcome.of(sequence) for outcome in outcomes):
            # a row each, so that no regret is without its violations
            panels = [_panel(outcome, sequence, preset, name) for name in MEASURES for outcome in outcomes]
            tc.plotting.save(folder / f"curves{suffix}.png", tc.plotting.draw(panels, columns=len(outcomes)))
    if preset.setting == "simplex":
        policies = {f"WC-OPS, {o.job.family} constants": o.policies[WC_OPS.name] for o in outcomes}
        tc.plotting.save(folder / "simplex.png", simplex.draw(instance(preset), policies))
    rows = [row for outcome in outcomes for row in _summary(outcome)]
    write_table(folder / "summary.csv", rows)


def _panel(outcome: Outcome, sequence: str, preset: Preset, name: str) -> tc.plotting.Panel:
    """The curves of one family, with bands over instances."""
    alpha = preset.setting == "adversarial" and name == "regret"
    attribute, ylabel = ("alpha_regret", "cumulative alpha-regret (reward)") if alpha else (name, MEASURES[name])
    results, count = outcome.of(sequence), outcome.job.instances
    curves = {label: (result.episodes, by_instance(getattr(result, attribute), count)) for label, result in results.items()}
    least = min(curves, key=lambda label: float(curves[label][1][:, -1].mean().nan_to_num(float("inf"))))
    finding = f"{outcome.job.family} constants: least {ylabel.split(' (')[0].removeprefix('cumulative ')} of {least}"
    return tc.plotting.Panel(curves, ylabel, finding, tc.plotting.bounds_of(results, name), of="instance")


def _summary(outcome: Outcome) -> list[dict[str, Any]]:
    """One row a learner and sequence: totals with their half-widths over instances and runs, rates, and what was unusual."""
    rows, instances = [], outcome.job.instances
    for (sequence, label), result in outcome.results.items():
        root = math.sqrt(float(result.episodes[-1]))
        row: dict[str, Any] = {"family": outcome.job.family, "sequence": sequence, "learner": label}
        for name in ("regret", "anytime_regret", "alpha_regret", "violation", "realised_violation", "positive_violation"):
            curve = by_instance(getattr(result, name), instances)
            row[name], row[f"{name}_ci95"] = mean_and_half(curve[:, -1])
            row[f"{name}_ci95_over_runs"] = mean_and_half(getattr(result, name)[:, -1].unflatten(0, (instances, -1)).mean(0))[1]
            row[f"{name}_over_sqrt_t"] = row[name] / root
            row[f"{name}_exponent"], row[f"{name}_exponent_ci95"] = (float(x) for x in tc.growth_exponent(result.episodes, curve))
        for name in ("rho", "alpha", "safe_value", "best_value"):
            row[name] = float(getattr(result, name).mean())
        for name in ("regret", "violation", "positive_violation"):
            row[f"theorem_{name}"] = float(result.bounds[name][-1]) if name in result.bounds else None
        row["episodes_with_gamma"] = result.count("Learner/gamma_active")
        row["elastic_projections"] = result.count("Solver/elastic")
        row["infeasible_programs"] = result.count("Solver/infeasible")
        rows.append(row)
    return rows


def write_report(path: Path, outcomes: Sequence[Outcome], command: str, enough: int) -> str:
    """The report over all experiments that were played, with a warning below `enough` instances; returns its table of claims."""
    rows = findings(outcomes)
    job = outcomes[0].job
    claims = _claims_table(rows)
    parts = [
        "# The paper's experiments",
        f"Written by `{command}`: {job.instances} instances an experiment, on each {job.runs} runs of {job.episodes:,} episodes, "
        f"delta = {DELTA}.",
        *([FEW.format(instances=job.instances, enough=enough)] if job.instances < enough else []),
        INTRODUCTION,
        "## Claims",
        claims,
        "Each learner on its own sequence; the single experiments and the replays are below.",
        RULES,
        "## Violation by mean and by realised costs",
        REALISED,
        _realised_table(outcomes),
        "## Do the adaptive weights wake?",
        _waking_table(outcomes),
        "## Experiments",
        _instances_table(outcomes),
        "## Every claim in every experiment",
        table(["claim", "experiment", "constants", "sequence", "measured", "verdict"], rows, "every claim"),
    ]
    path.write_text("\n\n".join(parts) + "\n")
    return claims


def _claims_table(rows: Sequence[Finding]) -> str:
    """One row a claim, one column a family."""
    families = list(dict.fromkeys(row.family for row in rows))
    cells = []
    for claim in dict.fromkeys(row.claim for row in rows):
        verdicts = [overall([r for r in rows if r.claim == claim and r.family == family]) for family in families]
        cells.append([claim, *verdicts])
    if not cells:
        return "None of these experiments is about a claim of the paper."
    return table(["WC-OPS's ...", *families], cells, "claims")


def _waking_table(outcomes: Sequence[Outcome]) -> str:
    """How often Gamma was positive, for every WC-OPS that played."""
    cells = []
    for outcome in outcomes:
        for (sequence, label), result in outcome.results.items():
            if (active := result.count("Learner/gamma_active")) is not None:
                share = active / (float(result.episodes[-1]) * len(result.regret))
                ends = (interval(curve[:, -1], outcome.job.instances) for curve in (result.violation, result.regret))
                cells.append([outcome.job.preset, outcome.job.family, sequence, label, f"{share:.1%}", *ends])
    text = (
        "The cost estimates forget faster once the violation seen exceeds a threshold (Gamma > 0). With the paper's threshold that "
        "takes millions of episodes. The waking experiments scale the threshold down, once with costs that switch and once, as a "
        "control, with costs that do not: there the weights should sleep."
    )
    header = ["experiment", "constants", "sequence", "learner", "episodes with Gamma > 0", "violation", "regret"]
    return f"{text}\n\n{table(header, cells, 'waking')}"


def _realised_table(outcomes: Sequence[Outcome]) -> str:
    """Both readings of V, for every learner where costs are stochastic."""
    cells = [
        [o.job.preset, o.job.family, label, *(interval(x[:, -1], o.job.instances) for x in (r.violation, r.realised_violation))]
        for o in outcomes
        for (_, label), r in o.results.items()
        if PRESETS[o.job.preset].setting == "stochastic"
    ]
    header = ["experiment", "constants", "learner", "V of mean costs", "of realised costs"]
    return table(header, cells, "realised") if cells else "None of these experiments has stochastic costs and a claim about them."


def _instances_table(outcomes: Sequence[Outcome]) -> str:
    """What is played: the first seed of each experiment, how many were passed over, and means over the instances."""
    cells, count = [], outcomes[0].job.instances
    for name in dict.fromkeys(outcome.job.preset for outcome in outcomes):
        preset = PRESETS[name]
        cmdp, seeds = instances(preset, count)
        value, gap = float(tc.safe_optimum(cmdp).value.mean()), float(tc.slater_gap(cmdp).mean())
        passed = (seeds[-1] - preset.seed) // STRIDE + 1 - count
        shape = "-".join(map(str, preset.widths))
        numbers = [str(preset.seed), str(passed), shape, str(preset.constraints), f"{value:.3f}", f"{gap:.3f}"]
        cells.append([name, preset.purpose, *numbers, f"[figures]({name}/)"])
    header = ["experiment", "what", "seed", "passed over", "layers", "m", "mean safe optimum", "mean Slater gap", ""]
    return table(header, cells, "experiments")
