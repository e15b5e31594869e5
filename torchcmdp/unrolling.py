"""MDPs unrolled into layers: the states that can be reached step by step, in normal form where there is a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP, Origin
from torchcmdp.errors import InvalidInput, brief, check_kind, check_memory, check_tensor, first, number, tensors_of, whole_number
from torchcmdp.layout import MOST_LAYERS, Layout
from torchcmdp.planning import least_totals, refuse_unkept, slater_gap
from torchcmdp.units import MakeUnits, normal_form

# A start that no action changes is drawn in several layers where it has more successors than this.
MOST_STARTS = 8


def unroll(
    transitions: Tensor | np.ndarray,
    rewards: Tensor | np.ndarray,
    costs: Tensor | np.ndarray,
    *,
    horizon: int,
    start: int = 0,
    budget: object = None,
    sense: str | Sequence[str] = "<=",
    reward_range: tuple[float, float] | None = None,
    cost_range: tuple[float, float] | Sequence[tuple[float, float]] | None = None,
    mask: Tensor | np.ndarray | None = None,
    sparse: bool | None = None,
) -> LayeredCMDP:
    """Turn an MDP into a layered one by playing it for `horizon` steps from one state.

    Layer 0 holds `start` alone, layers 1 to H-1 hold the states reachable by then, in increasing order of their index, and every
    pair of the last decision layer leads to the terminal state. `problems.from_arrays` has starts at random, masks and discounts.

    The layout lists the successors of every pair where that at least halves the tensors: where no pair has more than half of the
    widest layer. Where in `start` no action makes a difference and many states may follow, more than anywhere else and more than 8,
    these are drawn in a few layers in place of one, of one action each: the first has the rewards and costs of `start`, the
    others none, and L is larger than H by as many.

    Args:
        transitions: P(y|x,a), `(N x A x N)`, or `(H x N x A x N)` where it changes with the step. This and the following: tensors,
            or arrays.
        rewards: `(N x A)` or `(H x N x A)`, in [0, 1], or in any range if there is a budget.
        costs: `(m x N x A)` or `(m x H x N x A)`, in [-1, 1], or in any range if there is a budget.
        horizon: H, the number of steps of an episode.
        start: The state every episode starts in.
        budget: What an episode's costs may sum to in expectation, one for all or one each; without it costs are in normal form.
        sense: ">=" for a utility, which must sum to at least its budget; one for all or one each.
        reward_range, cost_range: The ends of the mean rewards and costs that a step can have; by default those of the tables.
        mask: True at the actions that a state has, `(N x A)` or `(H x N x A)`; all by default.
        sparse: Whether to list successors, in place of the rule above.
    """
    P, r, g = tensors_of(transitions, rewards, costs)
    horizon = whole_number("horizon", horizon, least=1)
    if horizon >= MOST_LAYERS:
        raise InvalidInput(f"horizon is {brief(horizon)}; an episode has fewer than {MOST_LAYERS:,} steps.")
    states, actions = _check_tables(P, r, g, horizon)
    number("start", start, f"a state between 0 and {states - 1}", lambda found: found.is_integer() and 0 <= found < states)
    check_kind("sparse", sparse, bool | None, "True or False")
    allowed = _allowed(mask, (horizon, states, actions), P.device)
    r, g = _filled(r[None], allowed)[0], _filled(g, allowed)
    told = {"sense": not isinstance(sense, str) or sense != "<=", "reward_range": reward_range is not None}
    for name, given in {**told, "cost_range": cost_range is not None}.items():
        if budget is None and given:
            raise InvalidInput(
                f"{name} was given without a budget, and without one all is in normal form; leave it out, or add one."
            )
    units = None
    if budget is not None:
        r, g, units = normal_form(r, g, horizon, budget, sense, reward_range, cost_range)
    stationary = P.dim() == 3 and r.dim() == 2 and g.dim() == 3
    P = P if P.dim() == 4 else P.expand(horizon, *P.shape)
    r = r if r.dim() == 3 else r.expand(horizon, *r.shape)
    g = g if g.dim() == 4 else g.unsqueeze(1).expand(-1, horizon, -1, -1)
    layers = [torch.tensor([int(start)], device=P.device)]
    for k in range(horizon - 1):
        layers.append(((P[k][layers[-1]] > 0) & allowed[k][layers[-1]].unsqueeze(-1)).any(1).any(0).nonzero().squeeze(-1))
    return _described(_layered(layers, P, r, g, allowed, sparse), layers, units, stationary)


def _described(cmdp: LayeredCMDP, layers: Sequence[Tensor], make_units: MakeUnits | None, stationary: bool) -> LayeredCMDP:
    """The CMDP with what it came from: its units, and which state is where."""
    layout, drawn = cmdp.layout, cmdp.layout.layers - len(layers)  # how many layers more the start is drawn in
    firsts = [layers[0].expand(width) for width in layout.widths[: drawn + 1]]
    places = [torch.nn.functional.pad(layer, (0, layout.width - len(layer)), value=-1) for layer in (*firsts, *layers[1:])]
    origin = Origin(torch.stack(places).cpu(), stationary, drawn=drawn)
    if make_units is None:
        return replace(cmdp, origin=origin)
    real = layout.pair_mask(cmdp.device).clone()
    real[1 : drawn + 1] = False  # where nothing is earned and nothing met
    units = make_units(real)
    if cmdp.device.type != "meta":
        limits = units.sign * units.budget
        least = limits + units.cost_scale * least_totals(cmdp.costs, cmdp.transitions, layout)
        refuse_unkept(least, limits, units.cost_scale, units.sign, layout.layers, lambda: slater_gap(cmdp))
    return replace(cmdp, units=units, origin=origin)


def _allowed(mask: Tensor | np.ndarray | None, shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Which actions each state has at each step, `(H x N x A)`."""
    if mask is None:
        return torch.ones((), dtype=torch.bool, device=device).expand(shape)
    try:
        found = torch.as_tensor(mask, device=device)
    except (TypeError, ValueError, RuntimeError):  # NotImplementedError, of a tensor without values, is a RuntimeError
        found = torch.zeros(())
    if found.dtype != torch.bool or tuple(found.shape) not in (shape, shape[1:]) or not found.any(-1).all():
        raise InvalidInput(f"mask is {brief(mask)}; it must be (N x A) = {shape[1:]} bool, with an action in every state.")
    return found.expand(shape)


def _check_tables(transitions: Tensor, rewards: Tensor, costs: Tensor, horizon: int) -> tuple[int, int]:
    """The numbers of states and actions; tables of other types or shapes get a sentence."""
    for name, tensor in (("transitions", transitions), ("rewards", rewards), ("costs", costs)):
        check_tensor(name, tensor)
        if not tensor.is_floating_point() or tensor.device != transitions.device:
            raise InvalidInput(
                f"{name} is {brief(tensor)} on {tensor.device}; expected floating-point numbers on one device for all."
            )
    states, actions = rewards.shape[-2:] if rewards.dim() in (2, 3) else (-1, -1)
    pair, m = (states, actions), tuple(costs.shape[:1])
    expected = {
        "transitions": (transitions, [(*pair, states), (horizon, *pair, states)]),
        "rewards": (rewards, [pair, (horizon, *pair)]),
        "costs": (costs, [(*m, *pair), (*m, horizon, *pair)]),
    }
    for name, (tensor, shapes) in expected.items():
        if tuple(tensor.shape) not in shapes or not transitions.numel():
            raise InvalidInput(
                f"{name} has shape {tuple(tensor.shape)} and rewards {tuple(rewards.shape)}; an MDP needs transitions (N x A x N), "
                f"rewards (N x A) and costs (m x N x A), or with an axis of {horizon} steps before N."
            )
    if place := first(transitions < 0):
        raise InvalidInput(f"transitions is {transitions[tuple(place)].item():g} at index {place}; expected a probability.")
    return states, actions


def _filled(tables: Tensor, allowed: Tensor) -> Tensor:
    """Tables, `(m x [H x] N x A)`, with something harmless at actions that there are not: the least of the others."""
    there = allowed if tables.dim() == 4 else allowed.any(0)
    if there.all() or not len(tables):
        return tables
    least = torch.where(there, tables, torch.inf).flatten(1).amin(-1)
    return torch.where(there, tables, least.view(-1, *[1] * (tables.dim() - 1)))


def _layered(
    layers: Sequence[Tensor], transitions: Tensor, rewards: Tensor, costs: Tensor, allowed: Tensor, sparse: bool | None = None
) -> LayeredCMDP:
    """Tables with an axis of steps before N, cut down to the states of each layer, with successor lists where that pays.

    `(H x N x A x N)`, `(H x N x A)` and `(m x H x N x A)`; `allowed` says which actions a state has, `(H x N x A)` bool.
    """
    (horizon, states, actions), width = rewards.shape, max(map(len, layers))
    own = [allowed[k][layer] for k, layer in enumerate(layers)]
    following = [int(((transitions[k][layer] > 0).sum(-1) * own[k]).max()) for k, layer in enumerate(layers[:-1])] + [1]
    chosen = (*(table[..., 0, layers[0], :] for table in (rewards, costs)), transitions[0, layers[0]].mT)
    same = (bool((table[..., own[0][0]] == table[..., :1]).all()) for table in chosen)  # whatever the action is
    idle = horizon > 1 and bool(own[0][0, 0]) and all(same)
    fan = max(MOST_STARTS, *following[1:]) if idle else states
    slots = max(min(following[0], fan), *following[1:], 1)
    sparse = 2 * slots <= width if sparse is None else sparse
    what = f"{horizon} layers of {width} states and {actions} actions"
    check_memory(what, horizon * actions * width * (slots if sparse else width))
    made = []
    for k, layer in enumerate(layers):
        chances = transitions[k][layer]
        chances = chances[..., layers[k + 1]] if k + 1 < horizon else torch.ones_like(chances[..., :1])
        chances *= own[k].unsqueeze(-1)
        lists = torch.arange(chances.shape[-1], device=layer.device).expand_as(chances)
        if sparse:
            lists, chances = _positive(chances, following[k])
        made.append(_Rows(lists, chances, rewards[k][layer] * own[k], costs[:, k][:, layer] * own[k], own[k]))
    return _stacked([*_drawn(made[0], fan), *made[1:]] if sparse and following[0] > fan else made, sparse)


class _Rows(NamedTuple):
    """A layer of n states: the k successors of its pairs, their chances `(n x A x k)`, rewards, costs, and which pairs exist."""

    lists: Tensor
    chances: Tensor
    rewards: Tensor
    costs: Tensor
    real: Tensor


def _positive(chances: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The positive entries of each row in their order, at most so many: where they are, -1 for none, and what they are."""
    positive = chances > 0
    *pair, place = positive.nonzero(as_tuple=True)
    counts = positive.sum(-1).flatten()
    # the places come row by row; a running number along the rows would take as much memory as all of them
    slot = torch.arange(len(place), device=chances.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    lists = torch.full((*chances.shape[:-1], most), -1, device=chances.device)
    found = chances.new_zeros(lists.shape)
    lists[(*pair, slot)], found[(*pair, slot)] = place, chances[(*pair, place)]
    return lists, found


def _drawn(rows: _Rows, fan: int) -> list[_Rows]:
    """Layers of one action in which the successors of an idle first state are drawn, of at most `fan` successors a state each."""
    chances = rows.chances[0, 0]  # of all states of the next layer, in their order
    depth = next(d for d in range(2, 64) if fan**d >= len(chances))
    fan = next(f for f in range(2, fan + 1) if f**depth >= len(chances))
    made: list[_Rows] = []
    for _ in range(depth):  # a tree from its leaves up
        shares = torch.nn.functional.pad(chances, (0, -len(chances) % fan)).view(-1, 1, fan)
        leaves = torch.arange(shares.numel(), device=shares.device).view_as(shares)
        total, actions = shares.sum(-1, keepdim=True), rows.rewards.shape[1]
        lists, real = torch.where(leaves < len(chances), leaves, -1), torch.arange(actions, device=shares.device) == 0
        lists, drawn = torch.where(real[:, None], lists, -1), torch.where(real[:, None], shares / total, 0.0)
        free = rows.rewards.new_zeros(1 + len(rows.costs), len(shares), actions)
        made.insert(0, _Rows(lists, drawn, free[0], free[1:], real.expand_as(free[0])))
        chances = total.flatten()
    return [made[0]._replace(rewards=rows.rewards * made[0].real, costs=rows.costs * made[0].real), *made[1:]]


def _stacked(made: Sequence[_Rows], sparse: bool) -> LayeredCMDP:
    """The CMDP of these layers, with or without successor lists."""
    first, widths = made[0], [len(rows.rewards) for rows in made] + [1]
    pairs = (len(made), max(widths), first.rewards.shape[1])
    P = first.chances.new_zeros(*pairs, max(rows.chances.shape[-1] for rows in made) if sparse else max(widths))
    lists = torch.full(P.shape, -1, device=P.device)
    r, g = first.rewards.new_zeros(pairs), first.costs.new_zeros(len(first.costs), *pairs)
    mask = torch.zeros(pairs, dtype=torch.bool, device=P.device)
    for k, rows in enumerate(made):
        n, most = len(rows.rewards), rows.chances.shape[-1]
        P[k, :n, :, :most], lists[k, :n, :, :most] = rows.chances, rows.lists
        r[k, :n], g[:, k, :n], mask[k, :n] = rows.rewards, rows.costs, rows.real
    return LayeredCMDP(Layout(widths, pairs[-1], lists if sparse else None, mask), P, r, g)
