"""Greedy: each episode, the best policy of the CMDP that the averages describe, as if they were exact."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcmdp.layout import Layout
from torchcmdp.learners.opt_cmdp import OptCMDP
from torchcmdp.optimistic import ProgramSolver
from torchcmdp.safe_set import SafeSet


class Greedy(OptCMDP):
    """OptCMDP without confidence intervals.

    The averages of a pair that was never visited are reward 0, costs 0 and uniform transitions, so nothing makes it curious: it may
    never try the action that it needs, and then its regret is linear.

    Args:
        layout: Layer widths and actions.
        constraints: m.
        horizon: T; unused, as is delta, since there are no widths.
        delta: Failure probability.
        runs: How many independent learners there are.
        solver: As in `OptCMDP`.
    """

    name = "Greedy"

    def __init__(
        self,
        layout: Layout,
        constraints: int,
        horizon: int,
        delta: float = 0.01,
        runs: int = 1,
        *,
        solver: str | ProgramSolver = "column_generation",
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            layout, constraints, horizon, delta, runs, bonus_scale=0.0, radius_scale=0.0,
            solver=solver, dtype=dtype, device=device,
        )  # fmt: skip

    def program(self) -> tuple[Tensor, SafeSet]:
        """The averages: rewards `(runs x L x S x A)`, and one kernel with costs."""
        return self.reward_mean, SafeSet(self.layout, self.kernel, self.kernel, self.cost_mean)
