"""What a learner believes of the costs: a mean, plain or weighted or with an optimistic prior, a margin, a test for drift."""

from torchcmdp.costs.base import CostModel, Drift
from torchcmdp.costs.evidence import CostEvidence, path_costs
from torchcmdp.costs.models import MeanCosts, PaperCosts, PriorCosts, cost_model
from torchcmdp.protocols import Believer

__all__ = ["Believer", "CostEvidence", "CostModel", "Drift", "MeanCosts", "PaperCosts", "PriorCosts", "cost_model", "path_costs"]
