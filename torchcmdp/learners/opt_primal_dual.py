"""OptPrimalDual-CMDP (Efroni, Mannor, Pirotta 2020): optimistic policy optimisation against prices of the constraints."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcmdp.confidence import CONFIDENCE_KINDS, transition_radius
from torchcmdp.hyperparameters import PerRun, as_numbers
from torchcmdp.learners import compiled
from torchcmdp.learners.base import Learner
from torchcmdp.learners.empirical import RADIUS_MODES, EmpiricalLearner
from torchcmdp.occupancy import open_logits, softmax_policy
from torchcmdp.trajectory import Trajectory

# Where the Slater gap is smaller than this share of L, or unknown, the step sizes are made for this one.
SMALLEST_GAP = 0.05


def _rho(learner: Learner) -> Tensor:
    """rho = L / gap, `(runs,)`."""
    return learner.layout.layers / learner.hyperparameter("slater_gap")


def _primal_step(learner: Learner) -> Tensor:
    """t_K = sqrt(2 ln|A| / (L^2 (1 + m rho)^2 T)), `(runs,)`."""
    root = math.sqrt(2 * math.log(learner.layout.actions) / learner.horizon)
    return root / (learner.layout.layers * (1 + learner.constraints * _rho(learner)))


def _dual_step(learner: Learner) -> Tensor:
    """1 / t_lambda = rho / sqrt(L^2 m T), `(runs,)`."""
    return _rho(learner) / (learner.layout.layers * math.sqrt(max(learner.constraints, 1) * learner.horizon))


class OptPrimalDual(EmpiricalLearner):
    """OptPrimalDual-CMDP in every run of a batch.

    Every episode evaluates the policy played, optimistically and with the data of the episodes before it: with averages r, g and P,
    and V = 0 after the last layer,

        Q^r = clip(r + beta^r + B^p + P V^r, 0, L - k),   Q^g_i = clip(g_i - beta^g - B^p + P V^g_i, -(L - k), L - k),

    with what `reward_high` and `cost_low` sum to in place of L - k and -(L - k) where they are given. Here B^p = L sum_y min(1,
    beta^p(y)), and zero where there is one successor and nothing to learn. Then the policy moves by
    mirror ascent on Q^r - sum_i lambda_i Q^g_i, and every multiplier lambda_i by V^g_i(x_0), never below zero.

    Published for costs in [0, 1] that are minimised; the two-sided clip is what costs in [-1, 1] make of it.

    Args:
        layout, constraints, horizon, delta, runs, dtype, device: As for every `Learner`.
        slater_gap: How safe the safest policy is, `slater_gap(cmdp)` of the true model: an oracle quantity, which the published
            step sizes need. At least 0.05 L is used, and 0.05 L where it is None: then the step sizes are a guess. This and the
            following: a float, or a tensor with one value a run.
        bonus_scale: Multiplies beta^r and beta^g.
        radius_scale: Multiplies beta^p. A pair that was never visited keeps beta^p = 1.
        primal_step: Step of the policy, sqrt(2 ln|A| / T) / (L (1 + m L / gap)) by default.
        dual_step: Step of the multipliers, 1 / (gap sqrt(m T)) by default.
        multiplier_cap: Largest multiplier; None for no limit, as published.
        radii: "published", "literal" with bonuses twice as large, or "matched" for the bonuses and transition radii of WC-OPS.
        confidence: Kind of the matched transition radii: any but "l1".
    """

    name = "OptPrimalDual"
    hyperparameters = {
        "slater_gap": 0.0,
        "primal_step": _primal_step,
        "dual_step": _dual_step,
        "bonus_scale": 1.0,
        "radius_scale": 1.0,
        "multiplier_cap": None,
    }
    # an L1 ball has one radius for all successors, and the bonus needs one for each
    choices = {"radii": RADIUS_MODES, "confidence": tuple(kind for kind in CONFIDENCE_KINDS if kind != "l1")}
    uses = ("known_rewards", "known_costs")
    multiplier_cap: Tensor | None
    logits: Tensor
    multipliers: Tensor

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.add_zeros("logits", *self.layout.pair_shape)
        self.add_zeros("multipliers", self.constraints)

    def add_hyperparameter(self, name: str, value: PerRun | None) -> None:
        """As for every `Learner`, with the Slater gap in its limits, which no gap given is out of."""
        if name == "slater_gap":
            layers = self.layout.layers
            gap = as_numbers(name, 0.0 if value is None else value, dtype=self.dtype, device=self.device)
            value = gap.clamp(SMALLEST_GAP * layers, layers)
        super().add_hyperparameter(name, value)

    @property
    def policy(self) -> Tensor:
        """pi_t, `(runs x L x S x A)`."""
        return softmax_policy(self.logits, self.layout)

    def optimistic_feedback(self) -> Tensor:
        """Rewards with their bonuses added, then costs with theirs taken off: `(runs x (1 + m) x L x S x A)`."""
        reward_radius, cost_radius = self.feedback_radii()
        counts, scale = (self.visits, self.transition_visits), self.hyperparameter("radius_scale")
        radius = transition_radius(self.kernel_kind, *counts, self.layout, radius_scale=scale, **self.made_for)
        # a lone successor is certain, whatever the radius says
        uncertain = self.layout.next_widths(self.device) > 1
        model_bonus = self.layout.layers * radius.clamp_max(1).sum(-1) * uncertain
        rewards = self.reward_mean + reward_radius if self.known_rewards is None else self.known_rewards
        costs, off = (self.cost_mean, cost_radius + model_bonus) if self.known_costs is None else (self.known_costs, model_bonus)
        return torch.cat([(rewards + model_bonus).unsqueeze(-4), costs - off.unsqueeze(-4)], dim=-4)

    def evaluate(self) -> tuple[Tensor, Tensor]:
        """Optimistic Q^r, Q^g_1 .. Q^g_m of the policy, `(runs x (1 + m) x L x S x A)`, and their V(x_0), `(runs x (1 + m))`."""
        feedback, policy, kernel = self.optimistic_feedback(), self.policy.unsqueeze(-4), self.kernel
        lowest, highest = self.value_ends()
        value = feedback.new_zeros(*feedback.shape[:-3], self.layout.width)
        layers = []
        for k in reversed(range(self.layout.layers)):
            action_value = feedback[..., k, :, :] + self._expected(kernel[..., k, :, :, :], value, k)
            action_value = action_value.maximum(lowest[..., k, None, None]).minimum(highest[..., k, None, None])
            value = (policy[..., k, :, :] * action_value).sum(-1)
            layers.append(action_value)
        return torch.stack(layers[::-1], dim=-3), value[..., 0]

    def _expected(self, kernel: Tensor, value: Tensor, k: int) -> Tensor:
        """sum_y P(y|x,a) V(y) of every value, `(runs x (1 + m) x S)`, under the kernel of layer k: `(runs x (1 + m) x S x A)`."""
        if self.layout.lists is not None:
            return (kernel.unsqueeze(-4) * self.layout.ahead(value, k)).sum(-1)
        expected = (kernel.flatten(-3, -2) @ value.transpose(-1, -2)).transpose(-1, -2)
        return torch.unflatten(expected, -1, self.layout.pair_shape[1:])

    def value_ends(self) -> tuple[Tensor, Tensor]:
        """What the rest of an episode can earn, and cost, from each layer on: least and most, `(1 or runs x (1 + m) x L)` each.

        Rewards, bonuses and their values are never negative, so that their lower end needs no care.
        """
        real = self.layout.pair_mask(self.device)
        best = torch.where(real, self.reward_high, -1.0).flatten(-2).amax(-1).unsqueeze(-2)
        least = torch.where(real, self.cost_low, 1.0).flatten(-2).amin(-1)
        rows = max(len(best), len(least))
        best, least = best.expand(rows, -1, -1), least.expand(rows, -1, -1)
        lowest, highest = torch.cat([-torch.ones_like(best), least], dim=-2), torch.cat([best, torch.ones_like(least)], dim=-2)
        return lowest.flip(-1).cumsum(-1).flip(-1), highest.flip(-1).cumsum(-1).flip(-1)

    def update(self, trajectory: Trajectory) -> None:
        """Evaluate the policy that was played, move it and the multipliers, and only then count the episode."""
        if compiled.update(self, trajectory):
            return
        self.check_trajectory(trajectory)
        action_values, start_values = self.evaluate()
        prices = torch.cat([torch.ones_like(start_values[:, :1]), -self.multipliers], dim=-1)[..., None, None, None]
        step = self.hyperparameter("primal_step")[:, None, None, None]
        logits = open_logits(self.logits + step * (prices * action_values).sum(-4), self.layout).log_softmax(-1)
        self.logits = torch.where(self.layout.pair_mask(self.device), logits, 0)
        multipliers = (self.multipliers + self.hyperparameter("dual_step").unsqueeze(-1) * start_values[:, 1:]).clamp_min(0)
        if self.multiplier_cap is not None:
            multipliers = torch.minimum(multipliers, self.hyperparameter("multiplier_cap").unsqueeze(-1))
        self.multipliers = multipliers
        self.count(trajectory)
        self._last = start_values

    def _diagnose(self) -> dict[str, Tensor]:
        """Of the last update: the largest multiplier after it, and the optimistic reward and violation of the policy played."""
        values: Tensor = self._last.detach()
        return {
            "Learner/max_multiplier": pad(self.multipliers.detach(), (1, 0)).amax(-1),
            "Learner/optimistic_reward": values[:, 0],
            "Learner/optimistic_violation": pad(values[:, 1:], (1, 0)).amax(-1),
        }
