"""The shape of a layered, loop-free MDP and the padded tensors that every other room uses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, brief, check_memory, check_tensor, first

# Every layer has random numbers of its own, and a stream keeps room for so many.
MOST_LAYERS = 2**16


class Table:
    """An array that never changes, compared and hashed by its contents: a digest of its shape, type and numbers."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)
        self.array.flags.writeable = False
        self.digest = hashlib.sha256(f"{array.shape} {array.dtype}".encode() + self.array.tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Table) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<{' x '.join(map(str, self.array.shape))}: {self.digest[:8]}>"

    def config(self) -> dict[str, Any]:
        """What tells it from another."""
        return {"shape": list(self.array.shape), "digest": self.digest[:16]}


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """Layer widths, number of actions, and what is known of where a pair can lead and which actions a state has.

    The layers are X_0 = {x_0}, X_1, ..., X_L = {x_L}: `widths` has L + 1 entries and there are L decision layers. Tensors are
    padded to the widest layer S, and padding is exactly zero everywhere: rewards and policies are `(... x L x S x A)`,
    transitions and occupancies `(... x L x S x A x K)`, costs `(... x m x L x S x A)`. Without successor lists every state of the
    next layer may follow a pair and K = S; with them K is the length of the longest list, and slot j of a pair belongs to the
    state that `successors` lists there. A pair whose action its state does not have is padding.

    Attributes:
        widths, actions: As above.
        lists: The successor lists, `(L x S x A x K)` int32, None where every state of the next layer is one.
        choices: Which actions a state has, `(L x S x A)` bool, None where every state has all.
        pair_shape, transition_shape: (L, S, A) and (L, S, A, K).

    Args:
        widths, actions: As above.
        successors: States of the next layer that may follow each pair, in increasing order, `(L x S x A x K)` int, -1 where
            there is none; a tensor or an array. Every state must follow some pair.
        action_mask: True at the actions that a state has, `(L x S x A)`; every state needs one at least.
    """

    widths: tuple[int, ...]
    actions: int
    lists: Table | None
    choices: Table | None
    pair_shape: tuple[int, int, int] = field(compare=False)
    transition_shape: tuple[int, int, int, int] = field(compare=False)

    def __init__(
        self,
        widths: Sequence[int],
        actions: int,
        successors: Tensor | np.ndarray | None = None,
        action_mask: Tensor | np.ndarray | None = None,
    ) -> None:
        widths, actions = _checked_sizes(widths, actions)
        object.__setattr__(self, "widths", widths)
        object.__setattr__(self, "actions", actions)
        object.__setattr__(self, "pair_shape", (self.layers, self.width, actions))
        choices = None if action_mask is None else _checked_choices(widths, actions, action_mask)
        object.__setattr__(self, "choices", choices)
        lists = None if successors is None else _checked_lists(self, successors)
        object.__setattr__(self, "lists", lists)
        object.__setattr__(self, "transition_shape", (*self.pair_shape, self.slots))
        what = f"the transitions of widths {brief(widths)} and {brief(actions)} actions"
        check_memory(what, len(widths) * actions * max(widths) * self.slots)

    def __repr__(self) -> str:
        known = {"successors": self.lists, "action_mask": self.choices}
        own = "".join(f", {name}={table}" for name, table in known.items() if table is not None)
        return f"Layout(widths={self.widths}, actions={self.actions}{own})"

    @property
    def layers(self) -> int:
        """L, the number of layers in which an action is taken."""
        return len(self.widths) - 1

    @property
    def width(self) -> int:
        """S, the width every layer is padded to."""
        return max(self.widths)

    @property
    def slots(self) -> int:
        """K, how many successors a pair has room for: S without successor lists."""
        return self.width if self.lists is None else int(self.lists.array.shape[-1])

    @property
    def total_states(self) -> int:
        """|X|, all states of all layers, the terminal one included (the paper's |X|)."""
        return sum(self.widths)

    @property
    def full(self) -> Layout:
        """The same states and actions without successor lists."""
        return self if self.lists is None else Layout(self.widths, self.actions, None, self.action_mask())

    def state_mask(self, device: torch.device | str | None = None) -> Tensor:
        """True at real states: `(L x S)`."""
        return _masks(self, str(device or "cpu"))[0]

    def pair_mask(self, device: torch.device | str | None = None) -> Tensor:
        """True at real state-action pairs: `(L x S x A)`."""
        return _masks(self, str(device or "cpu"))[1]

    def transition_mask(self, device: torch.device | str | None = None) -> Tensor:
        """True at real transitions: `(L x S x A x K)`."""
        return _masks(self, str(device or "cpu"))[2]

    def next_widths(self, device: torch.device | str | None = None) -> Tensor:
        """How many successors a pair may have, as float64 ready to broadcast over pairs, and at least one.

        `(L x 1 x 1)`, the widths of the next layers; with successor lists `(L x S x A)`, their lengths.
        """
        return _masks(self, str(device or "cpu"))[3]

    def action_counts(self, device: torch.device | str | None = None) -> Tensor:
        """How many actions a state has, as float64 ready to broadcast over pairs, and at least one: `(L x S x 1)`, or `()`."""
        return _masks(self, str(device or "cpu"))[4]

    def action_mask(self) -> np.ndarray | None:
        """The actions that each state has, as the layout was given them, `(L x S x A)`; None where every state has all."""
        return None if self.choices is None else self.choices.array

    def successors(self, device: torch.device | str | None = None) -> Tensor:
        """The state of the next layer that each slot belongs to, `(L x S x A x K)` int64, -1 in the padding."""
        return torch.where(self.transition_mask(device), self._places(device), -1)

    def uniform_transitions(self, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
        """Every possible successor alike: `(L x S x A x K)`."""
        return self.transition_mask(device) / self.next_widths(device).to(dtype).unsqueeze(-1)

    def ahead(self, values: Tensor, layer: int | None = None) -> Tensor:
        """What holds for the states of the next layer, at every slot of every pair; anything finite in the padding.

        `(... x L x S)`, in which row k is about the states of layer k + 1, becomes `(... x L x S x A x K)`; with `layer` that row
        alone, `(... x S)`, becomes `(... x S x A x K)`. Without successor lists the axes of pairs have size one.
        """
        if self.lists is None:
            return values[..., None, None, :]
        places = self._places(values.device) if layer is None else self._places(values.device)[layer]
        flat = places.flatten(-3)
        return torch.unflatten(values.gather(-1, flat.expand(*values.shape[:-1], flat.shape[-1])), -1, places.shape[-3:])

    def arrivals(self, flow: Tensor, layer: int | None = None) -> Tensor:
        """What arrives in every state of the next layer: the transpose of `ahead`.

        A flow `(... x L x S x A x K)`, zero in the padding, becomes `(... x L x S)`, in which row k is about the states of layer k
        + 1; with `layer` that row alone, `(... x S x A x K)`, becomes `(... x S)`.
        """
        if self.lists is None:
            # no matrix product: that of a batch may round a row's sum by its place in the batch, and a run must not know its place
            return flow.flatten(-3, -2).sum(-2)
        places = self._places(flow.device).flatten(1)
        places = places if layer is None else places[layer]
        flat = flow.flatten(-3)
        return flat.new_zeros(*flat.shape[:-1], self.width).scatter_add(-1, places.expand_as(flat), flat)

    def state_at(self, pair: Tensor, slot: Tensor) -> Tensor:
        """The state of the next layer that a slot belongs to, of pairs numbered through (L x S x A), and on through a batch."""
        if self.lists is None:
            return slot
        places = self._places(slot.device).flatten(0, 2)
        return places[pair % len(places), slot]

    def dense(self, tensor: Tensor) -> Tensor:
        """A tensor over slots, `(... x L x S x A x K)`, spread over all states of the next layer, `(... x L x S x A x S)`."""
        self.check_shape("tensor", tensor, kind="transition")
        if self.lists is None:
            return tensor
        places = self._places(tensor.device).expand_as(tensor)
        kept = torch.where(self.transition_mask(tensor.device), tensor, 0)
        return tensor.new_zeros(*tensor.shape[:-1], self.width).scatter_add(-1, places, kept)

    def compact(self, tensor: Tensor) -> Tensor:
        """The entries at the slots, `(... x L x S x A x K)`, of a tensor over all states of the next layer, zero in the padding.

        Refused on the CPU where something other than zero would be lost.
        """
        self.full.check_shape("tensor", tensor, kind="transition")
        if self.lists is None:
            return tensor
        places, real = self._places(tensor.device), self.transition_mask(tensor.device)
        found = torch.where(real, tensor.gather(-1, places.expand(*tensor.shape[:-1], -1)), 0)
        if tensor.device.type == "cpu" and (lost := first(self.dense(found) != tensor)):
            *_, k, x, a, y = lost
            raise InvalidInput(
                f"tensor is not zero at layer {k}, state {x}, action {a}, next state {y}, which the layout does not list there."
            )
        return found

    def config(self) -> dict[str, Any]:
        """What tells it from another, ready for JSON."""
        known = {"successors": self.lists, "action_mask": self.choices}
        own = {name: table.config() for name, table in known.items() if table is not None}
        return {"widths": list(self.widths), "actions": self.actions, **own}

    def check_shape(self, name: str, tensor: Tensor, *, kind: str) -> None:
        """Refuse a tensor whose trailing axes are not those of `kind`: "pair", "transition", or "constraint" of costs of pairs."""
        check_tensor(name, tensor)
        shape = self.transition_shape if kind == "transition" else self.pair_shape
        if tensor.shape[-len(shape) :] != shape:
            axes = "L x S x A" if kind != "transition" else "L x S x A x S" if self.lists is None else "L x S x A x K"
            raise InvalidInput(
                f"{name} has shape {tuple(tensor.shape)}; its last axes must be ({axes}) = {shape} for widths {self.widths}."
            )
        if kind == "constraint" and tensor.dim() < 4:
            expected = "it needs a constraint axis before (L x S x A), of size 0 when there are no constraints"
            raise InvalidInput(f"{name} has shape {tuple(tensor.shape)}; {expected}.")

    def _places(self, device: torch.device | str | None) -> Tensor:
        """As `successors`, with a zero in the padding, where it can be used as an index."""
        return _masks(self, str(device or "cpu"))[5]


@lru_cache(maxsize=256)
def _masks(layout: Layout, device: str) -> tuple[Tensor, ...]:
    # cached for good, so never born as an inference tensor, which autograd would refuse later
    with torch.inference_mode(False):
        widths = torch.tensor(layout.widths, device="cpu")
        real = torch.arange(layout.width, device="cpu") < widths[:, None]
        state = real[:-1]
        pair = state[:, :, None].expand(layout.pair_shape)
        actions = torch.tensor(layout.actions, dtype=torch.float64, device="cpu")
        if layout.choices is not None:
            pair = pair & torch.from_numpy(layout.choices.array.copy())
            actions = pair.sum(-1, keepdim=True).clamp_min(1).to(torch.float64)
        if layout.lists is None:
            transition = pair[..., None] & real[1:, None, None, :]
            counts = widths[1:, None, None].to(torch.float64)
            places = torch.arange(layout.width, device="cpu").expand(layout.transition_shape) * transition
        else:
            places = torch.from_numpy(layout.lists.array.astype(np.int64))
            transition = places >= 0
            counts = transition.sum(-1).clamp_min(1).to(torch.float64)
            places = places.clamp_min(0)
        masks = (state, pair, transition, counts, actions, places)
        return tuple(mask.contiguous().to(device) for mask in masks)


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """`torch.broadcast_shapes`, whose first call imports a computer algebra system: 40 MB that nothing else here needs."""
    common = [1] * max(map(len, shapes))
    for shape in shapes:
        for axis in range(-len(shape), 0):
            if shape[axis] != 1:
                if common[axis] not in (1, shape[axis]):
                    raise RuntimeError(f"the shapes {', '.join(str(tuple(each)) for each in shapes)} do not broadcast.")
                common[axis] = shape[axis]
    return torch.Size(common)


def check_layout(layout: object) -> None:
    """Refuse what is not a `Layout`."""
    if not isinstance(layout, Layout):
        raise InvalidInput(f"layout is {brief(layout)}, of type {type(layout).__name__}; it must be a Layout, such as cmdp.layout.")


def _checked_sizes(widths: Sequence[int], actions: int) -> tuple[tuple[int, ...], int]:
    if isinstance(widths, str) or not isinstance(widths, Iterable):
        raise InvalidInput(f"widths is {brief(widths)}; it must be a sequence of whole numbers, such as (1, 3, 1).")
    try:
        whole = [int(n) for n in (*widths, actions)]
        same = all(n == m for n, m in zip(whole, (*widths, actions), strict=True))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        same = False
    if not same:
        raise InvalidInput(f"widths {brief(widths)} and actions {brief(actions)} must be whole numbers.")
    widths, actions = tuple(whole[:-1]), whole[-1]
    if len(widths) < 2:
        raise InvalidInput(f"widths {widths} has {len(widths)} layers; a layout needs at least two, the first and the last.")
    if len(widths) > MOST_LAYERS:
        raise InvalidInput(f"widths has {len(widths):,} layers; a layout has at most {MOST_LAYERS:,}.")
    if min(widths) < 1:
        raise InvalidInput(f"widths {widths} has an empty layer {widths.index(min(widths))}; every layer needs at least one state.")
    if widths[0] != 1 or widths[-1] != 1:
        raise InvalidInput(f"widths {widths} must start and end with 1: one initial state x_0 and one terminal state x_L.")
    if actions < 1:
        raise InvalidInput(f"actions is {actions}; at least one action is needed.")
    return widths, actions


def _checked_choices(widths: tuple[int, ...], actions: int, action_mask: Tensor | np.ndarray) -> Table | None:
    """The actions that states have, false in the padding; None where every state has all."""
    shape, given = (len(widths) - 1, max(widths), actions), _array("action_mask", action_mask)
    if given.shape != shape or given.dtype != np.bool_:
        raise InvalidInput(f"action_mask is {given.dtype} of shape {given.shape}; expected bool of shape (L x S x A) = {shape}.")
    real = np.arange(max(widths)) < np.array(widths[:-1])[:, None]
    mask = given & real[:, :, None]
    if (lost := real & ~mask.any(-1)).any():
        k, x = np.argwhere(lost)[0].tolist()
        raise InvalidInput(f"action_mask leaves no action at layer {k}, state {x}; every state needs one at least.")
    return None if (mask == real[:, :, None]).all() else Table(mask)


def _checked_lists(layout: Layout, successors: Tensor | np.ndarray) -> Table:
    """The successor lists, -1 in the padding."""
    given = _array("successors", successors)
    if given.shape[:-1] != layout.pair_shape or given.ndim != 4 or not given.shape[-1] or given.dtype.kind not in "iu":
        raise InvalidInput(
            f"successors is {given.dtype} of shape {given.shape}; expected whole numbers of shape (L x S x A x K) with (L x S x A) "
            f"= {layout.pair_shape}."
        )
    real = np.arange(layout.width) < np.array(layout.widths[:-1])[:, None]
    pairs = np.broadcast_to(real[:, :, None], layout.pair_shape) if layout.choices is None else layout.choices.array
    lists = np.where(pairs[..., None], given, -1).astype(np.int32)
    highest = np.maximum.accumulate(lists, axis=-1)
    for wrong, expected in (
        ((lists < -1) | (lists >= np.array(layout.widths[1:])[:, None, None, None]), "states of the next layer, or -1 for none"),
        ((lists[..., 1:] <= highest[..., :-1]) & (lists[..., 1:] >= 0), "every successor once, in increasing order"),
        ((highest[..., -1:] < 0) & pairs[..., None], "one successor at least"),
    ):
        if wrong.any():
            k, x, a, _ = np.argwhere(wrong)[0].tolist()
            found = lists[k, x, a].tolist()
            raise InvalidInput(f"successors are {brief(found)} at layer {k}, state {x}, action {a}; expected {expected}.")
    for k, width in enumerate(layout.widths[1:]):
        if len(missing := np.setdiff1d(np.arange(width), lists[k])):
            raise InvalidInput(
                f"state {missing[0]} of layer {k + 1} follows no pair; expected layers of states that can be reached."
            )
    return Table(lists)


def _array(name: str, value: Tensor | np.ndarray) -> np.ndarray:
    try:
        return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    except (TypeError, ValueError, NotImplementedError):  # the last of a tensor without values
        raise InvalidInput(f"{name} is {brief(value)}; it must be a tensor or an array.") from None
