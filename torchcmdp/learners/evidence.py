"""What an episode tells WC-OPS: all that lines 6 to 10 of Algorithm 1 need to know of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from torchcmdp.costs import CostEvidence


@dataclass(frozen=True, eq=False, kw_only=True)
class Evidence(CostEvidence):
    """What was seen in one episode of every run: of the costs, and of everything else.

    Attributes:
        visited, path_costs, costs: As in `CostEvidence`.
        transitions: How often each transition was taken, `(runs x L x S x A x K)`.
        loss: The loss estimate, `(runs x L x S x A)`.
        losses: The losses 1 - r met at each pair, summed over its visits, `(runs x L x S x A)`; a doubly robust loss needs them.
    """

    transitions: Tensor
    loss: Tensor
    losses: Tensor | None = None
