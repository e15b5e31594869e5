"""The shape of a layered, loop-free MDP and the padded tensors that every other room uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, brief, check_memory, check_tensor

# Every layer has random numbers of its own, and a stream keeps room for so many.
MOST_LAYERS = 2**16


@dataclass(frozen=True)
class Layout:
    """Layer widths and number of actions of a layered MDP.

    The layers are X_0 = {x_0}, X_1, ..., X_L = {x_L}: `widths` has L + 1 entries and there are L decision layers. Tensors are
    padded to the widest layer S, and padding is exactly zero everywhere: rewards and policies are `(... x L x S x A)`,
    transitions and occupancies `(... x L x S x A x S)`, costs `(... x m x L x S x A)`.
    """

    widths: tuple[int, ...]
    actions: int

    def __init__(self, widths: Sequence[int], actions: int) -> None:
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
            raise InvalidInput(
                f"widths {widths} has an empty layer {widths.index(min(widths))}; every layer needs at least one state."
            )
        if widths[0] != 1 or widths[-1] != 1:
            raise InvalidInput(f"widths {widths} must start and end with 1: one initial state x_0 and one terminal state x_L.")
        if actions < 1:
            raise InvalidInput(f"actions is {actions}; at least one action is needed.")
        check_memory(
            f"the transitions of widths {brief(widths)} and {brief(actions)} actions", len(widths) * actions * max(widths) ** 2
        )
        object.__setattr__(self, "widths", widths)
        object.__setattr__(self, "actions", actions)

    @property
    def layers(self) -> int:
        """L, the number of layers in which an action is taken."""
        return len(self.widths) - 1

    @property
    def width(self) -> int:
        """S, the width every layer is padded to."""
        return max(self.widths)

    @property
    def total_states(self) -> int:
        """|X|, all states of all layers, the terminal one included (the paper's |X|)."""
        return sum(self.widths)

    @property
    def pair_shape(self) -> tuple[int, int, int]:
        """(L, S, A)."""
        return (self.layers, self.width, self.actions)

    @property
    def transition_shape(self) -> tuple[int, int, int, int]:
        """(L, S, A, S)."""
        return (self.layers, self.width, self.actions, self.width)

    def state_mask(self, device: torch.device | str | None = None) -> Tensor:
        """True at real states: `(L x S)`."""
        return _masks(self, str(device or "cpu"))[0]

    def pair_mask(self, device: torch.device | str | None = None) -> Tensor:
        """True at real state-action pairs: `(L x S x A)`."""
        return _masks(self, str(device or "cpu"))[1]

    def transition_mask(self, device: torch.device | str | None = None) -> Tensor:
        """True at real transitions: `(L x S x A x S)`."""
        return _masks(self, str(device or "cpu"))[2]

    def next_widths(self, device: torch.device | str | None = None) -> Tensor:
        """n_{k+1}, the number of possible successors in each layer, as float64 ready to broadcast over pairs: `(L x 1 x 1)`."""
        return _masks(self, str(device or "cpu"))[3]

    def check_shape(self, name: str, tensor: Tensor, *, kind: str) -> None:
        """Refuse a tensor whose trailing axes are not those of `kind`: "pair" or "transition"."""
        check_tensor(name, tensor)
        shape = self.pair_shape if kind == "pair" else self.transition_shape
        axes = "L x S x A" if kind == "pair" else "L x S x A x S"
        if tuple(tensor.shape[-len(shape) :]) != shape:
            raise InvalidInput(
                f"{name} has shape {tuple(tensor.shape)}; its last axes must be ({axes}) = {shape} for widths {self.widths}."
            )


@lru_cache(maxsize=256)
def _masks(layout: Layout, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # cached for good, so never born as an inference tensor, which autograd would refuse later
    with torch.inference_mode(False):
        widths = torch.tensor(layout.widths, device="cpu")
        real = torch.arange(layout.width, device="cpu") < widths[:, None]
        state = real[:-1]
        pair = state[:, :, None].expand(layout.pair_shape)
        transition = pair[..., None] & real[1:, None, None, :]
        successors = widths[1:, None, None].to(torch.float64)
        masks = (state, pair, transition, successors)
        return tuple(mask.contiguous().to(device) for mask in masks)  # type: ignore[return-value]


def check_layout(layout: object) -> None:
    """Refuse what is not a `Layout`."""
    if not isinstance(layout, Layout):
        raise InvalidInput(f"layout is {brief(layout)}, of type {type(layout).__name__}; it must be a Layout, such as cmdp.layout.")
