"""Tables of transitions, rewards and costs as layered CMDPs: any range, several starts, masks, terminal states, discounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, brief, first, number, whole_number
from torchcmdp.layout import broadcast_shapes
from torchcmdp.units import Ends, budgets_of
from torchcmdp.unrolling import unroll

Table = Tensor | np.ndarray | Sequence[Any]
ROUNDING = 1e-6  # by which the rows of a table that somebody typed may miss a sum of one


@dataclass(frozen=True)
class Model:
    """Tables over N states, one more in which an episode has ended, and one more before its start is drawn.

    Attributes:
        transitions: `([H x] (N + 2) x A x (N + 2))`.
        rewards, costs: Means, `([H x] (N + 2) x A)` and `(m x [H x] (N + 2) x A)`.
        allowed: Which actions there are, `([H x] (N + 2) x A)` bool.
        initial: The distribution of the first state, `(N,)`.
        reward_range, cost_ranges: The smallest and the largest reward, and of each cost.
    """

    transitions: Tensor
    rewards: Tensor
    costs: Tensor
    allowed: Tensor
    initial: Tensor
    reward_range: Ends
    cost_ranges: list[Ends]

    @property
    def states(self) -> int:
        """N."""
        return len(self.initial)


def from_arrays(
    P: Table,
    R: Table,
    C: Table | None = None,
    *,
    horizon: int,
    budget: object = 0.0,
    sense: str | Sequence[str] = "<=",
    start: int | Table = 0,
    mask: Table | None = None,
    terminal: Table | None = None,
    discount: float = 1.0,
    reward_range: Ends | None = None,
    cost_range: Ends | Sequence[Ends] | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> LayeredCMDP:
    """A CMDP from tables: the states that can be reached within the horizon, layer by layer.

    Its `units` lead back to the rewards, costs and budgets given, and its `origin` to the states: `origin.states` has the number of
    the state at each place of each layer, N once an episode is over and N + 1 before a random start is drawn. With such a start, or
    where it is drawn, a layer with one state comes first, and L is the horizon plus one; otherwise L is the horizon.

    Args:
        P: P(y|x,a), `(N x A x N)`, or `(H x N x A x N)` where it changes with the step. Tables are arrays, tensors or lists.
        R: Rewards of any range, `(N x A)`, or `(N x A x N)` where they depend on the successor; `H` in front where they change.
        C: Costs of any range, as R with an axis of m constraints in front; `(N x A)` for one. None for no constraints.
        horizon: H, the steps of an episode.
        budget: What each cost may sum to over an episode in expectation, of any sign; one for all or one each.
        sense: "<=" for a cost, ">=" for a utility, which must sum to at least its budget; one for all or one each.
        start: The first state, or its distribution, `(N,)`.
        mask: True at the actions that a state has, `(N x A)` or `(H x N x A)`; all by default.
        terminal: True at the states that end an episode when they are reached, `(N,)`, or their numbers.
        discount: Below one, every step ends the episode with probability 1 - discount, which is what discounting means; then
            `origin.truncation` bounds what the steps after the horizon would add.
        reward_range, cost_range: The ends of rewards and costs, where more is possible than the tables show.
        dtype, device: Of the result.
    """
    horizon = whole_number("horizon", horizon, least=1)
    discount = number("discount", discount, "a number in (0, 1]", lambda found: 0 < found <= 1)
    model = _model(P, R, C, horizon, start, mask, terminal, discount)
    told: dict[str, Any] = {"reward_range": reward_range, "cost_ranges": cost_range}
    told = {name: ends for name, ends in told.items() if ends is not None}
    cmdp = layered(replace(model, **told), horizon, budget, sense)
    if discount < 1 and cmdp.origin is not None:
        ends = [model.reward_range, *model.cost_ranges]
        tail = discount**horizon / (1 - discount)
        bounds = torch.tensor([tail * max(map(abs, each)) for each in ends], dtype=torch.float64)
        cmdp = replace(cmdp, origin=replace(cmdp.origin, truncation=bounds))
    return cmdp.to(device, dtype)


def layered(model: Model, horizon: int, budget: object, sense: str | Sequence[str]) -> LayeredCMDP:
    """The reachable states of a model, layer by layer, in normal form, with the units that lead back."""
    budgets_of(budget, len(model.costs))  # refused here, before anything is unrolled
    n, several = model.states, int((model.initial > 0).sum()) > 1

    def by_layer(table: Tensor, constant: int, axis: int = 0) -> Tensor:
        """A table by step with one step more: in the first layer the start is drawn, and the steps begin in the second."""
        return torch.cat([table.narrow(axis, 0, 1), table], axis) if several and table.dim() > constant else table

    transitions, rewards, costs = by_layer(model.transitions, 3), by_layer(model.rewards, 2), by_layer(model.costs, 3, axis=1)
    allowed = by_layer(model.allowed, 2).clone()
    allowed[..., n + 1, 1:] = False  # one action draws the start
    first, layers = (n + 1, horizon + 1) if several else (int(model.initial.argmax()), horizon)
    ends: dict[str, Any] = {"reward_range": model.reward_range, "cost_range": model.cost_ranges}
    cmdp = unroll(transitions, rewards, costs, horizon=layers, start=first, budget=budget, sense=sense, mask=allowed, **ends)
    assert cmdp.units is not None and cmdp.origin is not None
    # where an episode is over, or has not begun, nothing is earned and nothing met: that much is known
    known = (cmdp.origin.states >= n)[..., None]
    units = replace(
        cmdp.units,
        reward_high=torch.where(known, cmdp.rewards, cmdp.units.reward_high),
        cost_low=torch.where(known, cmdp.costs, cmdp.units.cost_low),
    )
    return replace(cmdp, units=units)


def _model(
    P: Table,
    R: Table,
    C: Table | None,
    horizon: int,
    start: int | Table,
    mask: Table | None,
    terminal: Table | None,
    discount: float,
) -> Model:
    transitions = _numbers("P", P)
    if transitions.dim() not in (3, 4) or transitions.shape[-1] != transitions.shape[-3] or not transitions.numel():
        raise InvalidInput(f"P has shape {tuple(transitions.shape)}; expected (N x A x N), or (H x N x A x N) for H steps.")
    if transitions.dim() == 4 and len(transitions) != horizon:
        raise InvalidInput(f"P has {len(transitions)} steps and the horizon is {horizon}; they must be equal.")
    n, actions = transitions.shape[-3], transitions.shape[-2]
    allowed = _allowed(mask, n, actions, horizon)
    checked_rows(transitions, allowed)
    rewards, reward_range = _means("R", R, transitions, allowed, horizon)
    tables = rewards.new_zeros(0) if C is None else _numbers("C", C)
    if C is not None and tables.dim() < 2:
        raise InvalidInput(f"C has shape {tuple(tables.shape)}; expected (N x A) for one constraint, or (m x N x A).")
    tables = tables.unsqueeze(0) if tables.dim() == 2 else tables
    means = [_means("C", each, transitions, allowed, horizon, tuple(tables.shape)) for each in tables]
    ended, initial = _terminal(terminal, n), initial_of(start, n)
    if (initial[ended] > 0).any():
        raise InvalidInput(f"start is {brief(start)}, a terminal state; an episode must begin before it ends.")
    extra = bool(ended.any()) or discount < 1 or int((initial > 0).sum()) > 1
    ranges = [
        (min(0.0, low), max(0.0, high)) if extra else (low, high) for low, high in (reward_range, *(ends for _, ends in means))
    ]
    rewards, *costs = (_padded(mean, ends) for mean, ends in zip([rewards, *(mean for mean, _ in means)], ranges, strict=True))
    return Model(
        extended(transitions, ended, discount, initial),
        rewards,
        torch.stack(costs) if costs else rewards.new_zeros(0, *rewards.shape),
        torch.nn.functional.pad(allowed, (0, 0, 0, 2), value=True),
        initial,
        ranges[0],
        ranges[1:],
    )


def extended(transitions: Tensor, ended: Tensor, discount: float, initial: Tensor) -> Tensor:
    """Transitions `([H x] N x A x N)` with a state in which an episode is over, and one before it begins.

    `([H x] (N + 2) x A x (N + 2))`, with ends at the states `ended`, `(N,)` bool, and `discount` as the probability to go on.
    """
    n = len(initial)
    whole = torch.nn.functional.pad(transitions, (0, 2, 0, 0, 0, 2)).clone()
    whole[..., :n, :, n] = transitions[..., ended].sum(-1)
    whole[..., :n, :, :n] = transitions * ~ended
    if discount < 1:
        whole[..., :n, :, :] *= discount
        whole[..., :n, :, n] += 1 - discount
    whole[..., n, :, n] = 1
    whole[..., n + 1, :, :n] = initial
    total = whole.sum(-1, keepdim=True)
    return whole / torch.where(total > 0, total, 1)


def _padded(table: Tensor, ends: Ends) -> Tensor:
    """Rewards or costs with zeros, or what is nearest to zero, where an episode is over or has not begun."""
    return torch.nn.functional.pad(table, (0, 0, 0, 2), value=min(max(0.0, ends[0]), ends[1]))


def _array(name: str, table: Any) -> Tensor:
    """A table on the host in its own type, or one sentence."""
    try:
        found = torch.as_tensor(table.detach().cpu().to_dense() if isinstance(table, Tensor) else np.array(table))
    except (TypeError, ValueError, RuntimeError):  # what torch says of a tensor without values is a RuntimeError too
        found = torch.zeros((), dtype=torch.complex128)
    if found.is_complex():
        raise InvalidInput(f"{name} is {brief(table)}; it must be an array of real numbers.")
    return found


def _numbers(name: str, table: Any) -> Tensor:
    """A table as float64, whatever it came as."""
    found = _array(name, table)
    if found.dtype == torch.bool:
        raise InvalidInput(f"{name} is {brief(table)}; it must be an array of real numbers.")
    found = found.double()
    if not found.isfinite().all():
        place = (~found.isfinite()).nonzero()[0].tolist()
        raise InvalidInput(f"{name} is {found[tuple(place)].item()} at index {place}; expected a finite number.")
    return found


def checked_rows(transitions: Tensor, allowed: Tensor) -> None:
    """Refuse rows that are no distributions, where an action is allowed."""
    sums = transitions.sum(-1)
    for wrong, words in (
        ((transitions < 0).any(-1), "has a negative probability"),
        ((sums - 1).abs() > ROUNDING, "does not sum to one"),
    ):
        if place := first(wrong & allowed):
            names = ["step", "state", "action"][-len(place) :]
            where = ", ".join(f"{name} {i}" for name, i in zip(names, place, strict=True))
            raise InvalidInput(f"P {words} at {where}: its sum is {sums[tuple(place)].item():.9g}; expected a distribution.")


def _allowed(mask: Table | None, n: int, actions: int, horizon: int) -> Tensor:
    if mask is None:
        return torch.ones(n, actions, dtype=torch.bool)
    found = _array("mask", mask)
    if found.dtype != torch.bool and not ((found == 0) | (found == 1)).all():
        raise InvalidInput(f"mask is {brief(mask)}; it must be True where an action is allowed and False elsewhere.")
    if tuple(found.shape) not in ((n, actions), (horizon, n, actions)):
        raise InvalidInput(f"mask has shape {tuple(found.shape)}; expected (N x A) = {(n, actions)}, or {horizon} steps of it.")
    if place := first(~found.bool().any(-1)):
        raise InvalidInput(f"mask leaves no action in state {place[-1]}; every state needs one.")
    return found.bool()


def _means(
    name: str, table: Any, transitions: Tensor, allowed: Tensor, horizon: int, shape: tuple[int, ...] = ()
) -> tuple[Tensor, Ends]:
    """Mean rewards or costs, `([H x] N x A)`, and the smallest and the largest of them; of those by successor, if so given.

    A refusal names `shape`, where the table is a part of what was given.
    """
    values, pair = _numbers(name, table), tuple(transitions.shape[-3:-1])
    n = pair[0]
    by_successor, by_pair = {(*pair, n), (horizon, *pair, n)}, {pair, (horizon, *pair)}
    if tuple(values.shape) in by_successor & by_pair:
        raise InvalidInput(
            f"{name} has shape {shape or tuple(values.shape)}, which may be (N x A x N) and (H x N x A), since H = N = A = {n}; "
            "give it as (H x N x A x N)."
        )
    if tuple(values.shape) in by_successor:
        there = (transitions > 0) & allowed.unsqueeze(-1)
        total = transitions.sum(-1)  # which may miss one by `ROUNDING`
        usual = allowed if allowed.dim() <= total.dim() else allowed.any(0)
        means = (transitions / torch.where(usual, total, 1.0).unsqueeze(-1) * values).sum(-1)
    elif tuple(values.shape) in by_pair:
        there, means = allowed, values
    else:
        raise InvalidInput(
            f"{name} has shape {shape or tuple(values.shape)}; expected (N x A) = {pair} or (N x A x N) = {(*pair, n)}, with "
            f"{horizon} steps in front where it changes{', and an axis of constraints before that' if name == 'C' else ''}."
        )
    whole = broadcast_shapes(values.shape, there.shape)
    seen = values.expand(whole)[there.expand(whole)]
    means = means if means is values else means.clamp(seen.min(), seen.max())
    return means, (float(seen.min()), float(seen.max()))


def _terminal(terminal: Table | None, n: int) -> Tensor:
    """True at the states that end an episode, `(N,)`."""
    ended = torch.zeros(n, dtype=torch.bool)
    if terminal is None:
        return ended
    found = _array("terminal", terminal)
    if found.dtype == torch.bool and tuple(found.shape) == (n,):
        return found
    if found.numel() == 0:
        return ended
    numbers = not (found.is_floating_point() or found.dtype == torch.bool or found.dim() > 1)
    # a state that is named twice is rather a mask of zeros and ones
    if not numbers or not ((found >= 0) & (found < n)).all() or len(found.unique()) < found.numel():
        raise InvalidInput(
            f"terminal is {brief(terminal)}; it must be True at terminal states and False elsewhere, ({n},), or their numbers "
            f"below {n}, each once."
        )
    ended[found] = True
    return ended


def initial_of(start: Any, n: int) -> Tensor:
    """The distribution of the first state, `(N,)`."""
    scalar = isinstance(start, Tensor | np.ndarray) and start.ndim == 0
    if scalar or (isinstance(start, int | np.integer) and not isinstance(start, bool)):
        number(
            "start",
            start,  # type: ignore[arg-type]
            f"a state between 0 and {n - 1}, or a distribution",
            lambda found: found.is_integer() and 0 <= found < n,
        )
        return torch.nn.functional.one_hot(torch.tensor(int(start)), n).double()
    return distribution_of("start", start, n, f"a state between 0 and {n - 1}, or a")


def distribution_of(name: str, given: Any, n: int, expected: str = "a") -> Tensor:
    """A distribution over the states, `(N,)`, or one sentence."""
    found = _numbers(name, given)
    if tuple(found.shape) != (n,) or (found < 0).any() or abs(float(found.sum()) - 1) > ROUNDING:
        raise InvalidInput(f"{name} is {brief(given)}; it must be {expected} distribution over {n} states.")
    return found / found.sum()
