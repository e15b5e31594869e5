"""Costs that are known: nothing to estimate, and neither side to lean to."""

from __future__ import annotations

from torch import Tensor

from torchcmdp.costs.base import Believer, CostModel
from torchcmdp.costs.evidence import CostEvidence


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

    def careful(self, learner: Believer) -> Tensor:
        """The costs, `(runs x m x L x S x A)`."""
        return self.cost_estimate

    def diagnostics(self, learner: Believer) -> dict[str, Tensor]:
        """None: nothing happens."""
        return {}
