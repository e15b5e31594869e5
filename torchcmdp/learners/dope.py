"""DOPE: optimistic rewards and transitions, pessimistic costs, in one program; the baseline where that has no solution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchcmdp.baselines import margin_of
from torchcmdp.confidence import CONFIDENCE_KINDS
from torchcmdp.costs import CostModel, MeanCosts
from torchcmdp.estimation import bonus
from torchcmdp.learners.guarded import Guarded
from torchcmdp.learners.opt_cmdp import OptCMDP
from torchcmdp.optimistic import OptimisticOptimum
from torchcmdp.safe_set import SafeSet
from torchcmdp.status import Status


class DOPE(Guarded, OptCMDP):
    """DOPE (Bura et al., NeurIPS 2022) in every run of a batch, for stochastic rewards and costs.

    With probability 1 - delta no episode's expected cost is above zero. Costs are raised by their bonus and by what not knowing
    the transitions may hide, rewards by enough to make up for that. The bonuses are large: with the theory's constants it plays
    the baseline for a long time. Written from memory of the paper, with one change: its L sum_y radius is enough for costs in [0,
    1]; for costs in [-1, 1] the distance of two plausible kernels, sum_y (upper - lower), stands in its place.

    Args:
        layout, constraints, horizon, delta, runs, dtype, device: As for every `Learner`.
        baseline, seed, first_run, distinct_runs: As for every `Guarded` learner; there is no coin.
        bonus_scale, radius_scale: Multiply the bonus of rewards and costs, and the transition radii; below one the promise is
            weaker. A float each, or one value a run.
        confidence: Kind of the transition set, OptCMDP's own by default.
        solver: Of the program, as in `OptCMDP`.
        costs: What it believes of the costs, on the pessimistic side; `MeanCosts()` by default, and the promise is about that.

    Attributes:
        resting: One where the program had no solution and the baseline is played, `(runs,)`.
    """

    name = "DOPE"
    radii = "matched"  # the kind of the transition set is the one that was chosen
    choices = {"confidence": ("efroni", *(kind for kind in CONFIDENCE_KINDS if kind != "efroni"))}
    resting: Tensor

    def __init__(self, *args: Any, costs: CostModel | None = None, **settings: Any) -> None:
        super().__init__(*args, costs=MeanCosts() if costs is None else costs, **settings)
        self.register_buffer("resting", torch.ones(self.runs, dtype=self.dtype, device=self.device))

    @property
    def own_policy(self) -> Tensor:
        """The policy of the last program, `(runs x L x S x A)`."""
        return self.plan

    @property
    def baseline_weight(self) -> Tensor:
        """One where the program had no solution, and zero elsewhere, `(runs,)`."""
        return self.resting

    def program(self) -> tuple[Tensor, SafeSet]:
        """What the next plan maximises, `(runs x L x S x A)`, and over what."""
        layout, L, kernels = self.layout, self.layout.layers, self.kernels
        several = layout.next_widths(self.device) > 1  # a row of one successor is known
        apart = (kernels.upper - kernels.lower).sum(-1).clamp_max(2) * several
        scale = self.hyperparameter("bonus_scale")
        width = bonus(self.visits, layout, self.constraints, bonus_scale=scale, **self.made_for)
        margin = margin_of(self.baseline_bounds)[:, None, None, None]
        hoped = (self.reward_mean + (3 * L * width + L**2 * apart) / margin).clamp_max(1 + L)
        rewards = torch.where(self.visits > 0, hoped, 1.0 + L) * layout.pair_mask(self.device)
        feared = self.costs.pessimistic(self) + L * apart.unsqueeze(-4)
        return rewards, SafeSet(layout, kernels.lower, kernels.upper, feared.clamp(-1, 1 + L))

    def take(self, optimum: OptimisticOptimum) -> None:
        """Play what the program found, and the baseline where it found nothing that is surely safe."""
        super().take(optimum)
        self.resting = (optimum.status != Status.SOLVED).to(self.dtype)
