"""What every process is: a mean for every pair and episode, and a way to turn visits into feedback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from torchcmdp.errors import InvalidInput, brief, first, number, tensors_of
from torchcmdp.identity import config_of, fingerprint
from torchcmdp.protocols import Axes, first_axes


class Process:
    """The rewards, or the costs, of every pair over the episodes of a batch of runs.

    In each episode the simulator reads `values`, shows the learner `observe` of them at the visited pairs, and then calls
    `advance` with the policy that was played. A subclass whose values change sets them in `advance` to a new tensor; it never
    writes into the old one, which the metrics of the episode just played still refer to. It keeps what it needs to continue in
    `state_dict`.

    Attributes:
        stationary: Whether `values` never change. Where they may, comparators are computed in hindsight, from what was played.
    """

    stationary: bool = False
    _settings: ClassVar[tuple[str, ...]] = ()  # the attributes that define a process of ours

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

    def largest(self, values: Tensor) -> Tensor:
        """The largest feedback that pairs of these means can give, of the shape of `values`; by default the mean itself."""
        return values

    def advance(self, policy: Tensor) -> None:
        """Move on to the next episode, knowing the policy just played, `(runs x L x S x A)`."""

    def state_dict(self) -> dict[str, Any]:
        """What changes over the episodes: tensors and plain numbers."""
        return {}

    def state_axes(self, mean_axes: int) -> Axes:
        """Of each entry of `state_dict` the axis of the runs, None where all runs share it.

        By default a tensor has the runs in front, unless it has the axes of one mean for all, 3 for rewards and 4 for costs.
        """
        return first_axes(self.state_dict(), mean_axes)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        if state:
            raise InvalidInput(f"{type(self).__name__} keeps no state, but was given {', '.join(sorted(state))}.")

    def config(self) -> dict[str, Any]:
        """What defines the process, ready for JSON; of a subclass that does not write its own, `run` records the attributes."""
        return {"name": type(self).__name__, **{name.lstrip("_"): _told(getattr(self, name)) for name in self._settings}}


def _told(value: Any) -> Any:
    """A setting ready for JSON."""
    if isinstance(value, Tensor):
        return fingerprint(value)
    if isinstance(value, list):
        return [_told(each) for each in value]
    return value if isinstance(value, int | float | str | None) else config_of(value)


class Counted(Process):
    """A process that needs to know nothing but how many episodes have been played, its `episode`."""

    episode: int = 0

    @override
    def advance(self, policy: Tensor) -> None:
        self.episode += 1

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"episode": self.episode}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(self, state, "episode")
        self.episode = int(state["episode"])


class Noisy(Process):
    """A process whose feedback is 1 with probability (mean - low) / (1 - low) and `low` otherwise; without noise, the mean.

    Attributes:
        noise: "bernoulli" or None.
        low: 0 for rewards, -1 for costs.
    """

    noise: str | None = "bernoulli"
    low: float = 0.0

    @override
    def observe(self, values: Tensor, uniforms: Tensor) -> Tensor:
        if self.noise is None:
            return values
        success = uniforms * (1 - self.low) < values - self.low
        return success.to(values.dtype) * (1 - self.low) + self.low

    @override
    def largest(self, values: Tensor) -> Tensor:
        return values if self.noise is None else torch.where(values > self.low, torch.ones_like(values), values)


def stateless(process: Any) -> Any | None:
    """The process, or the one inside it, that changes and does not say in a `state_dict` how to continue; None where there is none.

    Who writes an `advance` writes the `state_dict` for it, in the same class or below.
    """
    if process.stationary:
        return None
    kinds = type(process).__mro__
    moves, keeps = (next((j for j, kind in enumerate(kinds) if name in vars(kind)), -1) for name in ("advance", "state_dict"))
    if keeps < 0 or kinds[keeps] is Process or moves < keeps:
        return process
    return stateless(process.process) if hasattr(process, "process") else None


def check_mean(name: str, mean: Tensor, low: float, axes: int = 3) -> Tensor:
    """The mean, detached; refused if it is not a tensor of at least `axes` axes with values in [low, 1]."""
    (mean,) = tensors_of(mean)
    if not isinstance(mean, Tensor) or not mean.is_floating_point() or mean.dim() < axes:
        ending = "(L x S x A)" if axes == 3 else "(L x S x A), after an axis of episodes"
        raise InvalidInput(f"The mean of {name} must be a floating-point tensor that ends in {ending}, not {brief(mean)}.")
    if index := first(~((mean >= low) & (mean <= 1))):  # true for NaN as well
        found = f"{mean[tuple(index)].item():.12g} at index {index}"
        raise InvalidInput(f"The mean of {name} is {found}; expected a value in [{low:g}, 1].")
    return mean.detach()


def check_low(low: float) -> float:
    """The smaller of the two values of Bernoulli feedback."""
    return number("low", low, "a number in [-1, 0], 0 for rewards and -1 for costs", lambda found: -1 <= found <= 0)


def check_keys(owner: object, state: Mapping[str, Any], *keys: str) -> None:
    """Refuse the state of something else."""
    if set(state) != set(keys):
        found = ", ".join(sorted(map(str, state))) or "nothing"
        raise InvalidInput(f"The state of {type(owner).__name__} has {', '.join(keys)}, but was given {found}.")
