"""OptPrimalDual-CMDP (Efroni, Mannor, Pirotta 2020): optimistic policy optimisation against prices of the constraints."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcmdp.confidence import CONFIDENCE_KINDS, transition_radius
from torchcmdp.errors import choice
from torchcmdp.layout import Layout
from torchcmdp.learners.empirical import EmpiricalLearner
from torchcmdp.learners.widths import WIDTH_MODES, feedback_widths, transition_kind
from torchcmdp.trajectory import Trajectory

# Where the Slater gap is smaller than this share of L, or unknown, the step sizes are made for this one.
SMALLEST_GAP = 0.05

# An L1 ball has a radius and no width for each successor, which the bonus needs.
WIDTH_KINDS = tuple(kind for kind in CONFIDENCE_KINDS if kind != "l1")


class OptPrimalDual(EmpiricalLearner):
    """OptPrimalDual-CMDP in every run of a batch.

    Every episode evaluates the policy played, optimistically and with the data of the episodes before it: with averages r, g and P,
    and V = 0 after the last layer,

        Q^r = clip(r + beta^r + B^p + P V^r, 0, L - k),   Q^g_i = clip(g_i - beta^g - B^p + P V^g_i, -(L - k), L - k),

    where B^p = L sum_y min(1, beta^p(y)), and zero where there is one successor and nothing to learn. Then the policy moves by
    mirror ascent on Q^r - sum_i lambda_i Q^g_i, and every multiplier lambda_i by V^g_i(x_0), never below zero.

    Published for costs in [0, 1] that are minimised; the two-sided clip is what costs in [-1, 1] make of it.

    Args:
        layout: Layer widths and actions.
        constraints: m.
        horizon: T, which the widths and the default step sizes are made for.
        delta: Failure probability.
        runs: How many independent learners there are.
        slater_gap: How safe the safest policy is, `slater_gap(cmdp)` of the true model: an oracle quantity, which the published
            step sizes need. At least 0.05 L is used, and 0.05 L where it is None: then the step sizes are a guess. This and the
            following: a float, or a tensor with one value a run.
        bonus_scale: Multiplies beta^r and beta^g.
        radius_scale: Multiplies beta^p. A pair that was never visited keeps beta^p = 1.
        primal_step: Step of the policy, sqrt(2 ln|A| / T) / (L (1 + m L / gap)) by default.
        dual_step: Step of the multipliers, 1 / (gap sqrt(m T)) by default.
        multiplier_cap: Largest multiplier; None for no limit, as published.
        widths: "published", or "matched" for the bonuses and transition widths of WC-OPS.
        confidence: Kind of the matched transition widths: any but "l1".
    """

    name = "OptPrimalDual"
    logits: Tensor
    multipliers: Tensor

    def __init__(
        self,
        layout: Layout,
        constraints: int,
        horizon: int,
        delta: float = 0.01,
        runs: int = 1,
        *,
        slater_gap: Tensor | float | None = None,
        bonus_scale: Tensor | float = 1.0,
        radius_scale: Tensor | float = 1.0,
        primal_step: Tensor | float | None = None,
        dual_step: Tensor | float | None = None,
        multiplier_cap: Tensor | float | None = None,
        widths: str = "published",
        confidence: str = "entrywise",
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(layout, constraints, horizon, delta, runs, dtype=dtype, device=device)
        gap = torch.as_tensor(0.0 if slater_gap is None else slater_gap, dtype=self.dtype, device=self.device)
        self.add_hyperparameter("slater_gap", gap.clamp(SMALLEST_GAP * layout.layers, layout.layers))
        primal, dual = default_steps(self.hyperparameter("slater_gap"), layout, self.constraints, self.horizon)
        self.add_hyperparameter("primal_step", primal if primal_step is None else primal_step)
        self.add_hyperparameter("dual_step", dual if dual_step is None else dual_step)
        self.add_hyperparameter("bonus_scale", bonus_scale)
        self.add_hyperparameter("radius_scale", radius_scale)
        self.capped = multiplier_cap is not None
        if multiplier_cap is not None:
            self.add_hyperparameter("multiplier_cap", multiplier_cap)
        self.widths = choice("widths", widths, WIDTH_MODES)
        self.confidence = choice("confidence", confidence, WIDTH_KINDS)
        self.register_buffer("logits", torch.zeros(self.runs, *layout.pair_shape, dtype=self.dtype, device=self.device))
        self.register_buffer("multipliers", torch.zeros(self.runs, self.constraints, dtype=self.dtype, device=self.device))
        self._start_values: Tensor | None = None

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in `nn.Module`; the learner then continues bit for bit where the state was taken."""
        self._start_values = None
        return super().load_state_dict(*args, **kwargs)

    @property
    def policy(self) -> Tensor:
        """pi_t, `(runs x L x S x A)`."""
        return self.logits.softmax(-1) * self.layout.pair_mask(self.device)

    def optimistic_feedback(self) -> Tensor:
        """Rewards with their bonuses added, then costs with theirs taken off: `(runs x (1 + m) x L x S x A)`."""
        like: dict[str, Any] = {"horizon": self.horizon, "delta": self.delta}
        reward_width, cost_width = feedback_widths(
            self.widths, self.visits, self.layout, self.constraints, bonus_scale=self.hyperparameter("bonus_scale"), **like
        )
        kind, scale = transition_kind(self.widths, self.confidence), self.hyperparameter("radius_scale")
        width = transition_radius(kind, self.visits, self.transition_visits, self.layout, radius_scale=scale, **like)
        # a lone successor is certain, whatever the width says
        uncertain = self.layout.next_widths(self.device) > 1
        model_bonus = self.layout.layers * width.clamp_max(1).sum(-1) * uncertain
        rewards = self.reward_mean + reward_width + model_bonus
        costs = self.cost_mean - (cost_width + model_bonus).unsqueeze(-4)
        return torch.cat([rewards.unsqueeze(-4), costs], dim=-4)

    def evaluate(self) -> tuple[Tensor, Tensor]:
        """The optimistic values of the policy: Q^r, Q^g_1 .. Q^g_m, and their V(x_0).

        Returns:
            `(runs x (1 + m) x L x S x A)` and `(runs x (1 + m))`.
        """
        feedback, policy, kernel = self.optimistic_feedback(), self.policy.unsqueeze(-4), self.kernel
        value = feedback.new_zeros(*feedback.shape[:-3], self.layout.width)
        layers = []
        for k in reversed(range(self.layout.layers)):
            expected = (kernel[..., k, :, :, :].flatten(-3, -2) @ value.transpose(-1, -2)).transpose(-1, -2)
            # rewards, bonuses and their values are never negative, so that their lower limit of zero needs no clip of its own
            left = self.layout.layers - k
            action_value = (feedback[..., k, :, :] + expected.unflatten(-1, self.layout.pair_shape[1:])).clamp(-left, left)
            value = (policy[..., k, :, :] * action_value).sum(-1)
            layers.append(action_value)
        return torch.stack(layers[::-1], dim=-3), value[..., 0]

    def update(self, trajectory: Trajectory) -> None:
        """Evaluate the policy that was played, move it and the multipliers, and only then count the episode."""
        self.check_trajectory(trajectory)
        action_values, start_values = self.evaluate()
        prices = torch.cat([torch.ones_like(start_values[:, :1]), -self.multipliers], dim=-1)[..., None, None, None]
        step = self.hyperparameter("primal_step")[:, None, None, None]
        logits = (self.logits + step * (prices * action_values).sum(-4)).log_softmax(-1)
        self.logits = logits * self.layout.pair_mask(self.device)
        multipliers = (self.multipliers + self.hyperparameter("dual_step").unsqueeze(-1) * start_values[:, 1:]).clamp_min(0)
        if self.capped:
            multipliers = torch.minimum(multipliers, self.hyperparameter("multiplier_cap").unsqueeze(-1))
        self.multipliers = multipliers
        self.count(trajectory)
        self._start_values = start_values

    def diagnostics(self) -> dict[str, Tensor]:
        """Of the last update: the largest multiplier after it, and the optimistic reward and violation of the policy played."""
        if self._start_values is None:
            return {}
        values = self._start_values.detach()
        return {
            "Learner/max_multiplier": pad(self.multipliers.detach(), (1, 0)).amax(-1),
            "Learner/optimistic_reward": values[:, 0],
            "Learner/optimistic_violation": pad(values[:, 1:], (1, 0)).amax(-1),
        }

    def config(self) -> dict[str, Any]:
        """Everything that the learner was made with, ready for JSON."""
        cap = {} if self.capped else {"multiplier_cap": None}
        return {**super().config(), **cap, "widths_mode": self.widths, "confidence": self.confidence}


def default_steps(gap: Tensor, layout: Layout, constraints: int, horizon: int) -> tuple[Tensor, Tensor]:
    """t_K = sqrt(2 ln|A| / (L^2 (1 + m rho)^2 T)) and 1 / t_lambda = rho / sqrt(L^2 m T), with rho = L / gap: `(runs,)` each.

    Args:
        gap: The Slater gap, `(runs,)`.
    """
    rho = layout.layers / gap
    primal = math.sqrt(2 * math.log(layout.actions) / horizon) / (layout.layers * (1 + constraints * rho))
    return primal, rho / (layout.layers * math.sqrt(max(constraints, 1) * horizon))
