"""The rivals' constants, by a search over a declared grid on the instances that WC-OPS was tuned on, by the same objective."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torchcmdp as tc
from torchcmdp.learners import LEARNERS
from train.paper.presets import settings
from train.program import Count, Positive, bar, begin, publish, table
from train.tune.evaluate import stage
from train.tune.instances import Instances, make_instances

SCALES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
STEPS = (1.0, 3.0, 10.0, 30.0, 100.0)
# By learner, what is tried, every combination: multiples of its radii and bonuses, of its steps, and the modes of its radii. These
# vary from run to run within a batch; a mode is a batch of its own.
GRIDS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "opt-cmdp": {"radii": ("matched", "published", "literal"), "scale": SCALES},
    "opt-primal-dual": {"radii": ("matched",), "scale": SCALES, "steps": STEPS},
    "pdb-ps": {"confidence": ("entrywise",), "scale": SCALES, "steps": STEPS},
}


@dataclass
class Options:
    """Find constants for the rivals of WC-OPS, as fairly as those of `WCOPS.practical` were found.

    Every combination of a grid, declared in train/tune/rivals.py, is played on the training instances of `python -m train tune`,
    and the one with the least (regret + weight * positive violation) / horizon is printed. `python -m train paper` plays with it
    in its family `tuned`.

    Examples:
      python -m train tune rivals
      python -m train tune rivals --horizon 200 --instances 2 --name short
    """

    horizon: Count = 1000  # Episodes of a run.
    weight: Positive = 3.0  # Of the positive violation in the objective; above every multiplier of the instances.
    instances: Count = 4  # Seeds of the training instances, each with stochastic and with changing costs.
    runs: Count = 4  # Of every combination on each instance; all combinations meet the same random numbers.
    widths: tuple[int, ...] = (1, 3, 3, 1)  # States in each layer.
    actions: Count = 3  # Actions in each state.
    constraints: Count = 2  # Safety constraints.
    delta: float = 0.01  # Failure probability of the confidence sets.
    seed: int = 0  # Of the training instances and of all random numbers.
    name: str = "tune-rivals"  # Folder of the results inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments.


def main(arguments: Sequence[str]) -> int:
    """Search for all rivals; returns the exit code."""
    options, folder = begin(Options, arguments, "tune rivals")
    seeds = range(options.seed, options.seed + options.instances)
    training = make_instances(options.widths, options.actions, options.constraints, seeds, options.horizon)
    training.check_weight(options.weight)
    config = {name: value for name, value in vars(options).items() if name not in ("name", "logdir")}
    rows = []
    for key, grid in bar(list(GRIDS.items()), "rivals"):
        found = stage(folder, key, {**config, "grid": grid}, lambda k=key, g=grid: search(options, training, k, g))
        best = min(found, key=lambda point: point["objective"])
        for point in sorted(found, key=lambda point: point["objective"])[:3]:
            constants = ", ".join(f"{name} {point[name]}" for name in grid)
            numbers = [f"{point[name]:,.3f}" for name in ("objective", "regret", "positive violation")]
            rows.append([LEARNERS[key].name, constants, *numbers, "best" if point is best else ""])
    text = table(["learner", "constants", "objective", "regret", "positive violation", ""], rows)
    publish(
        folder / "report.md",
        f"The best three of every grid; means over {len(training.kinds)} instances, {options.runs} runs each.\n\n{text}",
    )
    return 0


def search(options: Options, training: Instances, key: str, grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of a grid: its constants and what came of them, in the mean over the instances."""
    (mode, values), *rest = grid.items()
    points = [dict(zip(dict(rest), combination, strict=True)) for combination in itertools.product(*dict(rest).values())]
    found = []
    for value in values:
        block = len(training.kinds) * options.runs
        which = torch.arange(len(training.kinds)).repeat(options.runs * len(points))
        env = training.environment(which, options.seed, block)
        per_run = {name: torch.tensor([point[name] for point in points], dtype=torch.float64) for name in dict(rest)}
        constants = {name: tensor.repeat_interleave(block) for name, tensor in per_run.items()}
        own = settings(key, {mode: value, **constants}, env.cmdp)
        size = (env.cmdp.layout, env.cmdp.constraints, options.horizon, options.delta, env.runs)
        result = tc.run(LEARNERS[key](*size, **own), env, options.horizon, progress=False)
        if not result.completed:  # half a run must not be kept
            raise KeyboardInterrupt
        regret, unsafe = result.regret[:, -1], result.positive_violation_by_constraint[:, -1].sum(-1)
        measures = {
            "objective": (regret + options.weight * unsafe) / options.horizon,
            "regret": regret,
            "positive violation": unsafe,
        }
        for j, point in enumerate(points):
            rows = slice(j * block, (j + 1) * block)
            found.append({mode: value, **point, **{name: float(x[rows].mean()) for name, x in measures.items()}})
    return found
