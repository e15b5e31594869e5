"""The gradient of a study's objective at a point, by any estimator, with its standard error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchcmdp.errors import brief, check_kind, check_memory, choice, positive, whole_number
from torchcmdp.metrics import mean_and_interval
from torchcmdp.tuning.estimators import Estimator, Samples, Through, Tick
from torchcmdp.tuning.smoothed import Smoothed
from torchcmdp.tuning.study import Study, check_study

# By shorthand. The second has a bias and a spread that stays bounded; the third is unbiased, and of use for short horizons only.
ESTIMATORS: Mapping[str, Estimator] = {
    "smoothed": Smoothed(),
    "mixed": Through(),
    "sampled": Through("sampled", memory=1.0, run_clip=None),
    "pathwise": Through("sampled", memory=1.0, score=False, run_clip=None),
    "expected": Through("expected", memory=1.0, run_clip=None),
}


@dataclass(frozen=True, eq=False)
class Estimate:
    """A point of a study, over all instances and repeats.

    Attributes:
        objective, regret, violation, positive_violation: Means over the runs; the violations are those of the worst constraint.
        gradient: Of the objective in the logarithms of the scales, `(P,)`.
        standard_error: Of the gradient, `(P,)`.
        half_width: Of its 95% interval, `(P,)`.
    """

    objective: float
    regret: float
    violation: float
    positive_violation: float
    gradient: Tensor
    standard_error: Tensor
    half_width: Tensor


def estimator_of(estimator: str | Estimator) -> Estimator:
    """An estimator, by itself or by its shorthand."""
    if isinstance(estimator, Estimator):
        return estimator
    check_kind("estimator", estimator, str, f"an Estimator, or one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[choice("estimator", estimator, tuple(ESTIMATORS))]


def estimate_gradient(
    study: Study,
    scales: Mapping[str, float],
    *,
    estimator: str | Estimator = "smoothed",
    repeats: int = 8,
    seed: int = 0,
    tick: Tick | None = None,
) -> Estimate:
    """The objective and its gradient, with intervals over instances and repeats.

    Args:
        study: What to tune, on what.
        scales: Where, P of `study.names`; those left out are fixed.
        estimator: "smoothed" (any learner, any horizon), "mixed", "sampled", "pathwise" or "expected" (through WC-OPS), or one with
            settings, such as `Smoothed(sigma=0.5)`.
        repeats: Samples of each instance: pairs of runs, or runs of each partial derivative.
        seed: Of the trajectories.
        tick: Called after every episode.
    """
    check_study(study)
    check_kind("tick", tick, Callable | None, "a function without arguments, or None")
    how, names, point = estimator_of(estimator), tuple(study.check(scales)), log_point(scales)
    repeats = whole_number("repeats", repeats, least=1)
    check_memory(f"{brief(repeats)} repeats", how.runs(study, len(names), repeats) * len(names) * 4)
    return summary(study, how.samples(study, names, point, repeats, whole_number("seed", seed, least=0), tick))


def log_point(scales: Mapping[str, float]) -> Tensor:
    """The logarithms of positive scales, `(P,)`."""
    return torch.tensor([positive(name, value) for name, value in scales.items()], dtype=torch.float64).log()


def summary(study: Study, found: Samples) -> Estimate:
    """Means and errors of samples."""
    gradient, half = mean_and_interval(found.derivatives)
    error = found.derivatives.std(0) / len(found.derivatives) ** 0.5
    return Estimate(gradient=gradient, standard_error=error, half_width=half, **values_of(study, found.played))


def values_of(study: Study, played: Any) -> dict[str, float]:
    """The means over runs that an `Estimate` has."""
    return {
        "objective": float(study.objective(played.parts).mean()),
        "regret": float(played.regret.mean()),
        "violation": float(played.worst_violation.mean()),
        "positive_violation": float(played.worst_positive_violation.mean()),
    }
