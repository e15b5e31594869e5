"""Tabular Gymnasium environments, such as FrozenLake, CliffWalking and Taxi, as layered CMDPs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, brief, check_kind, number, require, whole_number
from torchcmdp.problems.arrays import Model, Table, checked_rows, distribution_of, initial_of, layered
from torchcmdp.processes import Bernoulli
from torchcmdp.units import Units


class Move(NamedTuple):
    """One possible outcome of an action, from which costs are computed; `info` is what tables of five columns say besides."""

    state: int
    action: int
    next_state: int
    reward: float
    terminated: bool
    info: Mapping[str, Any] = {}


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


def told_cost(move: Move) -> float:
    """What the environment's own table calls the cost of a move: `info["cost"]`, or its fifth column where that is a number."""
    return float(move.info.get("cost", 0.0))


@dataclass(frozen=True, eq=False)
class ImportedCMDP:
    """A tabular environment as a layered CMDP, and how to read its numbers.

    Attributes:
        cmdp: The layered CMDP, whose `units` are the environment's.
        ended, waiting: What `states` has once an episode is over, and before the start is drawn: the environment's number of
            states, and one more.
    """

    cmdp: LayeredCMDP
    ended: int
    waiting: int

    @property
    def units(self) -> Units:
        """The environment's units."""
        assert self.cmdp.units is not None
        return self.cmdp.units

    @property
    def states(self) -> Tensor:
        """The environment's state at each place of each layer, `(L x S)` int64; -1 in the padding."""
        assert self.cmdp.origin is not None
        return self.cmdp.origin.states

    @property
    def low(self) -> float:
        """The environment's smallest reward, zero among them."""
        steps = 1 + int((self.states[1:, 0] != self.waiting).sum())  # the start may be drawn in several layers, of which one counts
        return float(self.units.reward_offset) / steps

    @property
    def high(self) -> float:
        """The environment's largest reward, zero among them."""
        return self.low + float(self.units.reward_scale)

    @property
    def budgets(self) -> Tensor:
        """How much cost an episode may have in expectation, `(m,)`."""
        return self.units.budget

    @property
    def scales(self) -> Tensor:
        """What the costs were divided by, `(m,)`; one wherever they filled most of [-1, 1] already."""
        return self.units.cost_scale

    def environment_return(self, value: Tensor | float) -> Any:
        """The environment's expected return of a policy whose expected reward in our CMDP is `value`, `(...)`."""
        return self.units.episode_return(value)

    def environment_costs(self, sums: Tensor) -> Tensor:
        """The environment's expected costs of a policy whose expected costs in our CMDP are `sums`, `(... x m)`."""
        return self.units.episode_costs(sums)

    def cost_process(self) -> Bernoulli:
        """Costs that are 1 or as small as a step's can be, which makes far less noise than 1 or -1 would."""
        return cost_process(self.cmdp)


def cost_process(cmdp: LayeredCMDP) -> Bernoulli:
    """Costs that are 1 or as small as a step's can be, which makes far less noise than 1 or -1 would."""
    return Bernoulli(cmdp.costs, low=min(0.0, float(cmdp.costs.min()) if cmdp.constraints else 0.0))


def from_gymnasium(
    env: Any,
    horizon: int,
    cost: Cost | Sequence[Cost] = (),
    budget: float | Sequence[float] = 0.0,
    *,
    sense: str | Sequence[str] = "<=",
    start: int | Table | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> ImportedCMDP:
    """Unroll a tabular environment over `horizon` steps, keeping the states that can be reached by then.

    What ends an episode leads to one absorbing state without rewards and costs. Where the start is random, a layer comes first in
    which every action draws it, and L is the horizon plus one; otherwise L is the horizon.

    Args:
        env: A Gymnasium environment whose `unwrapped.P[state][action]` lists (probability, next state, reward, terminated), with
            or without a fifth column of info or cost, or its id.
        horizon: Steps of an episode.
        cost: The cost of a move, such as `fell_in_a_hole`; one function a constraint.
        budget: How much of it an episode may have in expectation: with a cost of one for an event, its largest probability. One
            number for all constraints, or one each.
        sense: "<=" for a cost, ">=" for a utility, which must sum to at least its budget; one for all or one each.
        start: A state to start in, or a distribution, `(N,)`, in place of the environment's own choice.
        dtype, device: Of the result.
    """
    horizon = whole_number("horizon", horizon, least=1)
    env = _made(env) if isinstance(env, str) else env
    inner = getattr(env, "unwrapped", env)
    table = _table(inner)
    model = _model(
        table, _initial(inner, len(table), start), [cost] if callable(cost) or not isinstance(cost, Sequence) else list(cost)
    )
    return ImportedCMDP(layered(model, horizon, budget, sense).to(device, dtype), model.states, model.states + 1)


def _made(name: str) -> Any:
    """The environment of an id, or one sentence."""
    gymnasium = require("gymnasium", "gym")
    try:
        return gymnasium.make(name)
    except (gymnasium.error.Error, ModuleNotFoundError, ValueError) as error:
        said = " ".join(str(error).split())
        raise InvalidInput(f"env is {name!r}, of which Gymnasium makes no environment: {said}") from error


def _table(env: Any) -> dict[int, dict[int, Any]]:
    table = getattr(env, "P", None)
    if not isinstance(table, Mapping | list) or not table:
        raise InvalidInput(f"{type(env).__name__} has no table P of transitions; only tabular environments can be imported.")
    rows = table if isinstance(table, Mapping) else dict(enumerate(table))
    if sorted(map(str, rows)) != sorted(map(str, range(len(rows)))):
        raise InvalidInput(f"P has the states {brief(list(rows))}; they must be the numbers from 0 to {len(rows) - 1}.")
    found = {int(s): dict(row) if isinstance(row, Mapping) else dict(enumerate(row)) for s, row in rows.items()}
    for state, row in found.items():
        if not row or not all(isinstance(a, int | np.integer) and a >= 0 and len(outcomes) for a, outcomes in row.items()):
            raise InvalidInput(f"P[{state}] is {brief(row)}; it must list what may follow every action, counted from 0.")
    return found


def _model(table: Mapping[int, Mapping[int, Any]], initial: Tensor, costs: Sequence[Cost]) -> Model:
    n, actions = len(table), 1 + max(action for row in table.values() for action in row)
    transitions = torch.zeros(n + 2, actions, n + 2, dtype=torch.float64)
    mean_rewards = torch.zeros(n + 2, actions, dtype=torch.float64)
    mean_costs = torch.zeros(len(costs), n + 2, actions, dtype=torch.float64)
    allowed = torch.ones(n + 2, actions, dtype=torch.bool)
    allowed[:n] = False
    for cost in costs:
        check_kind("cost", cost, Callable, "a function of a move, such as fell_in_a_hole, or several of them")
    rewards, each, told = [0.0], [[0.0] for _ in costs], False
    for state, choices in table.items():
        for action, outcomes in choices.items():
            allowed[state, action] = True
            chances, moves = zip(*(_move(state, action, outcome, n) for outcome in outcomes), strict=True)
            for probability, move in zip(chances, moves, strict=True):
                transitions[state, action, n if move.terminated else move.next_state] += probability
                rewards.append(move.reward)
            told |= any(len(outcome) > 4 for outcome in outcomes)
            mean_rewards[state, action] = _mean(chances, [move.reward for move in moves])
            for i, cost in enumerate(costs):
                mean = _mean(chances, [number(f"the cost of {move}", cost(move)) for move in moves])
                mean_costs[i, state, action] = mean
                each[i].append(mean)
    if told_cost in costs and not told:
        raise InvalidInput("cost is told_cost, and P has no fifth column that tells one; add it, or pass a function of the move.")
    checked_rows(transitions[:n], allowed[:n])
    transitions[n, :, n] = 1
    transitions[n + 1, :, :n] = initial
    transitions = transitions / torch.where(allowed, transitions.sum(-1), 1.0).unsqueeze(-1)
    ranges = [(min(seen), max(seen)) for seen in (rewards, *each)]
    return Model(transitions, mean_rewards, mean_costs, allowed, initial, ranges[0], ranges[1:])


def _mean(chances: Sequence[float], values: Sequence[float]) -> float:
    """The mean of what may follow an action, rounded to no value that cannot follow: exact where all are the same."""
    possible = [value for chance, value in zip(chances, values, strict=True) if chance > 0] or list(values)
    mean = sum(chance * value for chance, value in zip(chances, values, strict=True))
    return min(max(mean, min(possible)), max(possible))


def _move(state: int, action: int, outcome: Sequence[Any], states: int) -> tuple[float, Move]:
    """The probability of an outcome of a table of four or five columns, and the outcome."""
    try:
        chance, next_state, reward, terminated, *rest = outcome
        info = rest[0] if rest and rest[0] is not None else {}
        info = info if isinstance(info, Mapping) else {"cost": float(info)}
        move = Move(state, int(action), int(next_state), float(reward), bool(terminated), info)
        if len(rest) < 2 and 0 <= move.next_state < states and np.isfinite([float(chance), move.reward]).all():
            return float(chance), move
    except (TypeError, ValueError):  # too few values, or no numbers
        pass
    raise InvalidInput(
        f"P lists {brief(outcome)} at state {state}, action {action}; expected (probability, next state below {states}, reward, "
        "terminated), with or without info."
    )


def _initial(env: Any, states: int, start: int | Table | None) -> Tensor:
    """The distribution of the first state, `(N,)`."""
    if start is not None:
        return initial_of(start, states)
    names = ("initial_state_distrib", "isd")  # the second is what it was called in Gym
    distribution = next((getattr(env, name) for name in names if getattr(env, name, None) is not None), None)
    if distribution is None:
        raise InvalidInput(f"{type(env).__name__} does not say where it starts ({' or '.join(names)}); pass start=.")
    return distribution_of(names[0], distribution, states)
