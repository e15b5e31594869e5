"""Gradients through the learner: how regret and violation depend on its hyperparameters, and where to move them."""

from torchcmdp.tuning.optimise import (
    Descent,
    Estimate,
    TuningResult,
    estimate_gradient,
    optimise,
    random_search,
    run_derivatives,
)
from torchcmdp.tuning.study import SCALES, Derivative, Played, Study, forward_derivative, reverse_derivative

__all__ = [
    "SCALES",
    "Derivative",
    "Descent",
    "Estimate",
    "Played",
    "Study",
    "TuningResult",
    "estimate_gradient",
    "forward_derivative",
    "optimise",
    "random_search",
    "reverse_derivative",
    "run_derivatives",
]
