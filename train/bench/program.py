"""The optimistic linear program of OptCMDP: ours for a whole batch against HiGHS, one instance after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import torchcmdp as tc

from .. import extended_lp
from ..program import Count, bar, begin, publish, table
from . import BenchOptions, median_seconds

AIM = 20


@dataclass
class Options(BenchOptions):
    """Time the optimistic linear program on what OptCMDP asks midway through a run, against HiGHS on the extended program.

    HiGHS gets its matrices ready-made: only its two calls an instance (least violation, then best reward; the first is left out
    where it is known to be zero) are timed.

    Examples:
      python -m train bench program
      python -m train bench program --constraints 1 4 --batches 128
    """

    batches: tuple[Count, ...] = (1, 10, 128)  # How many runs are solved at once.
    constraints: tuple[Count, ...] = (1, 2, 4)  # Numbers of safety constraints.
    episodes: Count = 300  # Episodes that OptCMDP plays before its programs are timed.
    repeats: Count = 20  # Timed repetitions of ours; the median counts.
    highs_instances: Count = 20  # Instances given to HiGHS; its time per instance is their mean.


def instances(constraints: int, runs: int, episodes: int, seed: int) -> tuple[torch.Tensor, tc.SafeSet]:
    """The programs of OptCMDP after some episodes, with its widths at a tenth so that the constraints matter."""
    cmdp = tc.random_cmdp((1, 4, 4, 4, 1), 3, constraints, seed)
    env = tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1), runs=runs, seed=seed)
    learner = tc.OptCMDP(cmdp.layout, constraints, 10_000, runs=runs, bonus_scale=0.1, radius_scale=0.1)
    for _ in range(episodes):
        learner.update(env.rollout(learner.policy))
    return learner.program()


def highs_seconds(rewards: torch.Tensor, safe_set: tc.SafeSet, count: int) -> tuple[float, float]:
    """Seconds per instance of HiGHS, and the largest difference between its values and ours."""
    ours = tc.optimistic_optimum(rewards, safe_set)
    total, difference = 0.0, 0.0
    count = min(count, len(rewards))
    for j in range(count):
        arrays = (tensor[j].numpy() for tensor in (safe_set.lower, safe_set.upper, safe_set.costs))
        program = extended_lp.build(safe_set.layout, *arrays)
        if not float(ours.excess[j]):
            program = program._replace(constraints=0)
        start = time.perf_counter()
        value, _ = extended_lp.optimise(program, rewards[j].numpy())
        total += time.perf_counter() - start
        difference = max(difference, abs(value - float(ours.value[j])))
    return total / count, difference


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark."""
    options, folder = begin(Options, arguments, "bench program")
    rows = []
    for m in bar(options.constraints, "timing", leave=False):
        rewards, safe_set = instances(m, max(options.batches), options.episodes, options.seed)
        rival, difference = highs_seconds(rewards, safe_set, options.highs_instances)
        for batch in options.batches:
            part = tc.SafeSet(safe_set.layout, safe_set.lower[:batch], safe_set.upper[:batch], safe_set.costs[:batch])
            solve = lambda batch=batch, part=part, rewards=rewards: tc.optimistic_optimum(rewards[:batch], part)  # noqa: E731
            ours = median_seconds(solve, options.repeats) / batch
            ratio = rival / ours
            met = "" if batch < 128 else f" (aim {AIM}x: {'met' if ratio >= AIM else 'missed'})"
            tried = float(solve().iterations.double().mean())
            row = [str(m), str(batch), f"{1e6 * ours:,.0f}", f"{1e6 * rival:,.0f}", f"{ratio:,.0f}x{met}", f"{tried:.1f}"]
            rows.append([*row, f"{difference:.0e}"])
    header = ["m", "batch", "ours, us per instance", "HiGHS, us per instance", "faster", "policies tried", "largest difference"]
    publish(folder / "program.md", table(header, rows))
