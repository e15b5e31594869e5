"""What learners that keep plain averages have in common: visit counts, and the means of what was seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchcmdp.confidence import empirical_kernel, visited_transitions
from torchcmdp.layout import Layout
from torchcmdp.learners.base import Learner
from torchcmdp.trajectory import Trajectory


class EmpiricalLearner(Learner):
    """A learner that counts its visits and sums up what it saw there; a subclass decides what to play.

    Attributes:
        visits: N(x,a), `(runs x L x S x A)`.
        transition_visits: M(x,a,y), `(runs x L x S x A x S)`.
        reward_sum: Sum of the rewards seen at each pair, `(runs x L x S x A)`.
        cost_sum: Sum of the costs seen at each pair, `(runs x m x L x S x A)`.
    """

    visits: Tensor
    transition_visits: Tensor
    reward_sum: Tensor
    cost_sum: Tensor

    def __init__(self, layout: Layout, constraints: int, horizon: int, delta: float = 0.01, runs: int = 1, **like: Any) -> None:
        super().__init__(layout, constraints, horizon, delta, runs, **like)
        pairs = layout.pair_shape
        zeros: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        self.register_buffer("visits", torch.zeros(self.runs, *pairs, **zeros))
        self.register_buffer("transition_visits", torch.zeros(self.runs, *layout.transition_shape, **zeros))
        self.register_buffer("reward_sum", torch.zeros(self.runs, *pairs, **zeros))
        self.register_buffer("cost_sum", torch.zeros(self.runs, self.constraints, *pairs, **zeros))

    def count(self, trajectory: Trajectory) -> None:
        """Add one episode to the counts and sums."""
        self.check_trajectory(trajectory)
        transitions = visited_transitions(trajectory, self.layout, self.dtype)
        visited = transitions.sum(-1)
        self.episode = self.episode + 1
        self.visits = self.visits + visited
        self.transition_visits = self.transition_visits + transitions
        self.reward_sum = self.reward_sum + visited * trajectory.rewards.to(self.dtype)[..., None, None]
        costs = trajectory.costs.to(self.dtype).transpose(-1, -2)[..., None, None]
        self.cost_sum = self.cost_sum + visited.unsqueeze(-4) * costs

    @property
    def reward_mean(self) -> Tensor:
        """Mean of the rewards seen, `(runs x L x S x A)`; zero where a pair was never visited."""
        return self.reward_sum / self.visits.clamp_min(1)

    @property
    def cost_mean(self) -> Tensor:
        """Mean of the costs seen, `(runs x m x L x S x A)`; zero where a pair was never visited."""
        return self.cost_sum / self.visits.clamp_min(1).unsqueeze(-4)

    @property
    def kernel(self) -> Tensor:
        """Empirical transitions, `(runs x L x S x A x S)`; uniform where a pair was never visited."""
        return empirical_kernel(self.visits, self.transition_visits, self.layout)
