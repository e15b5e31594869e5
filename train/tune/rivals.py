"""Constants for every learner by a search over the same declared grid, on the same instances, by the same objective."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchcmdp.learners import LEARNERS

from ..paper.presets import settings
from ..program import Count, bar, begin, publish, table
from .evaluate import play_out, spread, stage
from .instances import RULES, InstanceOptions, Instances

SCALES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
STEPS = (1.0, 3.0, 10.0, 30.0, 100.0)
# By learner, what is tried, every combination: multiples of its radii and bonuses, of its steps, and the modes of its radii. These
# vary from run to run within a batch; a mode is a batch of its own.
GRIDS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "wc-ops": {"confidence": ("entrywise",), "scale": SCALES, "steps": STEPS},
    "opt-cmdp": {"radii": ("matched", "published", "literal"), "scale": SCALES},
    "opt-primal-dual": {"radii": ("matched",), "scale": SCALES, "steps": STEPS},
    "pdb-ps": {"confidence": ("entrywise",), "scale": SCALES, "steps": STEPS},
}


@dataclass
class Options(InstanceOptions):
    """Find constants for WC-OPS and its rivals, by the same search and with the same effort for each point.

    Every combination of a grid, declared in train/tune/rivals.py, is played on the training instances of `python -m train tune`.
    The runs are dealt into repetitions; in each of them the combinations are ranked by (regret + weight * positive violation) /
    horizon, and the one with the least mean rank is taken: single repetitions often disagree about neighbours in the grid.
    `python -m train paper` plays with it in its family `tuned`.

    Examples:
      python -m train tune rivals
      python -m train tune rivals --horizon 200 --instances 2 --name short
    """

    horizon: Count = 1000  # Episodes of a run.
    runs: Count = 2  # Of every combination on each instance in a repetition; all combinations meet the same random numbers.
    repetitions: Count = 5  # Among which the ranks are averaged.
    name: str = "tune-rivals"  # Folder of the results inside LOGDIR.


def main(arguments: Sequence[str]) -> None:
    """Search for all rivals."""
    options, folder = begin(Options, arguments, "tune rivals")
    training = options.training(options.horizon)
    training.check_weight(options.weight)
    rows = []
    for key, grid in GRIDS.items():
        config = {**options.settings(), "grid": grid, **RULES}
        found = stage(folder, key, config, lambda k=key, g=grid: search(options, training, k, g))
        for point in ranked(found)[:3]:
            constants = ", ".join(f"{name} {point[name]}" for name in grid)
            first = f"{point['first']} of {options.repetitions}"
            numbers = [f"{point[name]:,.3f}" for name in ("objective", "regret", "positive violation")]
            rows.append([LEARNERS[key].name, constants, f"{point['rank']:.1f}", first, *numbers])
    text = table(["learner", "constants", "mean rank", "first in", "objective", "regret", "positive violation"], rows)
    effort = options.horizon * options.runs * options.repetitions * len(training.kinds)
    spent = ", ".join(f"{LEARNERS[key].name} {effort * math.prod(map(len, grid.values())):,}" for key, grid in GRIDS.items())
    words = f"{len(training.kinds)} instances, {options.repetitions} repetitions of {options.runs} runs on each"
    publish(folder / "report.md", f"The best three of every grid, by mean rank; {words}. Run-episodes: {spent}.\n\n{text}")


def ranked(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The points by their mean rank over the repetitions, then by their objective; with the rank, and how often each was first."""
    objectives = torch.tensor([point["objectives"] for point in found], dtype=torch.float64)
    ranks = objectives.argsort(0).argsort(0) + 1  # (points x repetitions), 1 for the least
    points = [
        {**point, "rank": float(rank.double().mean()), "first": int((rank == 1).sum()), "objective": float(values.mean())}
        for point, rank, values in zip(found, ranks, objectives, strict=True)
    ]
    return sorted(points, key=lambda point: (point["rank"], point["objective"]))


def search(options: Options, training: Instances, key: str, grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of a grid: its constants, its objective in every repetition, and its regret and violation in the mean."""
    (mode, values), *rest = grid.items()
    points = [dict(zip(dict(rest), combination, strict=True)) for combination in itertools.product(*dict(rest).values())]
    found = []
    for j, value in enumerate(values, 1):
        runs = options.runs * options.repetitions
        block = len(training.kinds) * runs
        which = torch.arange(len(training.kinds)).repeat(runs * len(points))
        env = training.environment(which, options.seed, block)
        own = settings(key, {mode: value, **spread(points, block)}, env.cmdp)
        size = (env.cmdp.layout, env.cmdp.constraints, options.horizon, options.delta, env.runs)
        learner = LEARNERS[key].scaled(*size, **own)
        with bar(None, f"{learner.name}, {j} of {len(values)}", total=options.horizon, unit="ep") as shown:
            result = play_out(learner, env, options.horizon, shown.update)
        ends = (result.regret[:, -1], result.positive_violation_by_constraint[:, -1].sum(-1))
        for point, regret, unsafe in zip(points, *(x.view(len(points), options.repetitions, -1) for x in ends), strict=True):
            objectives = ((regret + options.weight * unsafe) / options.horizon).mean(-1).tolist()
            means = {"regret": float(regret.mean()), "positive violation": float(unsafe.mean())}
            found.append({mode: value, **point, "objectives": objectives, **means})
    return found
