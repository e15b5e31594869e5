"""UOB-REPS: WC-OPS that does not look at the costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchcmdp.errors import whole_number
from torchcmdp.layout import Layout
from torchcmdp.learners.wcops import WCOPS, Evidence
from torchcmdp.trajectory import Trajectory


class UOBREPS(WCOPS):
    """UOB-REPS with a set update every episode: what WC-OPS is without constraints, in an environment that may have some.

    Its own `constraints` is zero: costs are dropped on entry, and the occupancies are projected onto the plausible ones, safe or
    not.

    Args:
        layout: Layer widths and actions.
        constraints: m of the environment, whose costs are ignored.
        args, settings: The further arguments of `WCOPS`; those about costs have no effect.
    """

    name = "UOB-REPS"
    uses = ("known_rewards",)
    theorems = ("regret",)  # against the best policy, and so against the best safe one; of the costs it promises nothing

    def __init__(self, layout: Layout, constraints: int, *args: Any, **settings: Any) -> None:
        super().__init__(layout, 0, *args, **{**settings, "cost_low": None})
        self.ignored_constraints = whole_number("constraints", constraints, least=0)

    def observe(self, trajectory: Trajectory) -> Evidence:
        """Lines 4 and 5 for an episode without its costs."""
        return super().observe(replace(trajectory, costs=trajectory.costs[..., :0]))

    def config(self) -> dict[str, Any]:
        """Everything that the learner was made with, ready for JSON."""
        return {**super().config(), "constraints": self.ignored_constraints}
