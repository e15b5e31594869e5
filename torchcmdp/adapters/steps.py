"""Episodes one step at a time, for environments whose actions are chosen by somebody else, and what is shown of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, brief
from torchcmdp.layout import Layout
from torchcmdp.occupancy import uniform_policy
from torchcmdp.planning import check_cmdp, least_totals, refuse_unkept, slater_gap
from torchcmdp.processes import Fixed, Process
from torchcmdp.sampling import costs_at, draw, thresholds, values_at
from torchcmdp.simulator import Simulator
from torchcmdp.streams import COST, NEXT_STATE, REWARD, uniform_at
from torchcmdp.units import Units, budgets_of

OBSERVATIONS = ("index", "one-hot")


def first_numbers(layout: Layout) -> list[int]:
    """The number of state 0 of each layer, the terminal one included, where the states of all layers are numbered through."""
    return [sum(layout.widths[:k]) for k in range(layout.layers + 1)]


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
        if constraint is not None and not (type(constraint) is int and 0 <= constraint < cmdp.constraints):
            words = f"it must be None for the worst, or one of the {cmdp.constraints}, counted from 0"
            raise InvalidInput(f"constraint is {brief(constraint)}; {words}.")
        units = _units_of(cmdp)
        self._cmdp, self.constraint, self._units, self._scale = cmdp, constraint, units, units.cost_scale
        L, drawn = cmdp.layout.layers, 0 if cmdp.origin is None else cmdp.origin.drawn
        steps = torch.full((L, 1), 1 / (L - drawn), dtype=torch.float64, device=cmdp.device)
        steps[1 : drawn + 1] = 0  # where a start is drawn, nothing is earned and nothing met
        sign, own = units.sign, units.sign * units.budget
        self.limits = own if budget is None else (sign * budgets_of(budget, cmdp.constraints).to(cmdp.device)).expand_as(own)
        self._cost_share, self._limit_share = (each.unsqueeze(-2) * steps for each in (own, self.limits))
        self._reward_share = units.reward_offset.unsqueeze(-1) * steps.squeeze(-1)
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
        if self._cmdp.units is None:
            return rewards
        return (rewards * self._units.reward_scale + self._at(self._reward_share, layer)).to(rewards.dtype)

    def costs(self, costs: Tensor, layer: Tensor) -> Tensor:
        """The same for costs, with an axis of constraints at the end."""
        if self._cmdp.units is None:
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
        units, like = self._units, self._cmdp
        moved = (self._cost_share - self._limit_share)[:, :, None, None].movedim(1, 0)  # (m x L x 1 x 1)
        wide = self._wide[:, None, None, None]
        lowest = (units.cost_low * self._scale[:, None, None, None] + moved) / wide
        lowest = lowest.clamp_min(-1) * like.layout.pair_mask(like.device)
        return replace(units, cost_scale=self._wide, budget=units.sign * self.limits, cost_low=lowest.to(like.dtype))

    def normal(self, reward: float, costs: np.ndarray, layer: int) -> tuple[float, np.ndarray]:
        """What is shown of one step, in the normal form of `normal_units`: [0, 1], and [-1, 1] with threshold zero, `(m,)`."""
        reward = (reward - float(self._reward_share[layer])) / float(self._units.reward_scale)
        shown = (costs - self._limit_share[layer].numpy(force=True)) / self._wide.numpy(force=True)
        return min(max(reward, 0.0), 1.0), np.clip(shown, -1, 1)  # rounding alone leaves the range

    @property
    def _wide(self) -> Tensor:
        """What one unit of `normal`'s costs is, `(m,)`: more than the CMDP's where another budget moves costs out of [-1, 1]."""
        wide: Tensor = self._scale + (self._cost_share - self._limit_share).abs().amax(-2)
        return wide

    def _at(self, shares: Tensor, layer: Tensor) -> Tensor:
        """Values by layer, `(L [x m])`, or of a batch `(runs x L [x m])`, at the layer that each run is in."""
        batch = self._units.reward_scale.dim() > 0
        return shares[torch.arange(len(layer), device=layer.device), layer] if batch else shares[layer]


def _units_of(cmdp: LayeredCMDP) -> Units:
    """The units of a CMDP; where it has none, those in which its numbers are shown as they are."""
    if cmdp.units is not None:
        return cmdp.units
    m, one = cmdp.constraints, torch.ones((), dtype=torch.float64, device=cmdp.device)
    pairs = cmdp.layout.pair_mask(cmdp.device).to(cmdp.dtype)
    return Units(one, 0 * one, one.expand(m), one.new_zeros(m), ("<=",) * m, pairs, pairs.neg().expand_as(cmdp.costs))


class Steps:
    """The simulator's transitions and feedback, one step at a time and with actions from outside.

    A step draws from the numbers that `Simulator` would use for the same seed, run, episode and layer, so that the same actions
    lead through the same states.

    Attributes:
        cmdp, rewards, costs, runs: As in `Simulator`, with the CMDP's mean rewards and costs as fixed feedback by default.
        layout: Of the CMDP.
        shown: What of rewards and costs is shown, by the arguments `budget` and `constraint`.
        stationary: Whether neither rewards nor costs change with the episodes.
    """

    def __init__(
        self, cmdp: LayeredCMDP, rewards: Process | None, costs: Process | None, runs: int, budget: object, constraint: int | None
    ) -> None:
        check_cmdp(cmdp)
        rewards, costs = (Fixed(mean) if given is None else given for mean, given in ((cmdp.rewards, rewards), (cmdp.costs, costs)))
        self._whole = whole = Simulator(cmdp, rewards, costs, runs)  # refuses what does not fit together
        self.shown = Shown(cmdp, budget, constraint)
        self.cmdp, self.rewards, self.costs, self.runs, self.layout = cmdp, whole.rewards, whole.costs, runs, cmdp.layout
        self._successors = thresholds(cmdp.transitions).reshape(-1, cmdp.layout.slots)
        pairs = len(self._successors) // max(1, cmdp.batch_shape.numel())
        self.run = torch.arange(runs, device=cmdp.device)
        self._first = torch.tensor(first_numbers(cmdp.layout), device=cmdp.device)
        self._first_row = self.run * pairs if cmdp.batch_shape else torch.zeros_like(self.run)
        self._fresh = (self.rewards.state_dict(), self.costs.state_dict())
        self.stationary = self.rewards.stationary and self.costs.stationary

    def uniforms(self, seed: int | Tensor, episode: Tensor, layer: Tensor) -> Tensor:
        """The random numbers of one step of every run: `(runs x (3 + m))`, by purpose as in `RunStreams.uniform`."""
        return uniform_at(seed, self.run, episode, layer, self.cmdp.constraints)

    def step(self, layer: Tensor, state: Tensor, action: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next state and the reward, `(runs,)`, and the costs `(runs x m)`, as they are shown; all else is int64 `(runs,)`."""
        pair = (layer * self.layout.width + state) * self.layout.actions + action
        slot = draw(self._successors.index_select(0, self._first_row + pair), uniforms[:, NEXT_STATE, None])
        next_state = self.layout.state_at(pair, slot)
        visit = pair.unsqueeze(1)  # episodes of one step, as far as the processes can tell
        reward = self.rewards.observe(values_at(self.rewards.values, visit), uniforms[:, None, REWARD])
        costs = self.costs.observe(costs_at(self.costs.values, visit), uniforms[:, None, COST:])
        return next_state, self.shown.reward(reward.squeeze(1), layer), self.shown.costs(costs.squeeze(1), layer)

    def observation(self, layer: Tensor, state: Tensor, *, one_hot: bool) -> Tensor:
        """The number of a state over all layers, `(runs,)` int64, or `(runs x states)` float32 with a one at that place."""
        number = self._first[layer] + state
        return torch.nn.functional.one_hot(number, self.layout.total_states).to(torch.float32) if one_hot else number

    def restart(self) -> None:
        """Bring the processes back to where they were when this object was made."""
        self.rewards.load_state_dict(self._fresh[0])
        self.costs.load_state_dict(self._fresh[1])
        self._whole.episode = 0

    def advance(self, states: Tensor, actions: Tensor) -> None:
        """Move the processes on to the next episode, from the states and actions of the one just played, `(runs x L)`.

        A process that looks at the policy is shown what was seen of it: the actions that were taken where the runs went, and the
        uniform policy elsewhere.
        """
        policy = uniform_policy(self.layout, dtype=self.cmdp.dtype, device=self.cmdp.device).repeat(self.runs, 1, 1, 1)
        taken = torch.nn.functional.one_hot(actions, self.layout.actions).to(policy)
        index = states[..., None, None].expand(-1, -1, 1, self.layout.actions)
        policy.scatter_(2, index, taken.unsqueeze(2))
        self.rewards.advance(policy)
        self.costs.advance(policy)
        self._whole.episode += 1
        self._whole.read_values()  # refuses those of somebody's process that has left its range
