"""What learners that keep plain averages have in common: visit counts, and the means of what was seen."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from torchcmdp.confidence import empirical_kernel
from torchcmdp.estimation import bonus_log_term, hoeffding_radius
from torchcmdp.learners.base import Learner
from torchcmdp.trajectory import Trajectory

RADIUS_MODES = ("published", "matched", "literal")


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
        """The kind of the confidence set in force: OptCMDP's own where the radii are not matched to those of WC-OPS."""
        return self.confidence if self.radii == "matched" else "efroni"

    @property
    def feedback_logarithm(self) -> float:
        """The logarithm in the radii of costs: iota' = ln(6 |X| |A| (m + 1) T / delta), or the bonus's where they are matched."""
        layout, m = self.layout, self.constraints
        if self.radii == "matched":
            return bonus_log_term(layout, m, **self.made_for)
        return math.log(6 * layout.total_states * layout.actions * (m + 1) * self.horizon / self.delta)

    def feedback_radii(self) -> tuple[Tensor, Tensor]:
        """beta^r and beta^g, how far mean reward and mean costs may lie from their averages, twice `(runs x L x S x A)`.

        "published" takes beta^g = sqrt(2 iota' / N) with N = max(1, visits), "matched" takes WC-OPS's cost bonus. Rewards have half
        the range of costs, and so half their radius in every mode: sqrt(iota' / (2 N)) is Hoeffding's for [0, 1], where the
        published learner takes the radius of costs. "literal" takes that learner at its word: its sqrt(2 iota' / N) was for costs
        in [0, 1], and costs in [-1, 1] have twice that range, so both radii are twice the "published".
        """
        radius = hoeffding_radius(self.visits, self.layout, self.feedback_logarithm, self.hyperparameter("bonus_scale"))
        radius = radius * (2 if self.radii == "literal" else 1)
        return 0.5 * radius, radius

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
