"""The paper's constants against the practical ones, at several horizons, on instances that no study has seen."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torchcmdp as tc
from torchcmdp.learners.practical import PRACTICAL_SCALES
from train import check_positive, experiment_folder, parse
from train.bench import table
from train.tune_evaluate import PAPER, evaluate, rows_of, stage
from train.tune_instances import KINDS, make_instances
from train.tune_study import HELD_OUT


@dataclass
class Options:
    """Play WC-OPS with the paper's constants and with those of `WCOPS.practical` on the same instances, at several horizons.

    Every horizon is a run of its own, since the constants depend on it. The instances have seeds from 1000 on, which
    `python -m train tune` does not tune on, and the size of the main job, which is another than that of the study.

    Examples:
      python -m train tune horizons
      python -m train tune horizons --horizons 1000 10000 100000 --instances 10
    """

    horizons: tuple[int, ...] = (1000, 10_000)
    """Episodes of a run."""
    instances: int = 10
    """Seeds of instances, each with stochastic and with changing costs."""
    weight: float = 2.0
    """Of the positive violation in the objective."""
    widths: tuple[int, ...] = (1, 4, 4, 4, 1)
    """States in each layer."""
    actions: int = 3
    """Actions in each state."""
    constraints: int = 2
    """Safety constraints."""
    delta: float = 0.01
    """Failure probability of the confidence sets."""
    seed: int = 0
    """Of all random numbers."""
    name: str = "tune-horizons"
    """Folder of the results inside LOGDIR."""
    logdir: str = "runs"
    """Folder of all experiments."""


def main(arguments: Sequence[str]) -> int:
    """Play all horizons; returns the exit code."""
    options = parse(Options, arguments, prog="python -m train tune horizons")
    folder = experiment_folder(options.logdir, options.name)
    check_positive(horizons=min(options.horizons, default=0), weight=options.weight)
    if options.instances < 2:
        raise tc.InvalidInput(f"--instances is {options.instances}; an interval over instances needs at least 2.")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    methods = {"paper": PAPER, "practical": PRACTICAL_SCALES}
    size = (options.widths, options.actions, options.constraints)
    settings: dict[str, Any] = {"weight": options.weight, "delta": options.delta, "seed": options.seed}
    rows = []
    for horizon in options.horizons:
        instances = make_instances(*size, range(HELD_OUT, HELD_OUT + options.instances), horizon)
        config = {**settings, "size": size, "instances": options.instances, "methods": methods, "kinds": KINDS}
        play: dict[str, Any] = {**settings, "horizon": horizon, "repeats": 1, "progress": sys.stderr.isatty()}
        results = stage(folder, f"horizon_{horizon}", config, lambda i=instances, p=play: evaluate(i, methods, **p))
        rows += rows_of(results, instances.kinds, horizon)
    header = ["episodes", "costs", "constants", "objective", "regret", "violation", "positive violation"]
    text = table(header, sorted(rows, key=lambda row: KINDS.index(row[1])))
    (folder / "report.md").write_text(text + "\n")
    print(text)
    print(f"\nWritten to {folder / 'report.md'}")
    return 0
