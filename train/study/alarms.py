"""How often the drift test rings where nothing has changed, at several lengths of an episode and with noise as loud as it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

import torchcmdp as tc

from ..program import Count, bar, begin, publish, table, with_interval
from ..tune.evaluate import play_out, stage

SIZES = {"1 step": (1, 1), "4 steps": (1, 4, 4, 4, 1), "8 steps": (1, 2, 2, 2, 2, 2, 2, 2, 1)}
NOISES = ("random means", "means of zero")


@dataclass
class Options:
    """Play practical WC-OPS with stochastic costs and count the alarms of its drift test, all of which are false.

    Costs are -1 or 1. With means of zero their noise is as loud as the test's unit says; with random means it is quieter.

    Examples:
      python -m train study alarms
    """

    episodes: Count = 10_000  # Episodes of a run.
    runs: Count = 16  # Random CMDPs of each size, one run each.
    constraints: Count = 2  # Each with a test of its own.
    seed: int = 0  # Of the first CMDP and of all random numbers.
    name: str = "study-alarms"  # Folder of the results inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments.


def main(arguments: Sequence[str]) -> None:
    """Count the alarms."""
    options, folder = begin(Options, arguments, "study alarms")
    rows, config = [], {name: value for name, value in vars(options).items() if name not in ("name", "logdir")}
    for size, noise in bar([(size, noise) for size in SIZES for noise in NOISES], "alarms"):
        found = stage(folder, f"{size}_{noise}".replace(" ", "-"), config, partial(count, options, size, noise))
        each = torch.tensor(found, dtype=torch.float64) * 10_000 / options.episodes / options.constraints
        rows.append([size, noise, with_interval(each, ".2f")])
    publish(folder / "report.md", table(["episode", "costs", "false alarms in 10,000 episodes of a constraint"], rows))


def count(options: Options, size: str, noise: str) -> list[float]:
    """Alarms of every run, over all constraints."""
    seeds = range(options.seed, options.seed + options.runs)
    cmdp = tc.stack_cmdps([tc.random_cmdp(SIZES[size], 3, options.constraints, seed) for seed in seeds])
    costs = cmdp.costs if noise == NOISES[0] else torch.zeros_like(cmdp.costs)
    cmdp = tc.LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards, costs)
    env = tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), tc.Bernoulli(costs, low=-1), runs=options.runs, seed=options.seed)
    learner = tc.WCOPS.practical(cmdp.layout, options.constraints, options.episodes, runs=options.runs)
    result = play_out(learner, env, options.episodes)
    return (result.diagnostics["Learner/drift_alarms"] * options.episodes).tolist()  # type: ignore[no-any-return]
