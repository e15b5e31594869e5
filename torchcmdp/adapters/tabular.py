"""Other people's tables and tabular environments as layered CMDPs; they live in `torchcmdp.problems`."""

from __future__ import annotations

from torchcmdp.problems.arrays import from_arrays
from torchcmdp.problems.gymnasium import (
    Cost,
    ImportedCMDP,
    Move,
    broke_a_rule,
    fell_in_a_hole,
    fell_off_the_cliff,
    from_gymnasium,
    told_cost,
)
from torchcmdp.units import budgets_of

__all__ = ["Cost", "ImportedCMDP", "Move", "budgets_of", "from_arrays", "from_gymnasium"]
__all__ += ["broke_a_rule", "fell_in_a_hole", "fell_off_the_cliff", "told_cost"]
