"""What an episode tells a cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcmdp.estimation import expected_learning_rate, learning_rate, update_cost_estimate
from torchcmdp.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class CostEvidence:
    """What was seen of the costs in one episode of every run.

    A sampled episode visits a pair once or never. `torchcmdp.tuning` has the evidence that is expected of an episode, in which
    visits are probabilities, and that of both.

    Attributes:
        visited: How often each pair was visited, `(runs x L x S x A)`.
        path_costs: The costs summed along the path, `(runs x m)`.
        costs: The costs met at the visited pairs, of a shape that broadcasts to `(runs x m x L x S x A)`.
    """

    visited: Tensor
    path_costs: Tensor
    costs: Tensor

    def revise(self, estimate: Tensor, gamma_excess: Tensor, visits: Tensor) -> tuple[Tensor, Tensor]:
        """Lines 6 and 7: ghat_i with the episode weighed in, and beta at the visited pairs, twice `(runs x m x L x S x A)`.

        Gamma_i is `(runs x m)`, and `visits` are N(x,a) with the episode counted, `(runs x L x S x A)`.
        """
        rate = learning_rate(gamma_excess, visits) * self.visited.unsqueeze(-4)
        return update_cost_estimate(estimate, rate, self.costs), rate

    def pooled(self, pool: Callable[[Tensor], Tensor]) -> CostEvidence:
        """What it says of each pair where layers are tied, by `Learner.pooled`; itself where none are."""
        visited = pool(self.visited)
        if visited is self.visited:
            return self
        met = pool(self.visited.unsqueeze(-4) * self.costs)
        return RepeatedEvidence(visited, self.path_costs, met / torch.where(visited > 0, visited, 1.0).unsqueeze(-4))


@dataclass(frozen=True, eq=False)
class RepeatedEvidence(CostEvidence):
    """Of pairs that are visited any number of times, once, never, or a few times on average: `costs` are the means over these."""

    def revise(self, estimate: Tensor, gamma_excess: Tensor, visits: Tensor) -> tuple[Tensor, Tensor]:
        """As above, with every pair weighed in by the share of its visits that is new."""
        rate = expected_learning_rate(gamma_excess, visits, self.visited)
        return estimate + rate * (self.costs - estimate), rate


def path_costs(trajectory: Trajectory, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The costs of a sampled episode, summed along the path `(runs x m)` and ready to broadcast `(runs x m x L x 1 x 1)`."""
    costs = trajectory.costs.to(dtype)
    return costs.sum(-2), costs.transpose(-1, -2)[..., None, None]
