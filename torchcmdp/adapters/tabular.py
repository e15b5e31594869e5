"""Tabular Gymnasium environments, such as FrozenLake, CliffWalking and Taxi, as layered CMDPs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcmdp.adapters import require
from torchcmdp.cmdp import LayeredCMDP, unroll
from torchcmdp.errors import InvalidInput
from torchcmdp.processes import Bernoulli

require("gymnasium", "gym")

import gymnasium as gym  # noqa: E402


class Move(NamedTuple):
    """One possible outcome of an action, from which costs are computed."""

    state: int
    action: int
    next_state: int
    reward: float
    terminated: bool


Cost = Callable[[Move], float]


def fell_in_a_hole(move: Move) -> float:
    """FrozenLake: 1 for the step into a hole, the only one that ends an episode without a reward."""
    return float(move.terminated and move.reward <= 0)


def fell_off_the_cliff(move: Move) -> float:
    """CliffWalking: 1 for the step over the edge, which costs a reward of 100 and leads back to the start."""
    return float(move.reward <= -100)


def broke_a_rule(move: Move) -> float:
    """Taxi: 1 for picking up or dropping off where that is not allowed."""
    return float(move.reward <= -10)


@dataclass(frozen=True, eq=False)
class ImportedCMDP:
    """A tabular environment as a layered CMDP, and how to read its numbers.

    Our rewards lie in [0, 1], so a reward of the environment is shown as (reward - low) / (high - low). Our constraints are that a
    sum over the L steps is at most zero, so a budget is spread over them: each step of constraint i is shown as
    (cost - budget_i / L) / scale_i, whose sum is at most zero just when the costs sum to at most the budget.

    Attributes:
        cmdp: The layered CMDP.
        states: The environment's state at each place of each layer, `(L x S)` int64: `ended` once an episode is over, `waiting`
            before the start is drawn, and -1 in the padding.
        ended, waiting: The numbers of these two states: the environment's number of states, and one more.
        low, high: The environment's smallest and largest reward, zero among them.
        budgets: How much cost an episode may have in expectation, `(m,)`.
        scales: What the costs were divided by to lie in [-1, 1], `(m,)`; one wherever they did so already.
    """

    cmdp: LayeredCMDP
    states: Tensor
    ended: int
    waiting: int
    low: float
    high: float
    budgets: Tensor
    scales: Tensor

    def environment_return(self, value: Tensor | float) -> Any:
        """The environment's expected return of a policy whose expected reward in our CMDP is `value`, `(...)`."""
        return value * (self.high - self.low) + self.low * self.cmdp.layout.layers

    def environment_costs(self, sums: Tensor) -> Tensor:
        """The environment's expected costs of a policy whose expected costs in our CMDP are `sums`, `(... x m)`."""
        return sums * self.scales + self.budgets

    def cost_process(self) -> Bernoulli:
        """Costs that are 1 or as small as a step's can be, which makes far less noise than 1 or -1 would."""
        return Bernoulli(self.cmdp.costs, low=min(0.0, float(self.cmdp.costs.min()) if len(self.budgets) else 0.0))


def from_gymnasium(
    env: Any,
    horizon: int,
    cost: Cost | Sequence[Cost] = (),
    budget: float | Sequence[float] = 0.0,
    *,
    start: int | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> ImportedCMDP:
    """Unroll a tabular environment over `horizon` steps, keeping the states that can be reached by then.

    What ends an episode leads to one absorbing state without rewards and costs. Where the start is random, a layer comes first in
    which every action draws it, and L is the horizon plus one; otherwise L is the horizon.

    Args:
        env: A Gymnasium environment whose `unwrapped.P[state][action]` lists (probability, next state, reward, terminated), or
            its id.
        horizon: Steps of an episode.
        cost: The cost of a move, such as `fell_in_a_hole`; one function a constraint.
        budget: How much of it an episode may have in expectation: with a cost of one for an event, its largest probability. One
            number for all constraints, or one each.
        start: A state to start in, in place of the environment's own choice.
        dtype, device: Of the result.
    """
    env = gym.make(env) if isinstance(env, str) else env
    costs = [cost] if callable(cost) else list(cost)
    budgets = budgets_of(budget, len(costs))
    initial = _initial(env.unwrapped, start)
    tables = _tables(env.unwrapped.P, initial, costs)
    ended, waiting = len(initial), len(initial) + 1
    random_start = int((initial > 0).sum()) > 1
    first, layers = (waiting, horizon + 1) if random_start else (int(initial.argmax()), horizon)
    low, high = min(0.0, float(tables.rewards.min())), max(0.0, float(tables.rewards.max()))
    high = high if high > low else low + 1.0
    shifted = tables.costs - (budgets / layers)[:, None, None]
    scales = shifted.abs().amax((1, 2)).clamp_min(1)
    rewards = (tables.mean_rewards - low) / (high - low)
    cmdp = unroll(tables.transitions, rewards.clamp(0, 1), shifted / scales[:, None, None], horizon=layers, start=first)
    states = _states(tables.transitions, first, cmdp)
    return ImportedCMDP(cmdp.to(device, dtype), states, ended, waiting, low, high, budgets, scales)


def budgets_of(budget: float | Sequence[float], constraints: int) -> Tensor:
    """One budget for every constraint, `(m,)`."""
    budgets = torch.as_tensor(budget, dtype=torch.float64)
    if budgets.shape not in ((), (constraints,)) or not ((budgets >= 0) & budgets.isfinite()).all():
        raise InvalidInput(f"budget is {budget}; it must be a number that is not negative, or one for each of {constraints} costs.")
    return budgets.expand(constraints)


class _Tables(NamedTuple):
    """A stationary MDP over the environment's N states, the one in which it has ended, and the one before its start is drawn."""

    transitions: Tensor
    mean_rewards: Tensor
    costs: Tensor
    rewards: Tensor


def _tables(table: Mapping[int, Any], initial: Tensor, costs: Sequence[Cost]) -> _Tables:
    n, actions = len(table), len(table[0])
    transitions = torch.zeros(n + 2, actions, n + 2, dtype=torch.float64)
    mean_rewards, mean_costs = torch.zeros(n + 2, actions, dtype=torch.float64), torch.zeros(len(costs), n + 2, actions).double()
    rewards = [0.0]
    for state, choices in table.items():
        for action, outcomes in choices.items():
            for probability, next_state, reward, terminated in outcomes:
                move = Move(int(state), int(action), int(next_state), float(reward), bool(terminated))
                transitions[state, action, n if terminated else move.next_state] += probability
                mean_rewards[state, action] += probability * move.reward
                for i, cost in enumerate(costs):
                    mean_costs[i, state, action] += probability * float(cost(move))
                rewards.append(move.reward)
    transitions[n, :, n] = 1
    transitions[n + 1, :, :n] = initial
    return _Tables(transitions / transitions.sum(-1, keepdim=True), mean_rewards, mean_costs, torch.tensor(rewards).double())


def _initial(env: Any, start: int | None) -> Tensor:
    """The distribution of the first state, `(N,)`."""
    table = getattr(env, "P", None)
    if not isinstance(table, Mapping) or not table:
        raise InvalidInput(f"{type(env).__name__} has no table P of transitions; only tabular environments can be imported.")
    states = len(table)
    if start is not None:
        if not 0 <= start < states:
            raise InvalidInput(f"start is {start}; it must be a state between 0 and {states - 1}.")
        return torch.nn.functional.one_hot(torch.tensor(start), states).double()
    distribution = getattr(env, "initial_state_distrib", None)
    if distribution is None:
        raise InvalidInput(f"{type(env).__name__} does not say where it starts (initial_state_distrib); pass start=.")
    initial = torch.from_numpy(np.asarray(distribution, dtype=np.float64))
    return initial / initial.sum()


def _states(transitions: Tensor, start: int, cmdp: LayeredCMDP) -> Tensor:
    """Which states `unroll` has put where: `(L x S)`, -1 in the padding."""
    states = torch.full(cmdp.layout.pair_shape[:2], -1)
    layer = torch.tensor([start])
    for k in range(len(states)):
        states[k, : len(layer)] = layer
        layer = (transitions[layer] > 0).any(1).any(0).nonzero().squeeze(-1)
    return states
