"""A mean with one sample more, at the end of the costs' range: optimism that a single visit nearly undoes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchcmdp.costs.base import Believer, CostModel
from torchcmdp.costs.drift import Drift
from torchcmdp.errors import InvalidInput, check_tensor, number
from torchcmdp.estimation import prior_cost
from torchcmdp.hyperparameters import PerRun
from torchcmdp.identity import fingerprint


class PriorCosts(CostModel):
    """(n ghat + low) / (n + 1): the plain mean, with a prior of one sample at the lower end in place of a bonus.

    A pair is worth one good sample, not a bonus that vanishes like 1 / sqrt(n) with a logarithm in front. The truth may lie below
    these costs with a probability that does not shrink with delta, so that no theorem of the paper holds with them.

    Args:
        low: The lower end of the costs, at which the prior's sample sits: a number, or a tensor that broadcasts to
            `(runs x m x L x S x A)`; None for what the learner knows (`cost_low`), -1 if nothing. The pessimistic side has its
            sample at 1.
        margin, drift: As for every `CostModel`.
    """

    name = "prior"
    low_end: Tensor
    high_end: Tensor

    def __init__(self, *, low: Tensor | float | None = None, margin: PerRun | None = None, drift: Drift | None = None) -> None:
        super().__init__(margin=margin, drift=drift)
        self._low: Tensor | None = None
        if low is None:
            return
        low = low if isinstance(low, Tensor) else torch.tensor(number("low", low), dtype=torch.float64)
        check_tensor("low", low)
        self._low = low
        if low.device.type != "meta" and not ((low >= -1) & (low <= 1)).all():
            raise InvalidInput(f"low has values from {float(low.min()):g} to {float(low.max()):g}; costs lie in [-1, 1].")

    def settings(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {"low": self._low, **super().settings()}

    def begin(self, learner: Believer) -> None:
        """Register the state, and the ends of the range, which are no state."""
        super().begin(learner)
        mask = learner.layout.pair_mask(learner.device)
        end = getattr(learner, "cost_low", -torch.ones(())) if self._low is None else self._low
        try:
            low = end.to(self.cost_estimate).expand_as(self.cost_estimate)
        except RuntimeError:
            shape, wanted = tuple(end.shape), tuple(self.cost_estimate.shape)
            raise InvalidInput(f"low has shape {shape}; it must broadcast to (runs x m x L x S x A) = {wanted}.") from None
        self.register_buffer("low_end", low * mask, persistent=False)
        self.register_buffer("high_end", mask.to(self.cost_estimate), persistent=False)

    def hopeful(self, learner: Believer) -> Tensor:
        """(n ghat + low) / (n + 1), `(runs x m x L x S x A)`."""
        return prior_cost(self.cost_estimate, self.samples_of(learner), self.low_end)

    def careful(self, learner: Believer) -> Tensor:
        """(n ghat + 1) / (n + 1), `(runs x m x L x S x A)`."""
        return prior_cost(self.cost_estimate, self.samples_of(learner), self.high_end)

    def config(self) -> dict[str, Any]:
        """Everything that the model was made with, ready for JSON."""
        low = torch.tensor(-1.0) if self._low is None else self._low  # what the learner knows is in its own config
        same = low.numel() == 1 and low.device.type != "meta"
        return {**super().config(), "low": float(low) if same else fingerprint(low)}
