"""Learners: anything with a `policy` and an `update(trajectory)`."""

from torchcmdp.learners.base import Learner
from torchcmdp.learners.wcops import WCOPS

__all__ = ["Learner", "WCOPS"]
