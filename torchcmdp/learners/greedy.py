"""Greedy: each episode, the best policy of the CMDP that the averages describe, as if they were exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchcmdp.layout import Layout
from torchcmdp.learners.opt_cmdp import OptCMDP
from torchcmdp.projection import SafeSet


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
        program_options: Further keyword arguments of `optimistic_optimum`.
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
        program_options: Mapping[str, Any] | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            layout, constraints, horizon, delta, runs, bonus_scale=0.0, radius_scale=0.0,
            program_options=program_options, dtype=dtype, device=device,
        )  # fmt: skip

    def program(self) -> tuple[Tensor, SafeSet]:
        """The averages: rewards `(runs x L x S x A)`, and one kernel with costs."""
        return self.reward_mean, SafeSet(self.layout, self.kernel, self.kernel, self.cost_mean)
