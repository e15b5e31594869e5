"""What an experiment leaves behind: figures, a table of numbers, and the report over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torchcmdp as tc
from torchcmdp import plotting
from torchcmdp.metrics import growth_exponent, mean_and_interval
from train.paper import simplex
from train.paper.claims import RULES, Finding, findings, interval, overall
from train.paper.experiment import OWN, REPLAY, Outcome
from train.paper.presets import DELTA, FAMILIES, PRESETS, SAFE_BY, TUNED, WC_OPS, instance
from train.program import table, write_table

FIGURES = {
    "regret": ("regret", "cumulative regret"),
    "violation": ("violation", "cumulative violation"),
    "positive_violation": ("positive_violation", "cumulative positive violation"),
}

INTRODUCTION = f"""The paper publishes neither its instances nor its horizons, so these instances were drawn from `random_cmdp`
by the seeds below before their results were looked at, and none was thrown away. Their costs are shifted so that the constraints
bind; with a single state an arm that pays more also costs more. `theory` plays the paper's constants; `practical` multiplies the
bonuses and the transition widths of every learner that has them by {FAMILIES["practical"]["bonus_scale"]:g}; beside it plays
"WC-OPS, tuned", with the constants of `WCOPS.practical`. The radii of OptCMDP, OptPrimalDual and PDB-PS are matched to WC-OPS's.
PDB-PS is our addition, and a reconstruction. OptPrimalDual is told the true Slater gap. Adversaries are the paper's, turned against
the learner; their costs leave one policy safe by {SAFE_BY:g} in every pair. Such an adversary gives each learner a sequence of its
own, so each of these experiments is also played as a replay, to all learners, of the one sequence recorded against a single run of
WC-OPS."""


def write_experiment(folder: Path, outcomes: Sequence[Outcome]) -> None:
    """The figures and the summary of one experiment, whose outcomes differ in their family."""
    folder.mkdir(parents=True, exist_ok=True)
    preset = PRESETS[outcomes[0].job.preset]
    for sequence, suffix in ((OWN, ""), (REPLAY, "-replay")):
        shown = {outcome.job.family: _of(outcome, sequence) for outcome in outcomes}
        if all(shown.values()):
            for name, (attribute, ylabel) in FIGURES.items():
                if preset.setting == "adversarial" and name == "regret":
                    attribute, ylabel = "alpha_regret", "cumulative alpha-regret"
                figure = plotting.draw([_panel(family, r, attribute, ylabel, name) for family, r in shown.items()])
                plotting.save(folder / f"{name}{suffix}.png", figure)
    if preset.setting == "simplex":
        policies = {f"WC-OPS, {o.job.family} constants": o.policies[WC_OPS.name] for o in outcomes}
        for outcome in outcomes:
            if TUNED.name in outcome.policies:
                policies[TUNED.name] = outcome.policies[TUNED.name]
        plotting.save(folder / "simplex.png", simplex.draw(instance(preset), policies))
    rows = [row for outcome in outcomes for row in _summary(outcome)]
    write_table(folder / "summary.csv", rows)


def _of(outcome: Outcome, sequence: str) -> dict[str, tc.RunResult]:
    return {label: result for (where, label), result in outcome.results.items() if where == sequence}


def _panel(family: str, results: Mapping[str, tc.RunResult], attribute: str, ylabel: str, bound: str) -> plotting.Panel:
    curves = {label: (result.episodes, getattr(result, attribute)) for label, result in results.items()}
    return plotting.Panel(curves, ylabel, f"{family} constants", plotting.bounds_of(results, bound))


def _summary(outcome: Outcome) -> list[dict[str, Any]]:
    """One row a learner and sequence: totals with their half-widths, rates, and how often something unusual happened."""
    rows = []
    for (sequence, label), result in outcome.results.items():
        root = math.sqrt(float(result.episodes[-1]))
        row: dict[str, Any] = {"family": outcome.job.family, "sequence": sequence, "learner": label}
        for name in ("regret", "anytime_regret", "alpha_regret", "violation", "positive_violation"):
            curve = getattr(result, name)
            row[name], row[f"{name}_ci95"] = (float(x) for x in mean_and_interval(curve[:, -1]))
            row[f"{name}_over_sqrt_t"] = row[name] / root
            row[f"{name}_exponent"], row[f"{name}_exponent_ci95"] = (float(x) for x in growth_exponent(result.episodes, curve))
        for name in ("rho", "alpha", "safe_value", "best_value"):
            row[name] = float(getattr(result, name).mean())
        for name in ("regret", "violation", "positive_violation"):
            row[f"theorem_{name}"] = float(result.bounds[name][-1]) if name in result.bounds else None
        row["episodes_with_gamma"] = result.count("Learner/gamma_active")
        row["elastic_projections"] = result.count("Solver/elastic")
        row["infeasible_programs"] = result.count("Solver/infeasible")
        row["seconds"] = round(result.seconds, 1)
        rows.append(row)
    return rows


def write_report(path: Path, outcomes: Sequence[Outcome], command: str) -> str:
    """The report over all experiments that were played; returns its table of claims."""
    rows = findings(outcomes)
    job = outcomes[0].job
    claims = _claims_table(rows)
    parts = [
        "# The paper's experiments",
        f"Written by `{command}`: {job.episodes:,} episodes, {job.runs} runs each, delta = {DELTA}.",
        INTRODUCTION,
        "## Claims",
        claims,
        "Each learner on its own sequence; the single experiments and the replays are below.",
        RULES,
        "## Do the adaptive weights wake?",
        _waking_table(outcomes),
        "## Experiments",
        _instances_table(outcomes),
        "## Every claim in every experiment",
        table(
            ["claim", "experiment", "constants", "sequence", "measured", "verdict"],
            [[r.claim, r.preset, r.family, r.sequence, r.numbers, r.verdict] for r in rows],
        ),
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
    return table(["WC-OPS's ...", *families], cells) if cells else "None of these experiments is about a claim of the paper."


def _waking_table(outcomes: Sequence[Outcome]) -> str:
    """How often Gamma was positive, for every WC-OPS that played."""
    cells = []
    for outcome in outcomes:
        for (sequence, label), result in outcome.results.items():
            active = result.count("Learner/gamma_active")
            if active is None:
                continue
            share = active / (float(result.episodes[-1]) * len(result.regret))
            numbers = [f"{share:.1%}", interval(result.violation[:, -1]), interval(result.regret[:, -1])]
            cells.append([outcome.job.preset, outcome.job.family, sequence, label, *numbers])
    text = (
        "The cost estimates forget faster once the violation seen exceeds a threshold (Gamma > 0). With the paper's threshold that "
        "takes millions of episodes. The waking experiments scale the threshold down, once with costs that switch and once, as a "
        "control, with costs that do not: there the weights should sleep."
    )
    header = ["experiment", "constants", "sequence", "learner", "episodes with Gamma > 0", "violation", "regret"]
    return f"{text}\n\n{table(header, cells)}"


def _instances_table(outcomes: Sequence[Outcome]) -> str:
    cells = []
    for name in dict.fromkeys(outcome.job.preset for outcome in outcomes):
        preset = PRESETS[name]
        cmdp = instance(preset)
        value, gap = float(tc.safe_optimum(cmdp).value), float(tc.slater_gap(cmdp))
        shape = "-".join(map(str, preset.widths))
        numbers = [str(preset.seed), shape, str(preset.constraints), f"{value:.3f}", f"{gap:.3f}"]
        cells.append([name, preset.purpose, *numbers, f"[figures]({name}/)"])
    return table(["experiment", "what", "seed", "layers", "m", "safe optimum of the means", "Slater gap", ""], cells)
