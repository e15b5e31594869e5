"""The paper's cost model: an adaptively weighted mean, less a bonus (lines 6 to 9 of Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchcmdp.costs.base import Believer, CostModel
from torchcmdp.costs.evidence import CostEvidence
from torchcmdp.costs.known import KnownCosts
from torchcmdp.errors import InvalidInput, check_kind
from torchcmdp.estimation import (
    bonus,
    empirical_threshold,
    excess,
    optimistic_cost,
    pessimistic_cost,
    step_uncertainty,
    violation_threshold,
)


class PaperCosts(CostModel):
    """ghat_i with weights that grow with the violation beyond its threshold (Gamma_i), and a bonus b_t around it.

    Its scales `bonus_scale`, `threshold_scale`, `cap_scale` and the choice `violation_threshold` are those of the learner, and one
    and "paper" where the learner has none.

    Args:
        margin, drift: As for every `CostModel`; the paper has neither.

    Attributes:
        path_violation: S_i, the costs met on the paths so far, `(runs x m)`.
        uncertainty: What the visits so far may have added to it, `(runs,)`; None with the paper's own threshold.
    """

    name = "paper"
    path_violation: Tensor
    uncertainty: Tensor | None

    def begin(self, learner: Believer) -> None:
        """Register the state."""
        super().begin(learner)
        empirical = getattr(learner, "violation_threshold", "paper") == "empirical"
        self.register_buffer("path_violation", torch.zeros_like(self.cost_estimate[..., 0, 0, 0]))
        self.register_buffer("uncertainty", torch.zeros_like(self.path_violation[:, :0].sum(-1)) if empirical else None)

    def excess(self, evidence: CostEvidence, learner: Believer) -> Tensor:
        """Gamma_i with the episode counted, `(runs x m)`."""
        size = (learner.episode + 1, learner.layout, learner.constraints)
        self.path_violation = self.path_violation + evidence.path_costs
        if self.uncertainty is None:
            threshold = violation_threshold(*size, **_made_for(learner))
        else:  # with the radii that the episode was planned with
            kernels, samples = learner.kernels, self.samples_of(learner)
            step = step_uncertainty(kernels.lower, kernels.upper, self._bonus(learner), samples, learner.layout)
            self.uncertainty = self.uncertainty + (step * evidence.visited).sum((-3, -2, -1))
            threshold = empirical_threshold(self.uncertainty, *size, **_made_for(learner))
        return excess(self.path_violation, threshold, _scale(learner, "threshold_scale"), _scale(learner, "cap_scale"))

    def _bonus(self, learner: Believer) -> Tensor:
        """b_t, `(runs x L x S x A)`."""
        size = (self.samples_of(learner), learner.layout, learner.constraints)
        return bonus(*size, bonus_scale=_scale(learner, "bonus_scale"), **_made_for(learner))

    def hopeful(self, learner: Believer) -> Tensor:
        """max(low, ghat - b), and low, which is -1 unless the learner knows better, at pairs never visited."""
        low = getattr(learner, "cost_low", None)
        return optimistic_cost(self.cost_estimate, self._bonus(learner), self.samples_of(learner), learner.layout, low)

    def careful(self, learner: Believer) -> Tensor:
        """min(1, ghat + b), and 1 at pairs never visited: `(runs x m x L x S x A)`."""
        return pessimistic_cost(self.cost_estimate, self._bonus(learner), self.samples_of(learner), learner.layout)


def _made_for(learner: Believer) -> dict[str, Any]:
    return {"horizon": learner.horizon, "delta": learner.delta}


def _scale(learner: Believer, name: str) -> Tensor | float:
    return learner.hyperparameter(name) if name in learner.hyperparameters else 1.0


def cost_model(learner: Believer, costs: CostModel | None, settings: Mapping[str, Any]) -> CostModel:
    """A learner's own copy of a cost model: without one asked for `PaperCosts()`, or what it was told.

    Args:
        learner: Whose it will be.
        costs: What was asked for.
        settings: Of the learner, those for the cost model alone: refused where it does not look at them.
    """
    if learner.known_costs is not None and costs is not None:
        raise InvalidInput(f"costs is {type(costs).__name__}, a model of what known_costs says; leave one of them out.")
    if costs is None:
        costs = PaperCosts() if learner.known_costs is None else KnownCosts()
    check_kind("costs", costs, CostModel, "a cost model, such as PriorCosts(margin=1.0)")
    if not isinstance(costs, PaperCosts):
        for name in ("bonus_scale", "threshold_scale", "cap_scale", "violation_threshold"):
            if settings.get(name) is not None:
                raise InvalidInput(f"{name} means nothing to {type(costs).__name__}; leave it out, or take PaperCosts.")
    return costs.begun(learner)
