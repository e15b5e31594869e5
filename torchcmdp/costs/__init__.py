"""What a learner believes of the costs: a mean, plain or weighted or with an optimistic prior, a margin, a test for drift."""

from torchcmdp.costs.base import Believer, CostModel
from torchcmdp.costs.drift import Drift
from torchcmdp.costs.evidence import CostEvidence, path_costs
from torchcmdp.costs.mean import MeanCosts
from torchcmdp.costs.paper import PaperCosts, cost_model
from torchcmdp.costs.prior import PriorCosts

__all__ = ["Believer", "CostEvidence", "CostModel", "Drift", "MeanCosts", "PaperCosts", "PriorCosts", "cost_model", "path_costs"]
