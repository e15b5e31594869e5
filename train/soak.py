"""The soak: every learner, many runs in random CMDPs, and a count of everything that went wrong."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.protocols import measured

from . import program
from .program import Among, Count, Positive, bar, begin, guarded, protection, publish, settings_of, table

QUICK = (32, 100)
ROW_SUM_TOLERANCE = 1e-9


@dataclass
class Options:
    """Play every learner in random CMDPs, one a run, and count what goes wrong.

    A quarter of the CMDPs is plain, a quarter just feasible, in a quarter no policy is safe, and a quarter is deterministic.
    A failure is a run-episode with an exception, a policy that is none (negative, not summing to one, not zero in the padding), or
    a number that is not finite. Elastic projections and infeasible programs are no failures: they are what a learner does where no
    policy is safe. S-OPS, MA-OPS and DOPE play the CMDPs in which some policy has a margin. The table also goes into
    LOGDIR/NAME/soak.md. The exit code is 1 where there was a failure.

    Examples:
      python -m train soak
      python -m train soak --quick
      python -m train soak --runs 64 --episodes 200 --learners wc-ops opt-cmdp --seed 1
    """

    runs: Count = 1_000  # CMDPs, played as one batch.
    episodes: Count = 2_000  # Episodes of every run.
    learners: Annotated[tuple[str, ...], Among(tc.LEARNERS)] = tuple(tc.LEARNERS)  # By name.
    scale: Positive = 0.1
    """Multiplies bonuses and widths where a learner has them; at 1, the paper's, constraints hardly ever bind this early."""
    quick: bool = False  # 32 runs of 100 episodes.
    seed: int = 0  # Of the CMDPs and of all random numbers.
    widths: tuple[int, ...] = (1, 4, 4, 4, 1)  # States in each layer, beginning and ending with 1.
    actions: Count = 3  # Actions in each state.
    constraints: int = 2  # Safety constraints; 0 for none.
    device: str = "cpu"  # Where to compute: cpu, cuda, cuda:1, ...
    name: str = "soak"  # Folder of the results inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments.


# The ends of a solver that the table counts, beside the one that needs no counting.
COUNTED = ("elastic", "infeasible", "max_iterations", "invalid")


@dataclass
class Tally:
    """What happened to one learner, over all runs and episodes."""

    played: int = 0  # run-episodes
    failures: int = 0  # run-episodes that failed
    error: str = ""  # the exception that ended the learner's runs, if one did
    residual: float = float("nan")  # the largest; NaN for a learner without a solver
    counts: dict[str, int] = field(default_factory=dict)  # of projections and programs by their end, for a learner with some
    seconds: float = 0.0


def main(arguments: Sequence[str]) -> int:
    """Run the soak; returns the exit code."""
    options, folder = begin(Options, arguments, "soak")
    device = program.check_device(options.device)
    if options.quick:
        options.runs, options.episodes = QUICK
    cmdps = tc.stack_cmdps([instance(options, j) for j in range(options.runs)]).to(device)
    print(f"{options.runs:,} CMDPs of {'-'.join(map(str, options.widths))} states, {options.episodes:,} episodes", file=sys.stderr)
    tallies = {tc.LEARNERS[name].name: soak(name, cmdps, options) for name in options.learners}
    publish(folder / "soak.md", report(tallies))
    return 1 if any(tally.failures for tally in tallies.values()) else 0


def instance(options: Options, j: int) -> tc.LayeredCMDP:
    """The CMDP of run j: by turns plain, just feasible, without a safe policy, and deterministic."""
    kind = j % 4
    tight = kind == 1 and options.constraints > 0
    shape = (options.widths, options.actions, options.constraints, options.seed + j)
    cmdp = tc.random_cmdp(*shape, feasibility="tight" if tight else "any")
    transitions, costs = cmdp.transitions, cmdp.costs
    if kind == 2:
        costs = (1 + costs) / 2 * cmdp.layout.pair_mask()
    if kind == 3:
        transitions = (transitions == transitions.amax(-1, keepdim=True)).to(cmdp.dtype) * cmdp.layout.transition_mask()
    return tc.LayeredCMDP(cmdp.layout, transitions, cmdp.rewards, costs)


def soak(name: str, cmdps: tc.LayeredCMDP, options: Options) -> Tally:
    """Play one learner in all CMDPs at once."""
    tally, start = Tally(), time.perf_counter()
    if guarded(name):
        room = tc.slater_gap(cmdps) > program.LEAST_MARGIN
        if not room.any():
            return tally
        cmdps = tc.LayeredCMDP(cmdps.layout, *(x[room] for x in (cmdps.transitions, cmdps.rewards, cmdps.costs)))
    runs = len(cmdps.transitions)
    env = tc.Simulator(cmdps, tc.Bernoulli(cmdps.rewards), tc.Bernoulli(cmdps.costs, low=-1), runs=runs, seed=options.seed)
    settings: dict[str, Any] = dict.fromkeys({"bonus_scale", "radius_scale"} & settings_of(name), options.scale)
    settings |= {"dtype": cmdps.dtype, "device": cmdps.device, **protection(name, cmdps, 0.5, seed=options.seed)}
    learner = tc.LEARNERS[name](cmdps.layout, cmdps.constraints, options.episodes, runs=runs, **settings)
    tracker, sums = tc.Tracker(env), {}
    broken = torch.zeros((), dtype=torch.int64, device=cmdps.device)
    try:
        for _ in bar(range(options.episodes), learner.name):
            shown = measured(learner, tracker)
            trajectory = env.rollout(learner.policy)
            tracker.update(shown, trajectory)
            learner.update(trajectory)
            diagnostics = learner.diagnostics()
            sound = _valid(learner.policy, cmdps.layout)
            for value in diagnostics.values():
                sound = sound & value.isfinite()
            broken = broken + (~sound).sum()
            for tag, value in diagnostics.items():
                before = sums.get(tag, torch.zeros_like(value))
                sums[tag] = torch.maximum(before, value) if tag == "Solver/residual" else before + value
            tally.played += runs
    except Exception as error:  # whatever it is: counting it is what a soak is for
        tally.failures += runs
        tally.error = f"{type(error).__name__} in episode {int(learner.episode)}: {str(error).strip().splitlines()[0]}"
    tracker.record()
    lost = ~(tracker.violation.isfinite().all(1) & tracker.reward.isfinite().all(1))
    tally.failures += int(broken) + int(lost.sum())
    if "Solver/residual" in sums:
        tally.residual = float(sums["Solver/residual"].max())
    tally.counts = {name: int(sums[tag].sum()) for name in COUNTED if (tag := f"Solver/{name}") in sums}
    tally.seconds = time.perf_counter() - start
    return tally


def report(tallies: dict[str, Tally]) -> str:
    """A row a learner and a last one for all of them, and the exceptions below."""
    every = list(tallies.values())
    sums: dict[str, Any] = {name: sum(getattr(tally, name) for tally in every) for name in ("played", "failures", "seconds")}
    sums["counts"] = {kind: sum(tally.counts.get(kind, 0) for tally in every) for kind in COUNTED}
    worst = max((t.residual for t in every if t.residual == t.residual), default=float("nan"))
    rows = []
    for name, tally in {**tallies, "all": Tally(**sums, residual=worst)}.items():
        counts = [f"{tally.counts[kind]:,}" if kind in tally.counts else "-" for kind in COUNTED]
        residual = "-" if tally.residual != tally.residual else f"{tally.residual:.1e}"
        rows.append([name, f"{tally.played:,}", f"{tally.failures:,}", residual, *counts, f"{tally.seconds:,.0f}"])
    header = ["learner", "run-episodes", "failures", "worst residual", *(kind.replace("_", " ") for kind in COUNTED), "seconds"]
    return "\n".join([table(header, rows), *[f"{name}: {tally.error}" for name, tally in tallies.items() if tally.error]])


def _valid(policy: Tensor, layout: tc.Layout) -> Tensor:
    """Which runs have a policy, `(runs,)`: not negative, rows that sum to one, zero in the padding; false for NaN."""
    tolerance = max(ROW_SUM_TOLERANCE, 8 * torch.finfo(policy.dtype).eps)
    fitting = (policy >= 0) & (layout.pair_mask(policy.device) | (policy == 0))
    sums = (policy.sum(-1) - layout.state_mask(policy.device).to(policy.dtype)).abs() <= tolerance
    return fitting.flatten(1).all(1) & sums.flatten(1).all(1)
