"""The main job: learners side by side on a CMDP, by default a small random one, with figures, a table and TensorBoard files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import torchcmdp as tc
from torchcmdp.distributed import local_device, process_rank

from . import program
from .program import Count, NotNegative, Positive, Share, spelled, with_interval
from .verdict import BASELINE_GIVEN, COLUMNS, ends, ranking, sentences

SETTINGS = ("eta", "gamma", "bonus_scale", "radius_scale", "threshold_scale", "cap_scale", "confidence", "solver")
PRACTICAL = "wc-ops-practical"
# Who plays where nobody is chosen, on the same CMDP and the same random numbers.
COMPARED = ("wc-ops", PRACTICAL, "opt-cmdp", "opt-primal-dual", "s-ops")
# Episodes by default: of a learner alone, and of each of those above, who are to be done within a minute on two cores.
ALONE, TOGETHER = 20_000, 2_000


# How a Gymnasium environment is made into a CMDP: which cost, and by default how many steps and how much of it.
IMPORTS = {"FrozenLake-v1": ("fell_in_a_hole", 20, 0.05), "CliffWalking-v1": ("fell_off_the_cliff", 14, 0.1)}


@dataclass
class Options:
    """Play learners in a CMDP with safety constraints, by default a random one: who earns what, and who breaks which constraint.

    Without --learner, WC-OPS with the paper's constants, WC-OPS with the practical ones (`WCOPS.practical`), OptCMDP,
    OptPrimalDual and S-OPS play the same CMDP with the same random numbers. S-OPS alone is given a safe policy to start from, a
    baseline, and sits out where no policy is safe with room to spare. It ends with a table of regret, violation, positive
    violation and unsafe episodes (those in which the expected cost of some constraint is above zero), the best in bold; of the
    regret only one that no safer learner would call bought. With --learner one plays alone, with what settings it has.

    Into LOGDIR/NAME go the pictures, as PNG and PDF: curves (regret beside the violations), growth (the same on logarithmic
    axes, beside sqrt(t)) and balance (what it came to); the table, in summary.md or summary.txt; and in a folder for each learner,
    such as wc-ops/, its TensorBoard events, metrics.csv, config.json, curves.npz and checkpoint.pt. Running the same command again
    continues an interrupted run and repeats the summary of a finished one.

    Examples:
      python -m train
      python -m train --episodes 500 --runs 8 --name quick
      python -m train --widths 1 6 6 1 --actions 4 --constraints 3 --seed 7 --name wide
      python -m train --learner wc-ops --bonus-scale 0.1 --radius-scale 0.1 --name narrow
      python -m train --env FrozenLake-v1 --learner opt-cmdp --episodes 2000 --runs 8
      torchrun --nproc-per-node 2 -m train --runs 64
      python -m train tensorboard
    """

    env: Literal["random", "FrozenLake-v1", "CliffWalking-v1"] = "random"
    """A random CMDP; or a Gymnasium environment, with falling in a hole or off the cliff as the cost (needs torchcmdp[gym])."""
    learner: (
        Literal[
            "wc-ops", "uob-reps", "opt-cmdp", "greedy", "opt-primal-dual", "pdb-ps", "s-ops", "ma-ops", "dope", "wc-ops-practical"
        ]
        | None
    ) = None
    """Who plays alone; five of them together by default. opt-primal-dual is told the true Slater gap, which its step sizes need;
    s-ops, ma-ops and dope are given a baseline."""
    episodes: Count | None = None
    """How many episodes every run has; also the horizon that the step sizes are made for. 20,000 alone and 2,000 together."""
    runs: Count = 32  # Independent runs, played as one batch; the bands are 95% intervals over them.
    seed: int = 0  # Of the CMDP and of all random numbers.
    name: str | None = None
    """Folder of this experiment inside LOGDIR; main by default, alone with --learner, and after the environment if there is one."""
    logdir: str = "runs"  # Folder of all experiments; point TensorBoard at it.
    device: str = "cpu"  # Where to compute: cpu, cuda, cuda:1, ...
    dtype: Literal["float32", "float64"] = "float64"  # Floating-point type.
    solver: Literal["newton", "cvxpy"] = "newton"
    """Solver of the projection: our Newton method, or a general cone solver through cvxpylayers."""
    resume: bool = False
    """Insist on continuing: refuse if there is nothing to continue. A run that can be continued is continued anyway."""
    fresh: bool = False  # Forget what the folder holds and start over.
    widths: tuple[int, ...] = (1, 4, 4, 4, 1)  # Of a random CMDP: states in each layer, beginning and ending with 1.
    actions: Count = 3  # Of a random CMDP: actions in each state.
    constraints: int = 2  # Of a random CMDP: safety constraints; 0 for none.
    steps: Count | None = None
    """Of a Gymnasium environment: steps of an episode; 20 for FrozenLake-v1 and 14 for CliffWalking-v1 by default."""
    budget: Positive | None = None
    """Of a Gymnasium environment: falls that an episode may have in expectation; 0.05 and 0.1 by default."""
    delta: float = 0.01  # Failure probability of the confidence sets.
    eta: Positive | None = None
    """Step size; the learner's own by default. This and the following need --learner, and are refused where it has none such."""
    gamma: Positive | None = None  # Implicit exploration; the learner's own by default.
    bonus_scale: NotNegative = 1.0  # Multiplies the bonus on the costs; 1 is the paper's.
    radius_scale: NotNegative = 1.0  # Multiplies the widths of the transition intervals; 1 is the paper's.
    threshold_scale: NotNegative = 1.0  # Multiplies the violation at which the cost estimate starts to forget; 1 is the paper's.
    cap_scale: NotNegative = 1.0  # Multiplies the violation at which it forgets no faster; 1 is the paper's.
    confidence: Literal["entrywise", "l1", "bernstein"] = "entrywise"
    """Kind of transition confidence set; entrywise is the paper's."""
    baseline_share: Share = 0.5
    """Of s-ops, ma-ops and dope: the margin of the baseline that they are given, as a share of the Slater gap, at most 1."""
    log_every: Count | None = None  # Episodes between logging points; about 200 points by default, and never more than 10,000.
    checkpoint_every: NotNegative = 30.0  # Seconds between checkpoints.
    checkpoint_episodes: Count | None = None  # Episodes between checkpoints, besides those that the time asks for.


def main(arguments: Sequence[str]) -> int:
    """Run the main job; returns the exit code."""
    options = program.parse(Options, arguments, prog=program.IN_A_CLONE)
    folder = _check(options, program.typed(arguments))
    options.episodes = options.episodes or (ALONE if options.learner else TOGETHER)
    cmdp, imported = make_cmdp(options)
    size, names = _check_memory(options, cmdp), players(options, cmdp)
    leads, labels = process_rank() == 0, ", ".join(map(label_of, names))
    if leads:
        played = f"{options.runs} runs of {options.episodes:,} episodes"
        print(f"{labels}, {played}, about {size:.2g} GiB, into {folder}", file=sys.stderr)
    results: dict[str, tc.RunResult] = {}
    with program.bar(None, label_of(names[0]), total=options.episodes * len(names), unit="ep", disable=not leads) as shown:
        for name in names:
            shown.set_description_str(label_of(name), refresh=False)
            result = play(options, name, (cmdp, imported), folder / name, shown if leads else None)
            if not result.completed:
                when = f" in {label_of(name)}, after {int(result.episodes[-1]):,} of {options.episodes:,} episodes"
                return program.interrupted(when, options.fresh) if leads else 130
            results[label_of(name)] = result
            shown.update(options.episodes * len(results) - shown.n)
    if leads:
        _report(options, folder, results, cmdp, imported)
    return 0


def players(options: Options, cmdp: tc.LayeredCMDP) -> tuple[str, ...]:
    """Who plays, by name; together none with a baseline where there is no policy to be one."""
    if options.learner:
        return (options.learner,)
    return COMPARED if program.has_margin(cmdp) else tuple(name for name in COMPARED if not program.guarded(name))


def label_of(name: str) -> str:
    """What a player is called in tables and figures, which say of those with a baseline that they have one."""
    if name == PRACTICAL:
        return "WC-OPS practical"
    return f"{tc.LEARNERS[name].name}{BASELINE_GIVEN if program.guarded(name) else ''}"


def play(options: Options, name: str, cmdp: tuple[tc.LayeredCMDP, Any], folder: Path, shown: Any = None) -> tc.RunResult:
    """All runs of one learner, divided over torchrun's processes if there are any; `shown` is the bar to move."""
    how = {name: getattr(options, name) for name in ("log_every", "fresh", "checkpoint_every", "checkpoint_episodes")}
    make = partial(build, options, name, *cmdp)
    result = program.play_split(make, options.runs, options.episodes or 0, folder, shown, **how)
    # the theorems are about the paper's constants
    return replace(result, bounds={"trivial": result.bounds["trivial"]}) if name == PRACTICAL else result


def _report(options: Options, folder: Path, results: dict[str, tc.RunResult], cmdp: tc.LayeredCMDP, imported: Any) -> None:
    """The table, the figures, and TensorBoard's page about the whole experiment."""
    if options.learner:
        path, text = folder / "summary.txt", summary(*results.values(), cmdp, imported)
        words = f"```\n{text}\n```"  # as Markdown
    else:
        path, text = folder / "summary.md", "\n\n".join([ranking(results), " ".join(sentences(results)), _about(options, cmdp)])
        words = text
    figures = tc.plotting.figures(results)
    pictures = ", ".join(str(folder / f"{name}.png") for name in figures)
    program.publish(path, text, f"Pictures, also as PDF: {pictures}\n{program.look_at(options.logdir)}", figures)
    settings = "\n".join(f"| {field.name} | `{getattr(options, field.name)}` |" for field in fields(options))
    about = f"{words}\n\n| option | value |\n|---|---|\n{settings}"
    writer = program.writer_of(folder)  # what belongs to the experiment and to none of its learners
    writer.texts({"About this experiment": about})
    writer.images(figures, int(next(iter(results.values())).episodes[-1]))
    writer.flush()


def _about(options: Options, cmdp: tc.LayeredCMDP) -> str:
    """What was played, and what an episode of it is worth."""
    value, slater = float(tc.safe_optimum(cmdp).value), float(tc.slater_gap(cmdp))
    value = value if cmdp.units is None else float(cmdp.units.episode_return(value))
    given = "S-OPS sits out, since no policy is safe with room to spare, which a baseline must be"
    if program.has_margin(cmdp):
        given = f"S-OPS's baseline is the best policy that is safe by {options.baseline_share:g} of that"
    return (
        f"Means over {options.runs} runs of {options.episodes:,} episodes and 95% intervals. The best safe policy earns "
        f"{value:.4f} an episode; the safest is safe by {slater:.4f}, which OptPrimalDual is told. {given}. Bold is the least of a "
        "column, a regret only where no other learner has less positive violation."
    )


def make_cmdp(options: Options) -> tuple[tc.LayeredCMDP, Any]:
    """The CMDP that the options describe, and for a Gymnasium environment its `ImportedCMDP`."""
    dtype, device = program.DTYPES[options.dtype], program.check_device(local_device(options.device))
    if options.env == "random":
        size = (options.widths, options.actions, options.constraints)
        return tc.random_cmdp(*size, options.seed, dtype=dtype, device=device), None
    from torchcmdp.adapters import tabular  # only those who ask for Gymnasium need it

    cost, steps, budget = IMPORTS[options.env]
    size = (options.steps or steps, getattr(tabular, cost), options.budget or budget)
    imported = tabular.from_gymnasium(options.env, *size, dtype=dtype, device=device)
    return imported.cmdp, imported


def build(
    options: Options, name: str, cmdp: tc.LayeredCMDP, imported: Any, runs: int, first_run: int = 0
) -> tuple[tc.Learner, tc.Simulator]:
    """The learner of that name, and the simulator, of some runs in what `make_cmdp` gave."""
    costs = tc.Bernoulli(cmdp.costs, low=-1) if imported is None else imported.cost_process()
    env = tc.Simulator(cmdp, rewards=tc.Bernoulli(cmdp.rewards), costs=costs, runs=runs, seed=options.seed, first_run=first_run)
    settings = {name: value for name, value in program.changed(options).items() if name in SETTINGS}
    settings |= program.told(name, cmdp, options.baseline_share, seed=options.seed, first_run=first_run)
    kind: Any = tc.WCOPS.practical if name == PRACTICAL else tc.LEARNERS[name]
    size = (cmdp.layout, cmdp.constraints, options.episodes or ALONE, options.delta, runs)
    return kind(*size, **settings, dtype=cmdp.dtype, device=cmdp.device), env


def summary(result: tc.RunResult, cmdp: tc.LayeredCMDP, imported: Any = None) -> str:
    """The table a person reads first: final values with their 95% intervals over runs, and what they are measured against."""
    value, slater = float(tc.safe_optimum(cmdp).value), float(tc.slater_gap(cmdp))
    rows = [("after episode", f"{int(result.episodes[-1]):,}")]
    rows += [(column, with_interval(ends(result, column), form)) for column, form in COLUMNS.items()]
    rows.append(("safe optimum per episode", f"{value:.4f}" if cmdp.units is None else f"{value:.4f} in normal form"))
    if imported is not None:
        rows.append(("its return in the environment", f"{imported.environment_return(value):.4f}"))
    rows.append(("Slater gap", f"{slater:.4f}"))
    if result.elastic_count is not None:  # the learners that project
        iterations = result.mean_iterations
        counted = "not counted by this solver" if iterations != iterations else f"{iterations:.2f} per projection"
        rows += [("elastic projections", f"{result.elastic_fraction:.2%}"), ("solver iterations", counted)]
    rows.append(("time", f"{result.seconds:.1f} s"))
    program.collect(["what", "value"], rows)
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _check_memory(options: Options, cmdp: tc.LayeredCMDP) -> float:
    """About how many GiB the runs take; refused if that is more than the device has."""
    points = min(200 if options.log_every is None else (options.episodes or ALONE) // options.log_every, 10_000)
    size = options.runs * program.bytes_per_run(cmdp.layout, cmdp.constraints, points) / 2**30
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room = (torch.cuda.mem_get_info(cmdp.device)[1] if cmdp.device.type == "cuda" else physical) / 2**30
    if size > room:
        need = f"so many runs take about {size:,.3g} GiB, and this device has {room:.3g} GiB"
        raise tc.InvalidInput(f"--runs is {options.runs:,}; {need}; take fewer, or smaller --widths.")
    return size


def _check(options: Options, typed: set[str]) -> Path:
    """What no part of the library would refuse in the words of the command line; returns the experiment's folder.

    An option that was typed and that a learner does not have is refused even at its default.
    """
    foreign, owner = ("widths", "actions", "constraints"), "--env random"
    if options.env == "random":
        foreign, owner = ("steps", "budget"), "a Gymnasium environment, such as --env FrozenLake-v1"
    if name := next(filter(typed.__contains__, foreign), None):
        raise tc.InvalidInput(f"{spelled(name)} belongs to {owner}, and --env is {options.env}.")
    if options.learner:  # what is practical about the practical one are its own constants
        program.check_settings(options.learner, typed, SETTINGS, {"solver"} if options.learner == PRACTICAL else None)
    elif own := next(filter(typed.__contains__, SETTINGS), None):
        raise tc.InvalidInput(f"{spelled(own)} is a setting of one learner; say whose, such as --learner wc-ops.")
    usual = "alone" if options.learner else "main"
    name = usual if options.env == "random" else f"{options.env}-alone" if options.learner else options.env
    folder = program.experiment_folder(options.logdir, name if options.name is None else options.name)
    if options.resume and options.fresh:
        raise tc.InvalidInput("--resume and --fresh contradict each other; give one of them.")
    asked = (options.learner,) if options.learner else COMPARED
    if options.resume and not any((folder / name / "checkpoint.pt").exists() for name in asked):
        raise tc.InvalidInput(f"--resume finds no checkpoint in {folder / asked[0]}; leave it out to start a new run.")
    return folder
