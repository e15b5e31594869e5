"""What learners that keep plain averages have in common: visit counts, and the means of what was seen."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchcmdp.confidence import empirical_kernel
from torchcmdp.learners.base import Learner
from torchcmdp.learners.radii import RADIUS_MODES, feedback_radii, transition_kind
from torchcmdp.trajectory import Trajectory


class EmpiricalLearner(Learner):
    """A learner that sums up what it saw at each pair; a subclass decides what to play.

    Attributes:
        radii: Around the averages, "published" or "matched"; a choice in the learners that have any.
        reward_sum: Sum of the rewards seen at each pair, `(runs x L x S x A)`.
        cost_sum: Sum of the costs seen at each pair, `(runs x m x L x S x A)`.
    """

    radii: str = RADIUS_MODES[0]
    reward_sum: Tensor
    cost_sum: Tensor

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.add_zeros("reward_sum", *self.layout.pair_shape)
        self.add_zeros("cost_sum", self.constraints, *self.layout.pair_shape)

    def count(self, trajectory: Trajectory) -> None:
        """Add one episode to the counts and sums."""
        visited, transitions = self.visited(trajectory)
        self.count_visits(visited, transitions)
        self.reward_sum = self.reward_sum + self.pooled(visited * trajectory.rewards.to(self.dtype)[..., None, None])
        costs = trajectory.costs.to(self.dtype).transpose(-1, -2)[..., None, None]
        self.cost_sum = self.cost_sum + self.pooled(visited.unsqueeze(-4) * costs)

    @property
    def kernel_kind(self) -> str:
        """The kind of the confidence set in force: OptCMDP's own where the radii are as published."""
        return transition_kind(self.radii, self.confidence)

    def feedback_radii(self) -> tuple[Tensor, Tensor]:
        """beta^r and beta^g in force, twice `(runs x L x S x A)`."""
        scale = self.hyperparameter("bonus_scale")
        return feedback_radii(self.radii, self.visits, self.layout, self.constraints, bonus_scale=scale, **self.made_for)

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
        """Empirical transitions, `(runs x L x S x A x K)`; uniform where a pair was never visited."""
        return empirical_kernel(self.visits, self.transition_visits, self.layout)
