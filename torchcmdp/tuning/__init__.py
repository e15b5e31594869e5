"""Gradients in a learner's hyperparameters: how regret and violation depend on them, and where to move them."""

from torchcmdp.tuning.estimators import Estimator, Samples, Through, run_derivatives
from torchcmdp.tuning.gradient import ESTIMATORS, Estimate, estimate_gradient
from torchcmdp.tuning.optimise import Descent, TuningResult, optimise, random_search
from torchcmdp.tuning.smoothed import Smoothed
from torchcmdp.tuning.study import SCALES, Derivative, Study, forward_derivative, reverse_derivative
from torchcmdp.tuning.unroll import Played

__all__ = ["Estimator", "Samples", "Smoothed", "Through", "run_derivatives", "ESTIMATORS", "Estimate", "estimate_gradient"]
__all__ += ["Descent", "TuningResult", "optimise", "random_search"]
__all__ += ["SCALES", "Derivative", "Played", "Study", "forward_derivative", "reverse_derivative"]
