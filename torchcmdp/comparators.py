"""The policies that what was played is compared with: known beforehand for fixed means, and in hindsight for changing ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, brief
from torchcmdp.occupancy import expected_value
from torchcmdp.planning import rho, safe_optimum, unconstrained_optimum
from torchcmdp.protocols import Axes
from torchcmdp.simulator import Simulator


def stacked(points: Sequence[Tensor], like: Tensor) -> Tensor:
    """What was kept at some points, `(points x ...)`, each of the shape of `like`; there may be none."""
    return torch.stack([*points]) if points else like.new_zeros(0, *like.shape)


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
        reward_sum, cost_sum, worst_cost: Over the episodes, where something changes, `(runs x [m x] L x S x A)`.

    Args:
        env: The simulator.
    """

    def __init__(self, env: Simulator) -> None:
        lacks = [name for name in ("cmdp", "rewards", "costs", "runs", "layout") if not hasattr(env, name)]
        if lacks or isinstance(env, type):
            raise InvalidInput(f"env is {brief(env)}; it must be a Simulator, or have all that one has: there is no {lacks[0]}.")
        self.env = env
        self.changing = not (env.rewards.stationary and env.costs.stationary)
        self._kept = ["safe", "feasible"]  # in a state: what fixed processes need besides is found again from the CMDP
        self._points: dict[str, list[Tensor]] = {}
        if not self.changing:
            self._find(env.cmdp, env.cmdp.rewards, env.cmdp.costs, env.costs.largest(env.costs.values))
            return
        rewards, costs, runs = env.rewards.values, env.costs.values, (env.runs,)
        self._cmdp = _one_a_run(env.cmdp, env.runs)
        self._find(self._cmdp, rewards, costs, env.costs.largest(costs))
        pair = env.layout.pair_shape
        self.reward_sum = torch.zeros(*runs, *pair, dtype=torch.float64, device=env.device)
        self.cost_sum = self.reward_sum.new_zeros(*runs, env.constraints, *pair)
        self.worst_cost = torch.full_like(self.cost_sum, -torch.inf)
        self._kept += ["best", "rho", "reward_sum", "cost_sum", "worst_cost"]
        self._points = {"reward_points": [], "anytime_points": []}

    def _find(self, cmdp: LayeredCMDP, rewards: Tensor, costs: Tensor, worst_costs: Tensor) -> None:
        optimum = safe_optimum(cmdp, rewards, costs)
        self.safe, self.feasible = optimum.occupancy.sum(-1), optimum.feasible.expand(self.env.runs)
        self.best = unconstrained_optimum(cmdp, rewards).occupancy.sum(-1)
        self.rho = rho(cmdp, worst_costs).expand(self.env.runs)

    def update(self) -> None:
        """Take in the values of the episode that the simulator has just played."""
        if self.changing:
            self.reward_sum += self.env.reward_values
            self.cost_sum += self.env.cost_values
            self.worst_cost = torch.maximum(self.worst_cost, self.env.costs.largest(self.env.cost_values))

    def record(self, episodes: int) -> None:
        """Keep a point, after `episodes` updates, and find the comparators anew where they change."""
        if not self.changing:
            return
        sums, count = ((self.env.rewards, self.reward_sum), (self.env.costs, self.cost_sum)), max(episodes, 1)
        rewards, costs = (process.values if process.stationary else total / count for process, total in sums)
        self._find(self._cmdp, rewards, costs, self.worst_cost)
        self._points["reward_points"].append(self.reward_sum.clone())
        self._points["anytime_points"].append(expected_value(self.reward_sum, self.safe))

    def reward_of(self, occupancy: Tensor, counts: Sequence[int], first: int = 0) -> Tensor:
        """What a fixed occupancy, `([runs x] L x S x A)`, would have earned up to each point from number `first` on.

        `(runs x points)`; each of all points was recorded after so many updates as `counts` says.
        """
        if self.changing:
            return expected_value(self._curve("reward_points", first), occupancy).T
        episodes = torch.tensor(counts[first:], dtype=torch.float64, device=self.env.device)
        return expected_value(self.env.rewards.values, occupancy).to(torch.float64).expand(self.env.runs)[:, None] * episodes

    def anytime_reward(self, first: int = 0) -> Tensor:
        """t OPT_t, what the best safe policy of the episodes so far would have earned in them, `(runs x points)`.

        For changing processes, from point number `first` on.
        """
        return self._curve("anytime_points", first).T

    def _curve(self, name: str, first: int = 0) -> Tensor:
        like = self.reward_sum if name == "reward_points" else self.reward_sum[:, 0, 0, 0]
        return stacked(self._points[name][first:], like)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything found and summed up, so that resuming does not depend on the LP solver's rounding."""
        points = {name: self._curve(name) for name in self._points}
        return {name: getattr(self, name).clone() for name in self._kept} | points

    def state_axes(self) -> Axes:
        """Where the runs are in each entry; an occupancy may be one for all."""
        axes = {name: None if getattr(self, name).dim() == 3 else 0 for name in self._kept}
        return axes | dict.fromkeys(self._points, 1)

    def load_state_dict(self, state: Mapping[str, Tensor], points: int) -> None:
        """Continue from what `state_dict` returned, with so many points."""
        own = self.state_dict()
        for name, tensor in own.items():
            check_entry(state, name, (points, *tensor.shape[1:]) if name in self._points else tuple(tensor.shape))
        for name in self._kept:
            setattr(self, name, state[name].to(own[name]).clone())
        self._points = {name: list(state[name].to(self.reward_sum).unbind(0)) for name in self._points}


def check_entry(state: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> None:
    """Refuse a tracker's state without a tensor of that name and shape."""
    if name not in state or tuple(state[name].shape) != shape:
        found = tuple(state[name].shape) if name in state else "nothing"
        raise InvalidInput(f"The tracker's state has {found} for {name}; expected a tensor of shape {shape}.")


def _one_a_run(cmdp: LayeredCMDP, runs: int) -> LayeredCMDP:
    """The same CMDP for every run, or the batch that it is already."""
    if cmdp.batch_shape:
        return cmdp
    P, r, g = (tensor.expand(runs, *tensor.shape) for tensor in (cmdp.transitions, cmdp.rewards, cmdp.costs))
    return LayeredCMDP(cmdp.layout, P, r, g)
