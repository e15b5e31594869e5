"""UOB-REPS: WC-OPS that does not look at the costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from torchcmdp.errors import whole_number
from torchcmdp.layout import Layout
from torchcmdp.learners.wcops import WCOPS
from torchcmdp.trajectory import Trajectory


class UOBREPS(WCOPS):
    """UOB-REPS with a set update every episode: what WC-OPS is without constraints, in an environment that may have some.

    Its own `constraints` is zero: costs are dropped on entry, and the occupancies are projected onto the plausible ones, safe or
    not.

    Args:
        layout, horizon, delta, runs: As for `WCOPS`.
        constraints: m of the environment, whose costs are ignored.
        settings: The further keyword arguments of `WCOPS`; those about costs have no effect.
    """

    name = "UOB-REPS"

    def __init__(self, layout: Layout, constraints: int, horizon: int, delta: float = 0.01, runs: int = 1, **settings: Any) -> None:
        super().__init__(layout, 0, horizon, delta, runs, **settings)
        self.ignored_constraints = whole_number("constraints", constraints, least=0)

    def update(self, trajectory: Trajectory) -> None:
        """One episode of WC-OPS without its costs."""
        super().update(replace(trajectory, costs=trajectory.costs[..., :0]))

    def update_expected(self, occupancy: Tensor, rewards: Tensor, costs: Tensor, sample: Trajectory | None = None) -> None:
        """One expected episode of WC-OPS without its costs."""
        sample = None if sample is None else replace(sample, costs=sample.costs[..., :0])
        super().update_expected(occupancy, rewards, costs[..., :0, :, :, :], sample)

    def config(self) -> dict[str, Any]:
        """Everything that the learner was made with, ready for JSON."""
        return {**super().config(), "constraints": self.ignored_constraints}
