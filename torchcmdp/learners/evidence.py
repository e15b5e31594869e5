"""What an episode tells WC-OPS: all that lines 6 to 10 of Algorithm 1 need to know of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from torchcmdp.estimation import learning_rate, update_cost_estimate


@dataclass(frozen=True, eq=False)
class Evidence:
    """What was seen in one episode of every run.

    A sampled episode visits a pair once or never. `torchcmdp.tuning` has the evidence that is expected of an episode, in which
    visits are probabilities, and that of both.

    Attributes:
        loss: The loss estimate, `(runs x L x S x A)`.
        visited: How often each pair was visited, `(runs x L x S x A)`.
        transitions: How often each transition was taken, `(runs x L x S x A x S)`.
        path_costs: The costs summed along the path, `(runs x m)`.
        costs: The costs met at the visited pairs, of a shape that broadcasts to `(runs x m x L x S x A)`.
    """

    loss: Tensor
    visited: Tensor
    transitions: Tensor
    path_costs: Tensor
    costs: Tensor

    def revise(self, estimate: Tensor, gamma_excess: Tensor, visits: Tensor) -> tuple[Tensor, Tensor]:
        """Lines 6 and 7: the cost estimate with the episode weighed in, and beta at the visited pairs.

        Args:
            estimate: ghat_i before the episode, `(runs x m x L x S x A)`.
            gamma_excess: Gamma_i, `(runs x m)`.
            visits: N(x,a) with the episode counted, `(runs x L x S x A)`.

        Returns:
            Twice `(runs x m x L x S x A)`.
        """
        rate = learning_rate(gamma_excess, visits) * self.visited.unsqueeze(-4)
        return update_cost_estimate(estimate, rate, self.costs), rate
