"""The empirical violation threshold: does it stay asleep where costs are stochastic, and what does it do where they change?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import torchcmdp as tc
from torchcmdp.learners.practical import PRACTICAL_SCALES

from ..program import Count, bar, begin, publish, table, with_interval
from .evaluate import play_out, stage
from .instances import RULES, make_instances

MEASURED = ("regret", "violation", "positive violation")
SIZES: dict[str, tuple[tuple[int, ...], int, int]] = {"bandit": ((1, 1), 3, 1), "layered": ((1, 3, 3, 1), 3, 1)}
# What is compared, all with the bonus and the widths of `WCOPS.practical`.
THRESHOLDS: dict[str, dict[str, Any]] = {
    "plain mean": {"threshold_scale": 1e9},  # Gamma never reacts to one this high
    "paper's threshold": {"violation_threshold": "paper", "threshold_scale": 1.0},
    "empirical threshold": {"violation_threshold": "empirical", "threshold_scale": 1.0},
    "tuned threshold": {"violation_threshold": "paper"},
}


@dataclass
class Options:
    """Measure the data-driven threshold of the adaptive weights (`violation_threshold="empirical"`).

    First its premise: with stochastic costs the excess Gamma should stay zero in at least 99% of the episodes, with the widths of
    the paper and with those of `WCOPS.practical`. Then its use: with costs that change after a third of the horizon, the violation
    with it, with the paper's threshold, with the tuned one and with the plain mean, all with the practical widths. Both on
    bandits and on layered CMDPs.

    Examples:
      python -m train tune threshold
      python -m train tune threshold --horizon 2000 --instances 20 --name short
    """

    horizon: Count = 20_000  # Episodes of a run on the bandits.
    layered_horizon: Count = 2000  # Episodes of a run on the layered CMDPs.
    instances: Count = 100  # Random instances of each size, one run each.
    delta: float = 0.01  # Failure probability of the confidence sets.
    seed: int = 0  # Of the first instance and of all random numbers.
    name: str = "tune-threshold"  # Folder of the results inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments.


def main(arguments: Sequence[str]) -> None:
    """Run both experiments."""
    options, folder = begin(Options, arguments, "tune threshold")
    rows, plain = [], {}
    # for each size the premise, then what is compared: kind of costs, widths, threshold
    premise = [("paper", "empirical threshold"), ("practical", "empirical threshold"), ("practical", "tuned threshold")]
    cases = [("stochastic", *case) for case in premise] + [("adversarial", "practical", label) for label in THRESHOLDS]
    for size, kind, widths, label in bar([(size, *case) for size in SIZES for case in cases], "threshold"):
        horizon = options.horizon if size == "bandit" else options.layered_horizon
        scales = {**(PRACTICAL_SCALES if widths == "practical" else {}), **THRESHOLDS[label]}
        name = "_".join((size, kind, widths, label)).replace(" ", "_").replace("'", "")
        config = {"horizon": horizon, "instances": options.instances, "delta": options.delta, "seed": options.seed, **RULES}
        work = partial(play, options, size, kind, scales, horizon)
        found = stage(folder, name, {**config, "scales": scales, "size": SIZES[size]}, work)
        ends = {key: torch.tensor(values, dtype=torch.float64) for key, values in found.items()}
        if label == "plain mean":
            plain[size, kind] = ends
        awake = [f"{float(ends['awake'].mean()):.2%}", str(int((ends["awake"] > 0.01).sum()))]
        numbers = [with_interval(ends[measure]) for measure in MEASURED]
        before = plain.get((size, kind))  # on the same instances
        less = "-" if before is None else with_interval(ends["positive violation"] - before["positive violation"])
        rows.append([size, f"{horizon:,}", kind, widths, label, *awake, *numbers, less])
    header = ["instances", "episodes", "costs", "widths", "threshold", "Gamma > 0", "instances above 1%", *MEASURED]
    publish(folder / "report.md", table([*header, "less the plain mean's"], rows))


def play(options: Options, size: str, kind: str, scales: dict[str, Any], horizon: int) -> dict[str, list[float]]:
    """One run of every instance: share of episodes in which Gamma was positive, regret and violations at the end."""
    instances = make_instances(*SIZES[size], range(options.seed, options.seed + options.instances), horizon, (kind,))
    env = instances.environment(torch.arange(options.instances), options.seed)
    cmdp = env.cmdp
    learner = tc.WCOPS.scaled(cmdp.layout, cmdp.constraints, horizon, options.delta, env.runs, **scales)
    result = play_out(learner, env, horizon)
    return {
        "awake": result.diagnostics["Learner/gamma_active"].tolist(),
        **{name: getattr(result, name.replace(" ", "_"))[:, -1].tolist() for name in MEASURED},
    }
