"""Processes whose mean never changes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from torchcmdp.identity import fingerprint
from torchcmdp.processes.base import Noisy, Process, check_low, check_mean


class _Stationary(Process):
    """One mean for all episodes."""

    stationary = True
    _mean: Tensor

    @property
    @override
    def values(self) -> Tensor:
        return self._mean

    @override
    def config(self) -> dict[str, Any]:
        return {**super().config(), "mean": fingerprint(self._mean)}


class Fixed(_Stationary):
    """The feedback of a pair is its mean, in every episode.

    Args:
        mean: `([runs x] L x S x A)` for rewards or `([runs x] m x L x S x A)` for costs.
    """

    def __init__(self, mean: Tensor) -> None:
        self._mean = check_mean(type(self).__name__, mean, -1.0)


class Bernoulli(Noisy, _Stationary):
    """The feedback of a pair is 1 with probability (mean - low) / (1 - low) and `low` otherwise, independently in every episode.

    Args:
        mean: In [low, 1]; `([runs x] L x S x A)` for rewards or `([runs x] m x L x S x A)` for costs.
        low: 0 for rewards, -1 for costs.
    """

    def __init__(self, mean: Tensor, low: float = 0.0) -> None:
        self.low = check_low(low)
        self._mean = check_mean(type(self).__name__, mean, self.low)

    @override
    def config(self) -> dict[str, Any]:
        return {**super().config(), "low": self.low}
