"""The paper's constants against the practical ones, at several horizons, on instances that no study has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torchcmdp.learners.practical import PRACTICAL_SCALES

from ..program import Count, at_least, begin, publish, table
from .evaluate import MEASURES, PAPER, evaluate, rows_of, stage
from .instances import HELD_OUT, KINDS, RULES, InstanceOptions


@dataclass
class Options(InstanceOptions):
    """Play WC-OPS with the paper's constants and with those of `WCOPS.practical` on the same instances, at several horizons.

    Every horizon is a run of its own, since the constants depend on it. The instances have seeds from 1000 on, which
    `python -m train tune` does not tune on, and the size of the main job, which is another than that of the study.

    Examples:
      python -m train tune horizons
      python -m train tune horizons --horizons 1000 10000 100000 --instances 10
    """

    horizons: tuple[Count, ...] = (1000, 10_000)  # Episodes of a run.
    instances: Annotated[int, at_least(2, "an interval over instances")] = 10
    """Seeds of instances, each with stochastic and with changing costs."""
    widths: tuple[int, ...] = (1, 4, 4, 4, 1)  # States in each layer.
    seed: int = 0  # Of all random numbers.
    name: str = "tune-horizons"  # Folder of the results inside LOGDIR.


def main(arguments: Sequence[str]) -> None:
    """Play all horizons."""
    options, folder = begin(Options, arguments, "tune horizons")
    methods = {"paper": PAPER, "practical": PRACTICAL_SCALES}
    size = (options.widths, options.actions, options.constraints)
    settings: dict[str, Any] = {"weight": options.weight, "delta": options.delta, "seed": options.seed}
    rows = []
    for horizon in options.horizons:
        instances = options.drawn(range(HELD_OUT, HELD_OUT + options.instances), horizon)
        instances.check_weight(options.weight)
        config = {**settings, "size": size, "instances": options.instances, "methods": methods, "kinds": KINDS, **RULES}
        results = stage(folder, f"horizon_{horizon}", config, lambda i=instances, T=horizon: evaluate(i, methods, T, **settings))
        rows += rows_of(results, instances.kinds, horizon)
    header = ["episodes", "costs", "constants", *MEASURES]
    publish(folder / "report.md", table(header, sorted(rows, key=lambda row: KINDS.index(row[1]))))
