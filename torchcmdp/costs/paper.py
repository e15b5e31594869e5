"""The paper's cost model: an adaptively weighted mean, less a bonus (lines 6 to 9 of Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchcmdp.costs.base import Believer, CostModel
from torchcmdp.costs.evidence import CostEvidence
from torchcmdp.costs.known import KnownCosts
from torchcmdp.costs.mean import MeanCosts
from torchcmdp.errors import InvalidInput, check_kind
from torchcmdp.estimation import empirical_threshold, excess, step_uncertainty, violation_threshold


class PaperCosts(MeanCosts):
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
    of_learner = ("bonus_scale", "threshold_scale", "cap_scale", "violation_threshold")
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
            threshold = violation_threshold(*size, **learner.made_for)
        else:  # with the radii that the episode was planned with
            kernels, samples = learner.kernels, self.samples_of(learner)
            step = step_uncertainty(kernels.lower, kernels.upper, self._bonus(learner), samples, learner.layout)
            self.uncertainty = self.uncertainty + (step * evidence.visited).sum((-3, -2, -1))
            threshold = empirical_threshold(self.uncertainty, *size, **learner.made_for)
        return excess(self.path_violation, threshold, learner.scale("threshold_scale"), learner.scale("cap_scale"))


def cost_model(
    learner: Believer, costs: CostModel | None, settings: Mapping[str, Any], usual: type[CostModel] = PaperCosts
) -> CostModel:
    """A learner's own copy of a cost model.

    Args:
        learner: Whose it will be.
        costs: What was asked for.
        settings: Of the learner, those for the cost model alone: refused where it does not look at them.
        usual: What it has where none was asked for.
    """
    if learner.known_costs is not None and costs is not None:
        raise InvalidInput(f"costs is {type(costs).__name__}, a model of what known_costs says; leave one of them out.")
    if costs is None:
        costs = usual() if learner.known_costs is None else KnownCosts()
    check_kind("costs", costs, CostModel, "a cost model, such as PriorCosts(margin=1.0)")
    for name in PaperCosts.of_learner:
        if name not in costs.of_learner and settings.get(name) is not None:
            raise InvalidInput(f"{name} means nothing to {type(costs).__name__}; leave it out, or take {usual.__name__}.")
    return costs.begun(learner)
