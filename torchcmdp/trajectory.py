"""What one episode shows a learner: the visited states and actions, and the feedback at them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode of every run of a batch.

    States are indices within their layer: `states[j, k]` is the state of layer k that run j was in, and `next_states[j, k]` the
    state of layer k + 1 that it moved to, so `next_states[:, :-1]` equals `states[:, 1:]` and `next_states[:, -1]` is the
    terminal state 0.

    Attributes:
        states, actions, next_states: `(runs x L)` int64.
        rewards, costs: Observed at the visited pairs, `(runs x L)` and `(runs x L x m)`.
    """

    states: Tensor
    actions: Tensor
    next_states: Tensor
    rewards: Tensor
    costs: Tensor

    @property
    def runs(self) -> int:
        """How many runs played this episode."""
        return self.states.shape[0]

    @property
    def constraints(self) -> int:
        """m, the number of constraints."""
        return self.costs.shape[-1]
