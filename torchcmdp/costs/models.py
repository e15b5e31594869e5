"""The cost models: a plain mean, the paper's weighted one, one with an optimistic prior, and costs that are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchcmdp.costs.base import CostModel, Drift
from torchcmdp.costs.evidence import CostEvidence
from torchcmdp.errors import InvalidInput, check_kind, check_tensor, number
from torchcmdp.estimation import (
    bonus,
    empirical_threshold,
    excess,
    optimistic_cost,
    pessimistic_cost,
    prior_cost,
    step_uncertainty,
    violation_threshold,
)
from torchcmdp.hyperparameters import PerRun, check_range, expanded
from torchcmdp.identity import fingerprint
from torchcmdp.protocols import Believer


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
        check_range("low", low, -1, 1)

    def settings(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {"low": self._low, **super().settings()}

    def begin(self, learner: Believer) -> None:
        """Register the state, and the ends of the range, which are no state."""
        super().begin(learner)
        mask = learner.layout.pair_mask(learner.device)
        end = getattr(learner, "cost_low", -torch.ones(())) if self._low is None else self._low
        low = expanded("low", end, self.cost_estimate, "(runs x m x L x S x A) =")
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


class KnownCosts(CostModel):
    """The true mean costs, which the learner was told as `known_costs`; a learner takes it by itself."""

    name = "known"

    def begin(self, learner: Believer) -> None:
        """Register the state, which never changes."""
        super().begin(learner)
        assert learner.known_costs is not None, "a learner that takes this model knows its costs"
        self.cost_estimate = learner.known_costs.expand_as(self.cost_estimate).clone()

    def observe(self, evidence: CostEvidence, learner: Believer) -> None:
        """Learn nothing."""

    def hopeful(self, learner: Believer) -> Tensor:
        """The costs, `(runs x m x L x S x A)`."""
        return self.cost_estimate

    careful = hopeful

    def diagnostics(self, learner: Believer) -> dict[str, Tensor]:
        """None: nothing happens."""
        return {}


def cost_model(
    learner: Believer, costs: CostModel | None, settings: Mapping[str, Any], usual: type[CostModel] = PaperCosts
) -> CostModel:
    """A learner's own copy of a cost model, or of its usual one where none was asked for.

    Of its settings those for the cost model alone are refused where the model does not look at them.
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
