"""What an environment shows of rewards and costs: the user's units, a limit that is the budget, one cost where one is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, brief
from torchcmdp.planning import least_totals, refuse_unkept, slater_gap
from torchcmdp.units import Units, budgets_of


class Shown:
    """Rewards and costs of steps in the units that the CMDP was given in, or as they are where it has none.

    Everything is a cost here: of a utility the negative is shown, and limited by the negative of what it must sum to.

    Args:
        cmdp: A single CMDP, or a batch of one a run.
        budget: What each cost may sum to over an episode in expectation, in the user's units, in place of the CMDP's own budget,
            which is zero where it has no units; one for all or one each.
        constraint: Which of the costs `cost` returns; None for the worst.

    Attributes:
        limits: What the expected sum of each cost over an episode may be, `(m,)` or `(runs x m)`.
    """

    def __init__(self, cmdp: LayeredCMDP, budget: object, constraint: int | None) -> None:
        if constraint is not None and not (isinstance(constraint, int) and 0 <= constraint < cmdp.constraints):
            words = f"it must be None for the worst, or one of the {cmdp.constraints}, counted from 0"
            raise InvalidInput(f"constraint is {brief(constraint)}; {words}.")
        self._cmdp, self.constraint, self.units, self._batch = cmdp, constraint, cmdp.units, bool(cmdp.batch_shape)
        m, L, real = cmdp.constraints, cmdp.layout.layers, {"dtype": torch.float64, "device": cmdp.device}
        drawn = 0 if cmdp.origin is None else cmdp.origin.drawn
        steps = torch.full((L, 1), 1 / (L - drawn), **real)  # type: ignore[call-overload]
        steps[1 : drawn + 1] = 0  # where a start is drawn, nothing is earned and nothing met
        units = cmdp.units
        sign = torch.ones(m, **real) if units is None else units.sign  # type: ignore[call-overload]
        own = torch.zeros(m, **real) if units is None else sign * units.budget  # type: ignore[call-overload]
        self._scale = torch.ones_like(own) if units is None else units.cost_scale
        self.limits = own if budget is None else (sign * budgets_of(budget, m).to(cmdp.device)).expand_as(own)
        self._cost_share, self._limit_share = (each.unsqueeze(-2) * steps for each in (own, self.limits))
        self._reward_share = None if units is None else units.reward_offset.unsqueeze(-1) * steps.squeeze(-1)
        if budget is not None and cmdp.device.type != "meta":
            least = self._scale * least_totals(cmdp.costs, cmdp.transitions, cmdp.layout) + own
            moved = ((own - self.limits) / self._scale / L)[..., None, None, None].to(cmdp.costs)
            refuse_unkept(least, self.limits, self._scale, sign, L, lambda: slater_gap(cmdp, cmdp.costs + moved))

    @property
    def limit(self) -> Any:
        """What the expected sum of `cost` over an episode may be; one a run where the budgets of a batch differ."""
        if not self.limits.shape[-1] or (self.constraint is None and self.limits.shape[-1] > 1):
            return 0.0
        limit = self.limits[..., self.constraint or 0].flatten()
        return float(limit[0]) if (limit == limit[0]).all() else limit.numpy(force=True)

    def reward(self, rewards: Tensor, layer: Tensor) -> Tensor:
        """Of steps from these layers, `(... x runs)` and `(runs,)`; or of one run from all of them, `(... x L)` and `(L,)`."""
        if self.units is None or self._reward_share is None:
            return rewards
        return (rewards * self.units.reward_scale + self._at(self._reward_share, layer)).to(rewards.dtype)

    def costs(self, costs: Tensor, layer: Tensor) -> Tensor:
        """The same for costs, with an axis of constraints at the end."""
        if self.units is None:
            return costs
        return (costs * self._scale + self._at(self._cost_share, layer)).to(costs.dtype)

    def cost(self, costs: Tensor, layer: Tensor) -> Tensor:
        """One number from what `costs` returns: the chosen constraint's, or how far the worst exceeds its share of the budget.

        A sum would let one constraint pay for another. The sum over the steps of the worst excess is at least every constraint's
        own, so that who keeps it at zero keeps all budgets.
        """
        if not costs.shape[-1]:
            return costs.sum(-1)
        if self.constraint is not None or costs.shape[-1] == 1:
            return costs[..., self.constraint or 0]
        return (costs - self._at(self._limit_share, layer).to(costs)).amax(-1)

    def normal_units(self) -> Units:
        """The units of `normal`: the CMDP's own, or those of another budget, over whose shares costs may go further."""
        units, like = self.units, self._cmdp
        pairs, one = like.layout.pair_mask(like.device).to(like.dtype), torch.ones((), dtype=torch.float64, device=like.device)
        if units is None:
            lowest = pairs.neg().expand_as(like.costs)
            units = Units(one, 0 * one, self._scale, self.limits, ("<=",) * like.constraints, pairs, lowest)
        moved = (self._cost_share - self._limit_share)[:, :, None, None].movedim(1, 0)  # (m x L x 1 x 1)
        wide = self._wide[:, None, None, None]
        lowest = ((units.cost_low * self._scale[:, None, None, None] + moved) / wide).clamp_min(-1) * pairs
        return replace(units, cost_scale=self._wide, budget=units.sign * self.limits, cost_low=lowest.to(like.dtype))

    def normal(self, reward: float, costs: np.ndarray, layer: int) -> tuple[float, np.ndarray]:
        """What is shown of one step, in the normal form of `normal_units`: [0, 1], and [-1, 1] with threshold zero, `(m,)`."""
        if self.units is not None and self._reward_share is not None:
            reward = (reward - float(self._reward_share[layer])) / float(self.units.reward_scale)
        shown = (costs - self._limit_share[layer].numpy(force=True)) / self._wide.numpy(force=True)
        return min(max(reward, 0.0), 1.0), np.clip(shown, -1, 1)  # rounding alone leaves the range

    @property
    def _wide(self) -> Tensor:
        """What one unit of `normal`'s costs is, `(m,)`: more than the CMDP's where another budget moves costs out of [-1, 1]."""
        wide: Tensor = self._scale + (self._cost_share - self._limit_share).abs().amax(-2)
        return wide

    def _at(self, shares: Tensor, layer: Tensor) -> Tensor:
        """Values by layer, `(L [x m])`, or of a batch `(runs x L [x m])`, at the layer that each run is in."""
        return shares[torch.arange(len(layer), device=layer.device), layer] if self._batch else shares[layer]
