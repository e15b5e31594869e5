"""A constrained MDP with layers: transitions, mean rewards and mean costs, checked on entry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcmdp.errors import (
    InvalidInput,
    brief,
    check_device,
    check_dtype,
    check_kind,
    check_memory,
    check_tensor,
    number,
    switch,
    whole_number,
)
from torchcmdp.layout import MOST_LAYERS, Layout, check_layout
from torchcmdp.units import NormalForm, Units, normal_form, stack_units

# A start that no action changes is drawn in several layers where it has more successors than this.
MOST_STARTS = 8
ROW_SUM_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
# Of a step's cost in normal form: what rounding may add to the least that a policy can keep to.
BUDGET_TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class Origin:
    """The model that a layered CMDP was unrolled from.

    Attributes:
        states: The number that the state at each place of each layer has there, `(L x S)` int64; -1 in the padding.
        stationary: Whether a state behaves alike in all layers, the last one's successors apart.
        truncation: By how much the discounted return, and every discounted cost, can differ from those of the L steps that are
            played, in the user's units, `(1 + m,)`; None without a discount.
        drawn: How many layers more than one the start is drawn in; nothing is earned and nothing met in them.
    """

    states: Tensor
    stationary: bool
    truncation: Tensor | None = None
    drawn: int = 0

    @property
    def ties(self) -> Tensor | None:
        """The numbers of the states, -1 where the start is drawn in several layers; None where a state changes with its layer."""
        if not self.stationary:
            return None
        unlike = torch.arange(len(self.states)) <= (self.drawn or -1)
        return self.states.masked_fill(unlike[:, None], -1)


@dataclass(frozen=True, eq=False)
class LayeredCMDP:
    """A layered CMDP, or a batch of them over one layout.

    Attributes:
        layout: Layer widths and actions.
        transitions: P(y|x,a), `(... x L x S x A x K)`, rows summing to one, zero in the padding.
        rewards: Mean rewards in [0, 1], `(... x L x S x A)`.
        costs: Mean costs in [-1, 1], `(... x m x L x S x A)`; a policy with occupancy q is safe when <costs_i, q> <= 0 for every i.
        units: How to read rewards and costs in the units that they were given in; None where these are the units.
        origin: What it was unrolled from; None where it was made in layers.
    """

    layout: Layout
    transitions: Tensor
    rewards: Tensor
    costs: Tensor
    units: Units | None = None
    origin: Origin | None = None

    def __post_init__(self) -> None:
        layout = self.layout
        check_layout(layout)
        for name, tensor in (("transitions", self.transitions), ("rewards", self.rewards), ("costs", self.costs)):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                raise InvalidInput(f"{name} must be a floating-point torch tensor, not {_describe(tensor)}.")
            if (tensor.dtype, tensor.device) != (self.transitions.dtype, self.transitions.device):
                raise InvalidInput(
                    f"{name} is {tensor.dtype} on {tensor.device}, but transitions is {self.transitions.dtype} on "
                    f"{self.transitions.device}; all three must agree."
                )
        layout.check_shape("transitions", self.transitions, kind="transition")
        layout.check_shape("rewards", self.rewards, kind="pair")
        layout.check_shape("costs", self.costs, kind="pair")
        if self.costs.dim() < 4:
            raise InvalidInput(
                f"costs has shape {tuple(self.costs.shape)}; it needs a constraint axis before (L x S x A), of size 0 when "
                "there are no constraints."
            )
        batches = (self.transitions.shape[:-4], self.rewards.shape[:-3], self.costs.shape[:-4])
        if len(set(batches)) != 1:
            raise InvalidInput(
                f"transitions, rewards and costs have batch shapes {', '.join(str(tuple(b)) for b in batches)}; they must be equal."
            )
        _check_values(layout, "transitions", self.transitions, 0.0, 1.0)
        _check_values(layout, "rewards", self.rewards, 0.0, 1.0)
        _check_values(layout, "costs", self.costs, -1.0, 1.0)
        _check_rows(layout, self.transitions)
        self._check_extras()

    def _check_extras(self) -> None:
        """Refuse units of another CMDP, and what is neither units nor an origin."""
        if self.origin is not None:
            check_kind("origin", self.origin, Origin, "an Origin, or None")
        if self.units is None:
            return
        check_kind("units", self.units, Units, "Units, or None")
        shapes = {
            "reward_scale": self.batch_shape,
            "cost_scale": (*self.batch_shape, self.constraints),
            "reward_high": self.rewards.shape,
            "cost_low": self.costs.shape,
        }
        for name, shape in shapes.items():
            found = tuple(getattr(self.units, name).shape)
            if found != tuple(shape):
                raise InvalidInput(f"units.{name} has shape {found}; that of this CMDP is {tuple(shape)}.")

    @property
    def constraints(self) -> int:
        """m, the number of constraints."""
        return self.costs.shape[-4]

    @property
    def batch_shape(self) -> torch.Size:
        """The shape before (L x S x A x S): empty for one CMDP."""
        return self.transitions.shape[:-4]

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of its tensors."""
        return self.transitions.dtype

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.transitions.device

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LayeredCMDP:
        """The same CMDP on another device or in another floating-point type."""
        check_device(device)
        check_dtype(self.dtype if dtype is None else dtype)
        device, dtype = self.device if device is None else device, self.dtype if dtype is None else dtype
        P, r, g = (tensor.to(device, dtype) for tensor in (self.transitions, self.rewards, self.costs))
        return LayeredCMDP(self.layout, P, r, g, None if self.units is None else self.units.to(device, dtype), self.origin)

    def __getitem__(self, index: int) -> LayeredCMDP:
        """One CMDP of a batch."""
        if not self.batch_shape:
            raise InvalidInput(f"This CMDP is a single one, not a batch, so it has no entry {index}.")
        units = None if self.units is None else self.units[index]
        return LayeredCMDP(self.layout, self.transitions[index], self.rewards[index], self.costs[index], units, self.origin)

    def __repr__(self) -> str:
        batch = f", batch={tuple(self.batch_shape)}" if self.batch_shape else ""
        return f"LayeredCMDP(widths={self.layout.widths}, actions={self.layout.actions}, constraints={self.constraints}{batch})"


def stack_cmdps(cmdps: Sequence[LayeredCMDP]) -> LayeredCMDP:
    """Put CMDPs of one layout side by side, so that every run of a batch can have its own."""
    check_kind("cmdps", cmdps, Iterable, "a list of CMDPs")
    cmdps = list(cmdps)
    if not cmdps:
        raise InvalidInput("stack_cmdps got an empty list; it needs at least one CMDP.")
    for j, cmdp in enumerate(cmdps):
        check_kind(f"CMDP {j}", cmdp, LayeredCMDP, "a LayeredCMDP")
        if (cmdp.layout, cmdp.constraints) != (cmdps[0].layout, cmdps[0].constraints):
            raise InvalidInput(
                f"CMDP {j} has widths {cmdp.layout.widths}, {cmdp.layout.actions} actions and {cmdp.constraints} constraints, but "
                f"CMDP 0 has {cmdps[0].layout.widths}, {cmdps[0].layout.actions} and {cmdps[0].constraints}; "
                "a batch shares one layout."
            )
    return LayeredCMDP(
        cmdps[0].layout,
        torch.stack([c.transitions for c in cmdps]),
        torch.stack([c.rewards for c in cmdps]),
        torch.stack([c.costs for c in cmdps]),
        stack_units([c.units for c in cmdps]),
        _common_origin([c.origin for c in cmdps]),
    )


def _common_origin(origins: Sequence[Origin | None]) -> Origin | None:
    """That of all members of a batch, if they have the same states at the same places."""
    first = origins[0]
    if first is None or any(each is None or not torch.equal(each.states, first.states) for each in origins):
        return None
    return replace(first, stationary=all(each is not None and each.stationary for each in origins), truncation=None)


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
    transitions, rewards, costs = (torch.as_tensor(x) if isinstance(x, np.ndarray) else x for x in (transitions, rewards, costs))
    horizon = whole_number("horizon", horizon, least=1)
    if horizon >= MOST_LAYERS:
        raise InvalidInput(f"horizon is {brief(horizon)}; an episode has fewer than {MOST_LAYERS:,} steps.")
    states, actions = _check_tables(transitions, rewards, costs, horizon)
    number("start", start, f"a state between 0 and {states - 1}", lambda found: found.is_integer() and 0 <= found < states)
    if sparse is not None:
        switch("sparse", sparse)
    allowed = _allowed(mask, (horizon, states, actions), transitions.device)
    rewards, costs = _filled(rewards[None], allowed)[0], _filled(costs, allowed)
    form = None if budget is None else normal_form(rewards, costs, horizon, budget, sense, reward_range, cost_range)
    if form is not None:
        rewards, costs = form.rewards, form.costs
    stationary = transitions.dim() == 3 and rewards.dim() == 2 and costs.dim() == 3
    P = transitions if transitions.dim() == 4 else transitions.expand(horizon, *transitions.shape)
    r = rewards if rewards.dim() == 3 else rewards.expand(horizon, *rewards.shape)
    g = costs if costs.dim() == 4 else costs.unsqueeze(1).expand(-1, horizon, -1, -1)
    layers = [torch.tensor([int(start)], device=transitions.device)]
    for k in range(horizon - 1):
        layers.append(((P[k][layers[-1]] > 0) & allowed[k][layers[-1]].unsqueeze(-1)).any(1).any(0).nonzero().squeeze(-1))
    return _described(_layered(layers, P, r, g, allowed, sparse), layers, form, stationary)


def _described(cmdp: LayeredCMDP, layers: Sequence[Tensor], form: NormalForm | None, stationary: bool) -> LayeredCMDP:
    """The CMDP with what it came from: its units, and which state is where."""
    layout, drawn = cmdp.layout, cmdp.layout.layers - len(layers)  # how many layers more the start is drawn in
    firsts = [layers[0].expand(width) for width in layout.widths[: drawn + 1]]
    places = [torch.nn.functional.pad(layer, (0, layout.width - len(layer)), value=-1) for layer in (*firsts, *layers[1:])]
    origin = Origin(torch.stack(places).cpu(), stationary, drawn=drawn)
    if form is None:
        return replace(cmdp, origin=origin)
    real = layout.pair_mask(cmdp.device).clone()
    real[1 : drawn + 1] = False  # where nothing is earned and nothing met
    found = replace(cmdp, units=form.units(len(layers), real), origin=origin)
    check_budgets(found)
    return found


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
        if tuple(tensor.shape) not in shapes:
            raise InvalidInput(
                f"{name} has shape {tuple(tensor.shape)} and rewards {tuple(rewards.shape)}; an MDP needs transitions (N x A x N), "
                f"rewards (N x A) and costs (m x N x A), or with an axis of {horizon} steps before N."
            )
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

    Args:
        layers: The states of each.
        transitions, rewards, costs: `(H x N x A x N)`, `(H x N x A)` and `(m x H x N x A)`.
        allowed: Which actions a state has, `(H x N x A)` bool.
        sparse: As in `unroll`.
    """
    (horizon, states, actions), width = rewards.shape, max(map(len, layers))
    own = [allowed[k][layer] for k, layer in enumerate(layers)]
    following = [int(((transitions[k][layer] > 0).sum(-1) * own[k]).max()) for k, layer in enumerate(layers[:-1])] + [1]
    chosen = (*(table[..., 0, layers[0], :] for table in (rewards, costs)), transitions[0, layers[0]].mT)
    idle = horizon > 1 and bool(own[0][0, 0]) and _is_idle(*(table[..., own[0][0]] for table in chosen))
    fan = max(MOST_STARTS, *following[1:]) if idle else states
    slots = max(min(following[0], fan), *following[1:], 1)
    sparse = 2 * slots <= width if sparse is None else sparse
    what = f"{horizon} layers of {width} states and {actions} actions"
    check_memory(what, horizon * actions * width * (slots if sparse else width))
    made = []
    for k, layer in enumerate(layers):
        after = transitions[k][layer]
        chances = after[..., layers[k + 1]] if k + 1 < horizon else torch.ones_like(after[..., :1])
        chances = chances * own[k].unsqueeze(-1)
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
    *pair, place = (chances > 0).nonzero(as_tuple=True)
    slot = ((chances > 0).cumsum(-1) - 1)[(*pair, place)]
    lists = torch.full((*chances.shape[:-1], most), -1, device=chances.device)
    lists[(*pair, slot)] = place
    return lists, torch.where(lists >= 0, chances.gather(-1, lists.clamp_min(0)), 0)


def _is_idle(*tables: Tensor) -> bool:
    """Whether no action, the last axis of each table of one state, makes a difference."""
    return all(bool((table == table[..., :1]).all()) for table in tables)


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
        like = (len(shares), actions)
        made.insert(
            0,
            _Rows(
                torch.where(real[:, None], lists, -1),
                torch.where(real[:, None], shares / total, 0.0),
                rows.rewards.new_zeros(like),
                rows.costs.new_zeros(len(rows.costs), *like),
                real.expand(like),
            ),
        )
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


def least_totals(values: Tensor, transitions: Tensor, layout: Layout) -> Tensor:
    """The least that values of pairs can sum to over an episode in expectation, each table alone, by backward induction.

    Args:
        values: `(... x m x L x S x A)`.
        transitions: P(y|x,a), `(... x L x S x A x K)`.
        layout: Of both.

    Returns:
        `(... x m)` float64.
    """
    values, transitions = values.double(), transitions.double().unsqueeze(-5)
    pairs, states = layout.pair_mask(values.device), layout.state_mask(values.device)
    least = values.new_zeros(*torch.broadcast_shapes(values.shape[:-3], transitions.shape[:-4]), layout.width)
    for k in reversed(range(layout.layers)):
        ahead = (transitions[..., k, :, :, :] * layout.ahead(least, k)).sum(-1)
        least = torch.where(pairs[k], values[..., k, :, :] + ahead, torch.inf).amin(-1)
        least = torch.where(states[k], least, 0.0)
    return least[..., 0]


def check_budgets(cmdp: LayeredCMDP) -> None:
    """Refuse a budget that no policy keeps, each constraint looked at alone; of a CMDP with units and no batch."""
    units = cmdp.units
    if units is None or cmdp.device.type == "meta":
        return
    for i, least in enumerate(least_totals(cmdp.costs, cmdp.transitions, cmdp.layout).tolist()):
        if least > BUDGET_TOLERANCE * cmdp.layout.layers:
            sums = cmdp.costs.new_zeros(cmdp.constraints, dtype=torch.float64)
            sums[i] = least
            reached, budget = float(units.episode_costs(sums)[i]), float(units.budget[i])
            words = ("costs at least", "at most") if units.sense[i] == "<=" else ("gets at most", "at least")
            raise InvalidInput(
                f"budget is {budget:g} for constraint {i}, which no policy keeps: every one {words[0]} {reached:.6g}, and "
                f"{words[1]} {budget:g} is asked for."
            )


def _describe(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _check_values(layout: Layout, name: str, tensor: Tensor, low: float, high: float) -> None:
    """Refuse NaN, values out of range, and anything but zero in the padding, naming the first offending entry."""
    if tensor.device.type == "meta":
        return
    mask = layout.transition_mask(tensor.device) if name == "transitions" else layout.pair_mask(tensor.device)
    slack = ROW_SUM_TOLERANCE.get(tensor.dtype, 1e-3) if name == "transitions" else 0.0
    for wrong, expected in (
        (tensor.isnan(), "a number"),
        ((tensor < low) | (tensor > high + slack), f"a value in [{low:g}, {high:g}]"),
        ((tensor != 0) & ~mask, "exactly zero, since that state does not exist in that layer"),
    ):
        if wrong.any():
            index = wrong.nonzero()[0].tolist()
            raise InvalidInput(
                f"{name} is {tensor[tuple(index)].item():.12g} at {_place(name, index, tensor.dim())}; expected {expected}."
            )


def _check_rows(layout: Layout, transitions: Tensor) -> None:
    if transitions.device.type == "meta":
        return
    sums = transitions.sum(-1)
    wrong = ((sums - 1).abs() > ROW_SUM_TOLERANCE.get(transitions.dtype, 1e-3)) & layout.pair_mask(transitions.device)
    if wrong.any():
        index = wrong.nonzero()[0].tolist()
        place = _place("rewards", index, sums.dim())
        raise InvalidInput(f"transitions sum to {sums[tuple(index)].item():.12g} at {place}; every row must sum to one.")


def _place(name: str, index: list[int], dims: int) -> str:
    """Say an index in words: the batch entry, the constraint, then layer, state, action and successor."""
    axes = {"transitions": ["layer", "state", "action", "next state"], "rewards": ["layer", "state", "action"]}
    words = axes.get(name, ["constraint", "layer", "state", "action"])
    words = ["batch entry"] * (dims - len(words)) + words
    return ", ".join(f"{word} {i}" for word, i in zip(words, index, strict=True))
