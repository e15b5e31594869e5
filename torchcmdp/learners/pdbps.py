"""PDB-PS, primal-dual bandit policy search: fixed share and dilated bonuses against multipliers, a reconstruction."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcmdp.confidence import CONFIDENCE_KINDS, KernelSet, lower_occupancy, upper_occupancy
from torchcmdp.hyperparameters import check_weights
from torchcmdp.learners import compiled
from torchcmdp.learners.base import Learner
from torchcmdp.occupancy import open_logits, softmax_policy
from torchcmdp.trajectory import Trajectory


def _step(learner: Learner) -> float:
    L, pairs = learner.layout.layers, learner.layout.total_states * learner.layout.actions
    return min(1 / (24 * L**3), 1 / math.sqrt(pairs * L * learner.horizon))


class PDBPS(Learner):
    """PDB-PS with the primal learner FS-PODB (Stradi et al. 2025, arXiv 2410.02269) in every run of a batch: a reconstruction.

    No code of it is public. What this class does, and how sure we are that it is what was meant:

    | piece | what is done | confidence |
    | --- | --- | --- |
    | F1 | gradient ascent on lambda within [0, T^(1/4)]^m; nothing is known about the Slater gap | high |
    | F2 | mirror descent with entropy in every state, fixed share, dilated bonus, optimistic Q; step over the loss range | high |
    | F3 | with enough Slater gap lambda bounds itself: a theorem, from which nothing in the code follows | high |
    | F4 | loss c_t + <lambda_t, g_t> - r_t, with c_t = 1 + |lambda_t|_1, which makes it non-negative | medium |
    | F5 | Q, b and B as in Luo, Wei, Lee (2021), Algorithm 1, times the range Xi_t of the loss | medium to high |
    | F6 | the multipliers move by the costs met on the path | medium |
    | F7 | the constants of the step, of gamma, of the share and of the dual step | low: ours |

    A curve of this learner should say "reconstruction". With its default step it learns very slowly over a thousand episodes.

    Args:
        layout, constraints, horizon, delta, runs, dtype, device: As for every `Learner`.
        eta: Step of the policy before it is divided by the loss range, min(1 / (24 L^3), 1 / sqrt(|X| |A| L T)) by default. This
            and the following: a float, or a tensor with one value a run.
        gamma: Implicit exploration, 2 L eta by default.
        share: Weight of the uniform policy in every step, at most one; 1 / T by default.
        dual_step: Step of the multipliers, 1 / (L sqrt(m T)) by default.
        radius_scale: Multiplies the transition radii.
        confidence: Kind of the transition set: "luo" as published, or any other; WC-OPS's for a comparison of equals.
    """

    name = "PDB-PS"
    hyperparameters = {
        "eta": _step,
        "gamma": lambda made: 2 * made.layout.layers * made.hyperparameter("eta"),
        "share": lambda made: 1 / made.horizon,
        "dual_step": lambda made: 1 / (made.layout.layers * math.sqrt(max(made.constraints, 1) * made.horizon)),
        "radius_scale": 1.0,
    }
    choices = {"confidence": ("luo", *(kind for kind in CONFIDENCE_KINDS if kind != "luo"))}
    logits: Tensor
    multipliers: Tensor
    loss_range: Tensor

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        check_weights("share", self.hyperparameter("share"))
        self.add_zeros("logits", *self.layout.pair_shape)
        self.add_zeros("multipliers", self.constraints)
        self.add_zeros("loss_range")

    @property
    def policy(self) -> Tensor:
        """pi_t, `(runs x L x S x A)`."""
        return softmax_policy(self.logits, self.layout)

    def update(self, trajectory: Trajectory) -> None:
        """One episode after the roll-out: estimate Q and its bonus with P_{t-1}, move policy and multipliers, count."""
        if compiled.update(self, trajectory):
            return
        visited, transitions = self.visited(trajectory)
        self.loss_range = torch.maximum(self.loss_range, 2 * (1 + self.multipliers.sum(-1)))
        policy, kernels = self.policy, self.kernels
        upper = upper_occupancy(kernels, policy, self.layout)
        reached = (upper + self._each("gamma")).clamp_min(torch.finfo(self.dtype).tiny)  # no 0/0 where gamma is zero
        to_go = self.lagrangian_loss(trajectory).flip(-1).cumsum(-1).flip(-1)
        action_loss = to_go[..., None, None] * visited / reached
        bonus = self._bonus(policy, upper, lower_occupancy(kernels, policy, self.layout), reached)
        dilated = dilated_bonus(bonus, policy, kernels)
        self._step(action_loss - dilated)
        self._move_multipliers(trajectory)
        self.count_visits(visited, transitions)
        self._last = dilated

    def _each(self, name: str) -> Tensor:
        """A hyperparameter ready to broadcast over pairs: `(runs x 1 x 1 x 1)`."""
        return self.hyperparameter(name)[:, None, None, None]

    def lagrangian_loss(self, trajectory: Trajectory) -> Tensor:
        """c_t + <lambda, g> - r with c_t = 1 + |lambda|_1 at the visited pairs, in [0, 2 c_t]: `(runs x L)`."""
        # as (1 - r) + <lambda, 1 + g>, in which no rounding can make it negative
        priced = ((1 + trajectory.costs.to(self.dtype)) * self.multipliers.unsqueeze(-2)).sum(-1)
        return 1 - trajectory.rewards.to(self.dtype) + priced

    def _bonus(self, policy: Tensor, upper: Tensor, lower: Tensor, reached: Tensor) -> Tensor:
        """b_t(x) = sum_a pi(a|x) L Xi (3 gamma + u_upper - u_lower)(x,a) / (u_upper(x,a) + gamma): `(runs x L x S)`."""
        scale = self.layout.layers * self.loss_range[:, None, None]
        return scale * (policy * (3 * self._each("gamma") + upper - lower) / reached).sum(-1)

    def _step(self, loss: Tensor) -> None:
        """pi <- (1 - share) y + share / |A| with y ~ pi exp(-eta / Xi loss), in logarithms, where nothing underflows."""
        step = self._each("eta") / self.loss_range[:, None, None, None]
        moved, share = open_logits(self.logits - step * loss, self.layout).log_softmax(-1), self._each("share")
        mixed = torch.logaddexp(torch.log1p(-share) + moved, (share / self.layout.action_counts(self.device).to(share)).log())
        self.logits = torch.where(self.layout.pair_mask(self.device), mixed, 0)

    def _move_multipliers(self, trajectory: Trajectory) -> None:
        """lambda_i <- lambda_i + dual_step * (cost i met on the path), kept in [0, T^(1/4)]."""
        ascent = self.hyperparameter("dual_step").unsqueeze(-1) * trajectory.costs.sum(-2, dtype=self.dtype)
        self.multipliers = (self.multipliers + ascent).clamp(0, self.horizon**0.25)

    def _diagnose(self) -> dict[str, Tensor]:
        """Of the last update: the largest multiplier after it, the range of the loss, and the largest dilated bonus."""
        return {
            "Learner/max_multiplier": pad(self.multipliers.detach(), (1, 0)).amax(-1),
            "Learner/loss_range": self.loss_range.detach(),
            "Learner/max_bonus": self._last.detach().flatten(1).amax(-1),
        }


def dilated_bonus(bonus: Tensor, policy: Tensor, kernels: KernelSet) -> Tensor:
    """B(x,a) = b(x) + (1 + 1/L) max_p sum_y p(y) sum_a' pi(a'|y) B(y,a'), backward from B = 0 at the terminal state.

    `(... x L x S x A)`, of bonuses b `(... x L x S)`, zero in the padding, with p from the set, independently for every pair.
    """
    layers, actions = policy.shape[-3], policy.shape[-1]
    dilated = [bonus[..., -1, :, None].expand(*bonus.shape[:-2], -1, actions)]
    for k in range(layers - 2, -1, -1):
        value = (policy[..., k + 1, :, :] * dilated[-1]).sum(-1, keepdim=True)
        ahead = kernels.optimistic(value, layer=k).squeeze(-1)
        dilated.append(bonus[..., k, :, None] + (1 + 1 / layers) * ahead)
    return torch.stack(dilated[::-1], dim=-3)
