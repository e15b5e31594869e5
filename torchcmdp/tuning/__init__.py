"""Gradients through the learner: how regret and violation depend on its hyperparameters, and where to move them."""

from torchcmdp.tuning.study import SCALES, Derivative, Played, Study, forward_derivative, reverse_derivative

__all__ = ["SCALES", "Derivative", "Played", "Study", "forward_derivative", "reverse_derivative"]
