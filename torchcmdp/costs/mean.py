"""The plain mean and a bonus around it: what stochastic costs may be, with the probability that delta says."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from torchcmdp.costs.base import Believer, CostModel
from torchcmdp.estimation import bonus, optimistic_cost, pessimistic_cost


class MeanCosts(CostModel):
    """ghat_i, the plain mean of the costs seen at a pair, and a bonus b_t on either side of it.

    The scale `bonus_scale` is that of the learner, and one where it has none.

    Args:
        margin, drift: As for every `CostModel`; without them the truth lies between both sides with probability 1 - delta.
    """

    name = "mean"
    of_learner: ClassVar[tuple[str, ...]] = ("bonus_scale",)

    def _bonus(self, learner: Believer) -> Tensor:
        """b_t, `(runs x L x S x A)`."""
        size = (self.samples_of(learner), learner.layout, learner.constraints)
        return bonus(*size, bonus_scale=learner.scale("bonus_scale"), **learner.made_for)

    def hopeful(self, learner: Believer) -> Tensor:
        """max(low, ghat - b), and low, which is -1 unless the learner knows better, at pairs never visited."""
        low = getattr(learner, "cost_low", None)
        return optimistic_cost(self.cost_estimate, self._bonus(learner), self.samples_of(learner), learner.layout, low)

    def careful(self, learner: Believer) -> Tensor:
        """min(1, ghat + b), and 1 at pairs never visited: `(runs x m x L x S x A)`."""
        return pessimistic_cost(self.cost_estimate, self._bonus(learner), self.samples_of(learner), learner.layout)
