"""What `run` asks of a learner, an environment and a tracker, a simulator of a process, and a cost model of its learner.

Anything with these members will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from torchcmdp.layout import Layout
from torchcmdp.trajectory import Trajectory

# Of every entry of a state dictionary the axis of the runs, None where all runs share it; nested as the state is.
Axes = Mapping[str, Any]


def first_axes(state: Mapping[str, Any], shared: int = 0) -> Axes:
    """The axes of a state whose tensors have the runs on their first axis, all but those of `shared` axes, which serve all runs."""

    def axis(value: Any) -> Any:
        if isinstance(value, Mapping):
            return first_axes(value, shared)
        return 0 if isinstance(value, Tensor) and value.dim() not in (0, shared) else None

    return {key: axis(value) for key, value in state.items()}


@runtime_checkable
class LearnerLike(Protocol):
    """Who plays.

    It may have more: `state_dict` and `load_state_dict` make a run resumable, `state_axes()` says where the runs are in that state
    (by default on the first axis of every tensor), `diagnostics()` is logged and `config()` recorded, and `theorems` names
    what the bounds of `theory` hold for: of "regret", "violation" and "positive_violation". A learner that draws its policy before
    an episode may have the `mixture` that it draws from, which is then measured in place of the draw.
    """

    @property
    def policy(self) -> Tensor:
        """pi(a|x) of the next episode, `(runs x L x S x A)`."""

    def update(self, trajectory: Trajectory) -> None:
        """Learn from one episode of every run."""


def measured(learner: LearnerLike, tracker: object) -> Any:
    """What a tracker is shown of the next episode: the policy, or the mixture it was drawn from if both know of mixtures."""
    mixed = hasattr(learner, "mixture") and getattr(tracker, "measures_mixtures", False)
    return getattr(learner, "mixture") if mixed else learner.policy  # noqa: B009


class Resumable(Protocol):
    """What can be stopped and continued."""

    def state_dict(self) -> dict[str, Any]:
        """All that changes over the episodes: tensors and plain numbers."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> Any:
        """Continue from what `state_dict` returned."""


@runtime_checkable
class EnvironmentLike(Resumable, Protocol):
    """Where a batch of runs is played.

    It may have `tracker()`, whose result measures the run in place of `Tracker(env)`, and `state_axes()`, as a learner may.
    """

    episode: int

    @property
    def layout(self) -> Layout: ...
    @property
    def constraints(self) -> int: ...
    @property
    def runs(self) -> int: ...
    @property
    def device(self) -> torch.device: ...

    def rollout(self, policy: Tensor, /) -> Trajectory:
        """Play one episode of every run."""

    def config(self) -> dict[str, Any]:
        """What defines the episodes, ready for JSON."""


@runtime_checkable
class ProcessLike(Resumable, Protocol):
    """Where rewards, or costs, come from; `Process` says what each member means."""

    @property
    def stationary(self) -> bool: ...
    @property
    def values(self) -> Tensor: ...
    def observe(self, values: Tensor, uniforms: Tensor, /) -> Tensor: ...
    def largest(self, values: Tensor, /) -> Tensor: ...
    def advance(self, policy: Tensor, /) -> None: ...
    def state_axes(self, mean_axes: int, /) -> Axes: ...
    def config(self) -> dict[str, Any]: ...


@runtime_checkable
class TrackerLike(Resumable, Protocol):
    """Who measures what was played; it may have `state_axes()`, as a learner may."""

    def update(self, policy: Tensor, trajectory: Trajectory, /) -> None:
        """Add an episode."""

    def record(self, t: int, /) -> None:
        """Keep a point after episode `t`."""

    def curves(self) -> dict[str, Tensor]:
        """By name what was measured at all points, `(runs x points [x m])`, with rho and alpha `(runs,)`; as `Tracker.curves`."""

    def newest(self) -> dict[str, Tensor]:
        """The same at the last point alone, `(runs [x m])`."""


class Believer(Protocol):
    """What a cost model asks of the learner that it is part of: what every `Learner` has, and `planned` where there is a margin.

    Attributes:
        planned: q(x,a) of the occupancy that the next one is planned from, `(runs x L x S x A)`.
    """

    layout: Layout
    constraints: int
    runs: int
    episode: Tensor
    visits: Tensor
    known_costs: Tensor | None

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def kernels(self) -> Any: ...
    @property
    def made_for(self) -> Mapping[str, Any]: ...
    @property
    def planned(self) -> Tensor: ...
    def scale(self, name: str, /) -> Tensor | float: ...
    def pooled(self, values: Tensor, /) -> Tensor: ...
