"""Where rewards and costs come from: a process has a mean for every pair and episode, and turns visits into feedback."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchcmdp.errors import InvalidInput


class Process:
    """The rewards, or the costs, of every pair over the episodes of a batch of runs.

    In each episode the simulator reads `values`, shows the learner `observe` of them at the visited pairs, and then calls
    `advance` with the policy that was played. A subclass whose values change sets them in `advance` to a new tensor; it never
    writes into the old one, which the metrics of the episode just played still refer to. It keeps what it needs to continue in
    `state_dict`.
    """

    @property
    def values(self) -> Tensor:
        """The conditional mean of this episode's feedback given the past, zero in the padding.

        `(L x S x A)` for rewards and `(m x L x S x A)` for costs, with an axis of runs in front where the runs differ.
        """
        raise NotImplementedError

    def observe(self, values: Tensor, uniforms: Tensor) -> Tensor:
        """The feedback at the visited pairs; by default the mean itself.

        Args:
            values: `self.values` at the visited pairs, `(runs x L)` for rewards and `(runs x L x m)` for costs.
            uniforms: Independent numbers in [0, 1), of the same shape.
        """
        return values

    def advance(self, policy: Tensor) -> None:
        """Move on to the next episode, knowing the policy just played, `(runs x L x S x A)`."""

    def state_dict(self) -> dict[str, Any]:
        """What changes over the episodes: tensors and plain numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        if state:
            raise InvalidInput(f"{type(self).__name__} keeps no state, but was given {', '.join(sorted(state))}.")

    def config(self) -> dict[str, Any]:
        """What defines the process, ready for JSON."""
        return {"name": type(self).__name__}


class Fixed(Process):
    """The feedback of a pair is its mean, in every episode.

    Args:
        mean: `([runs x] L x S x A)` for rewards or `([runs x] m x L x S x A)` for costs.
    """

    def __init__(self, mean: Tensor) -> None:
        _check_mean(type(self).__name__, mean, -1.0)
        self._mean = mean.detach()

    @property
    def values(self) -> Tensor:
        return self._mean

    def config(self) -> dict[str, Any]:
        return {**super().config(), "mean": fingerprint(self._mean)}


class Bernoulli(Process):
    """The feedback of a pair is 1 with probability (mean - low) / (1 - low) and `low` otherwise, independently in every episode.

    Args:
        mean: In [low, 1]; `([runs x] L x S x A)` for rewards or `([runs x] m x L x S x A)` for costs.
        low: 0 for rewards, -1 for costs.
    """

    def __init__(self, mean: Tensor, low: float = 0.0) -> None:
        if not -1 <= low <= 0:
            raise InvalidInput(f"low is {low}; it must lie in [-1, 0], 0 for rewards and -1 for costs.")
        _check_mean(type(self).__name__, mean, low)
        self._mean = mean.detach()
        self.low = float(low)

    @property
    def values(self) -> Tensor:
        return self._mean

    def observe(self, values: Tensor, uniforms: Tensor) -> Tensor:
        success = uniforms * (1 - self.low) < values - self.low
        return success.to(values.dtype) * (1 - self.low) + self.low

    def config(self) -> dict[str, Any]:
        return {**super().config(), "low": self.low, "mean": fingerprint(self._mean)}


def fingerprint(tensor: Tensor) -> str:
    """A short name for a tensor's shape, type and contents: two runs are resumable into each other only if theirs agree."""
    head = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    body = b"" if tensor.device.type == "meta" else tensor.detach().cpu().contiguous().numpy().tobytes()
    return hashlib.sha256(head + body).hexdigest()[:16]


def _check_mean(name: str, mean: Tensor, low: float) -> None:
    if not isinstance(mean, Tensor) or not mean.is_floating_point() or mean.dim() < 3:
        raise InvalidInput(f"The mean of {name} must be a floating-point tensor that ends in (L x S x A), not {_describe(mean)}.")
    if mean.device.type == "meta":
        return
    wrong = ~((mean >= low) & (mean <= 1))  # true for NaN as well
    if wrong.any():
        index = wrong.nonzero()[0].tolist()
        raise InvalidInput(
            f"The mean of {name} is {mean[tuple(index)].item():.12g} at index {index}; expected a value in [{low:g}, 1]."
        )


def _describe(value: object) -> str:
    return f"a tensor of {value.dtype} and shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
