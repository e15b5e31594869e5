"""The policies that what was played is compared with: known beforehand for fixed means, and in hindsight for changing ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput
from torchcmdp.occupancy import expected_value
from torchcmdp.planning import rho, safe_optimum, unconstrained_optimum
from torchcmdp.simulator import Simulator


class Comparators:
    """The best safe policy, the best policy and rho of the rewards and costs of a simulator.

    Where neither process changes they are those of the CMDP's means. Where one does, they are those of the episodes up to the
    last recorded point: mean rewards, mean costs, and the largest cost of every pair; a process that does not change counts with
    its own mean. Then the sum of the rewards is kept at every point, and nothing else that grows.

    Attributes:
        changing: Whether one of the processes may change.
        safe: q*, the state-action occupancy of the best safe policy, `([runs x] L x S x A)`; NaN where no policy is safe.
        best: That of the best policy, safe or not, `([runs x] L x S x A)`.
        feasible: Whether a safe policy exists, `(runs,)`.
        rho: `(runs,)`.

    Args:
        env: The simulator.
        points: How many points there will be at first; there may be more.
    """

    def __init__(self, env: Simulator, points: int = 16) -> None:
        self.env = env
        self.changing = not (env.rewards.stationary and env.costs.stationary)
        self._counts: list[int] = []
        if not self.changing:
            self._find(env.cmdp, env.cmdp.rewards, env.cmdp.costs, env.costs.largest(env.costs.values))
            return
        rewards, costs, runs = env.rewards.values, env.costs.values, (env.runs,)
        self._cmdp = _one_a_run(env.cmdp, env.runs)
        self._find(self._cmdp, rewards, costs, env.costs.largest(costs))
        pair = env.layout.pair_shape
        self._reward_sum = torch.zeros(*runs, *pair, dtype=torch.float64, device=env.device)
        self._cost_sum = self._reward_sum.new_zeros(*runs, env.constraints, *pair)
        self._worst_cost = torch.full_like(self._cost_sum, -torch.inf)
        self._reward_points = self._reward_sum.new_zeros(max(1, points), *runs, *pair)
        self._anytime_points = self._reward_sum.new_zeros(max(1, points), *runs)

    def _find(self, cmdp: LayeredCMDP, rewards: Tensor, costs: Tensor, worst_costs: Tensor) -> None:
        optimum = safe_optimum(cmdp, rewards, costs)
        self.safe, self.feasible = optimum.occupancy.sum(-1), optimum.feasible.expand(self.env.runs)
        self.best = unconstrained_optimum(cmdp, rewards).occupancy.sum(-1)
        self.rho = rho(cmdp, worst_costs).expand(self.env.runs)

    def update(self) -> None:
        """Take in the values of the episode that the simulator has just played."""
        if self.changing:
            self._reward_sum += self.env.reward_values
            self._cost_sum += self.env.cost_values
            self._worst_cost = torch.maximum(self._worst_cost, self.env.costs.largest(self.env.cost_values))

    def record(self, episodes: int) -> None:
        """Keep a point, after `episodes` updates, and find the comparators anew where they change."""
        self._counts.append(episodes)
        if not self.changing:
            return
        count, used = max(episodes, 1), len(self._counts)
        rewards, costs = self.env.rewards, self.env.costs
        self._find(
            self._cmdp,
            rewards.values if rewards.stationary else self._reward_sum / count,
            costs.values if costs.stationary else self._cost_sum / count,
            self._worst_cost,
        )
        if used > len(self._reward_points):
            self._reward_points = torch.cat([self._reward_points, torch.zeros_like(self._reward_points)])
            self._anytime_points = torch.cat([self._anytime_points, torch.zeros_like(self._anytime_points)])
        self._reward_points[used - 1] = self._reward_sum
        self._anytime_points[used - 1] = expected_value(self._reward_sum, self.safe)

    def reward_of(self, occupancy: Tensor) -> Tensor:
        """What a fixed occupancy would have earned up to each point, `(runs x points)`.

        Args:
            occupancy: `([runs x] L x S x A)`.
        """
        if self.changing:
            return expected_value(self._reward_points[: len(self._counts)], occupancy).T
        counts = torch.tensor(self._counts, dtype=torch.float64, device=self.env.device)
        return expected_value(self.env.rewards.values, occupancy).to(torch.float64).expand(self.env.runs)[:, None] * counts

    @property
    def anytime_reward(self) -> Tensor:
        """t OPT_t, what the best safe policy of the episodes so far would have earned in them, `(runs x points)`."""
        return self._anytime_points[: len(self._counts)].T.clone() if self.changing else self.reward_of(self.safe)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything found and summed up, so that resuming does not depend on the LP solver's rounding."""
        state = {"comparator": self.safe.clone(), "feasible": self.feasible.clone()}
        if self.changing:
            used = len(self._counts)
            points = {"reward_points": self._reward_points[:used], "anytime_points": self._anytime_points[:used]}
            sums = {"reward_sum": self._reward_sum, "cost_sum": self._cost_sum, "worst_cost": self._worst_cost}
            kept = {"best": self.best, "rho": self.rho, **sums, **points}
            state.update({name: tensor.clone() for name, tensor in kept.items()})
        return state

    def load_state_dict(self, state: Mapping[str, Tensor], counts: list[int]) -> None:
        """Continue from what `state_dict` returned, with points after so many updates."""
        own = self.state_dict()
        for name, tensor in own.items():
            check_entry(state, name, (len(counts), *tensor.shape[1:]) if name.endswith("_points") else tuple(tensor.shape))
        new = {name: state[name].to(tensor.device, tensor.dtype).clone() for name, tensor in own.items()}
        self.safe, self.feasible, self._counts = new["comparator"], new["feasible"], list(counts)
        if self.changing:
            self.best, self.rho = new["best"], new["rho"]
            self._reward_sum, self._cost_sum, self._worst_cost = new["reward_sum"], new["cost_sum"], new["worst_cost"]
            self._reward_points = _with_room(new["reward_points"], len(self._reward_points))
            self._anytime_points = _with_room(new["anytime_points"], len(self._reward_points))


def check_entry(state: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> None:
    """Refuse a tracker's state without a tensor of that name and shape."""
    if name not in state or tuple(state[name].shape) != shape:
        found = tuple(state[name].shape) if name in state else "nothing"
        raise InvalidInput(f"The tracker's state has {found} for {name}; expected a tensor of shape {shape}.")


def _one_a_run(cmdp: LayeredCMDP, runs: int) -> LayeredCMDP:
    """The same CMDP for every run, or the batch that it is already."""
    if cmdp.batch_shape:
        return cmdp
    return LayeredCMDP(
        cmdp.layout, *(tensor.expand(runs, *tensor.shape) for tensor in (cmdp.transitions, cmdp.rewards, cmdp.costs))
    )


def _with_room(points: Tensor, room: int) -> Tensor:
    """The points, followed by zeros where there is room for more."""
    return torch.cat([points, points.new_zeros(max(room - len(points), 0), *points.shape[1:])])
