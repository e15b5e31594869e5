"""Gradients in a learner's hyperparameters: how regret and violation depend on them, and where to move them."""

from torchcmdp.tuning.estimators import Estimator, Samples, Through, run_derivatives
from torchcmdp.tuning.gradient import ESTIMATORS, Estimate, estimate_gradient
from torchcmdp.tuning.optimise import Descent, TuningResult, optimise, random_search
from torchcmdp.tuning.smoothed import Smoothed
from torchcmdp.tuning.study import SCALES, Derivative, Study, forward_derivative, reverse_derivative
from torchcmdp.tuning.unroll import Played

__all__ = [
    "ESTIMATORS",
    "SCALES",
    "Derivative",
    "Descent",
    "Estimate",
    "Estimator",
    "Played",
    "Samples",
    "Smoothed",
    "Study",
    "Through",
    "TuningResult",
    "estimate_gradient",
    "forward_derivative",
    "optimise",
    "random_search",
    "reverse_derivative",
    "run_derivatives",
]
