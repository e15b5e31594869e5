"""Tied layers: where the dynamics are stationary, a state is the same in every layer, and so is what is learnt of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchcmdp.errors import InvalidInput, brief
from torchcmdp.layout import Layout


class Ties(nn.Module):
    """Which pairs and transitions of different layers are the same, and sums over them.

    The pairs of the last layer all lead to the end, and say nothing of where they would lead before: what is seen there counts
    there alone, while the last layer learns from all others. So visits are still the sums of transitions, everywhere.

    Args:
        layout: Layer widths and actions.
        states: The number of the state at each place of each layer, `(L x S)`: places with the same number are the same state.
            -1 at a state that is like no other, which may come before all numbered layers.
    """

    pair_groups: Tensor
    transition_groups: Tensor
    last_slots: Tensor

    def __init__(self, layout: Layout, states: Tensor | np.ndarray, device: torch.device | str | None = None) -> None:
        super().__init__()
        numbers = _checked(layout, states)
        pair, inner = layout.pair_mask("cpu"), layout.transition_mask("cpu")[:-1]
        actions = torch.arange(layout.actions)
        # all of the padding is one group, in which nothing is ever seen
        groups, count = _groups(numbers[:, :, None] * layout.actions + actions, pair)
        groups[-1] += count
        following = layout.ahead(torch.nn.functional.pad(numbers[1:], (0, 0, 0, 1)))[:-1].expand_as(inner)
        steps, _ = _groups(groups[:-1, ..., None] * (int(numbers.max()) + 1) + following, inner)
        self.register_buffer("pair_groups", groups.flatten().to(device), persistent=False)
        self.register_buffer("transition_groups", steps.flatten().to(device), persistent=False)
        self.register_buffer("last_slots", layout.transition_mask("cpu")[-1].to(device), persistent=False)
        self._pairs, self._steps = count, int(steps.max()) + 1 if steps.numel() else 0

    def pairs(self, values: Tensor) -> Tensor:
        """At every pair the sum over those that it learns from, itself among them: `(... x L x S x A)`, zero in the padding."""
        flat = values.flatten(-3)
        sums = flat.new_zeros(*flat.shape[:-1], 2 * self._pairs).index_add(-1, self.pair_groups, flat)
        before, last = sums.split(self._pairs, -1)
        return torch.cat([before, before + last], -1).index_select(-1, self.pair_groups).view_as(values)

    def transitions(self, values: Tensor) -> Tensor:
        """The same for transitions: `(... x L x S x A x K)`."""
        inner = values[..., :-1, :, :, :].flatten(-4)
        sums = inner.new_zeros(*inner.shape[:-1], self._steps).index_add(-1, self.transition_groups, inner)
        shared = sums.index_select(-1, self.transition_groups).view_as(values[..., :-1, :, :, :])
        last = self.pairs(values.sum(-1))[..., -1:, :, :, None] * self.last_slots
        return torch.cat([shared, last], -4)


def _groups(keys: Tensor, real: Tensor) -> tuple[Tensor, int]:
    """Equal keys as equal numbers from zero on, and how many there are; one number for all that is not real."""
    found, groups = torch.unique(torch.where(real, keys, -1), return_inverse=True)
    return groups, len(found)


def _checked(layout: Layout, states: Any) -> Tensor:
    """The numbers of the states, `(L x S)` int64 on the host, with one of its own for each state that is like no other."""
    expected = f"the numbers of the states, whole, of shape (L x S) = {layout.pair_shape[:2]}, such as cmdp.origin.ties"
    try:
        found = torch.as_tensor(states.detach().cpu() if isinstance(states, Tensor) else np.asarray(states))
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(())
    if tuple(found.shape) != layout.pair_shape[:2] or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise InvalidInput(f"tied_layers is {brief(states)}; it must be True in for_env, or {expected}.")
    real = layout.state_mask("cpu")
    numbers = torch.where(real, found.to(torch.int64), -1)
    for k, row in enumerate(numbers):
        own = row[row >= 0]
        if len(own.unique()) < len(own):
            raise InvalidInput(f"tied_layers has a number twice in layer {k}; a layer has every state once.")
        if k and (numbers[:k] >= 0).any() and len(own) < int(real[k].sum()):
            raise InvalidInput(f"tied_layers leaves a state of layer {k} without a number, and numbers one before; it needs all.")
    alone = torch.arange(numbers.numel()).view_as(numbers) + int(numbers.max()) + 1
    return torch.where(numbers >= 0, numbers, alone)


def ties_of(cmdp: object) -> Tensor:
    """The numbers of the states of a CMDP that knows them, `(L x S)`, or one sentence."""
    ties: Tensor | None = getattr(getattr(cmdp, "origin", None), "ties", None)
    if ties is None:
        raise InvalidInput(
            "tied_layers is True, but this CMDP was not unrolled from stationary tables; leave it out, or pass the numbers of its "
            "states, (L x S)."
        )
    return ties
