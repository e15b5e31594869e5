"""Problems: tables and tabular environments as CMDPs, and those that papers use, by name."""

from __future__ import annotations

from torchcmdp.problems import families, literature
from torchcmdp.problems.arrays import from_arrays
from torchcmdp.problems.gymnasium import from_gymnasium
from torchcmdp.problems.problem import Facts, Problem, make, names

__all__ = ["Facts", "Problem", "families", "from_arrays", "from_gymnasium", "literature", "make", "names"]
