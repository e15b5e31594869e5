"""A constrained MDP with layers: transitions, mean rewards and mean costs, checked on entry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, brief, check_kind, check_memory, check_tensor, number, whole_number
from torchcmdp.layout import MOST_LAYERS, Layout, check_layout

ROW_SUM_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@dataclass(frozen=True, eq=False)
class LayeredCMDP:
    """A layered CMDP, or a batch of them over one layout.

    Attributes:
        layout: Layer widths and actions.
        transitions: P(y|x,a), `(... x L x S x A x S)`, rows summing to one, zero in the padding.
        rewards: Mean rewards in [0, 1], `(... x L x S x A)`.
        costs: Mean costs in [-1, 1], `(... x m x L x S x A)`; a policy with occupancy q is safe when <costs_i, q> <= 0 for every i.
    """

    layout: Layout
    transitions: Tensor
    rewards: Tensor
    costs: Tensor

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
        device, dtype = device or self.device, dtype or self.dtype
        return LayeredCMDP(
            self.layout,
            self.transitions.to(device, dtype),
            self.rewards.to(device, dtype),
            self.costs.to(device, dtype),
        )

    def __getitem__(self, index: int) -> LayeredCMDP:
        """One CMDP of a batch."""
        if not self.batch_shape:
            raise InvalidInput(f"This CMDP is a single one, not a batch, so it has no entry {index}.")
        return LayeredCMDP(self.layout, self.transitions[index], self.rewards[index], self.costs[index])

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
    )


def unroll(
    transitions: Tensor | np.ndarray, rewards: Tensor | np.ndarray, costs: Tensor | np.ndarray, *, horizon: int, start: int = 0
) -> LayeredCMDP:
    """Turn a stationary MDP into a layered one by playing it for `horizon` steps from one state.

    Layer 0 holds `start` alone, layers 1 to H-1 hold the states reachable by then, in increasing order of their index, and every
    pair of the last decision layer leads to the terminal state.

    Args:
        transitions: P(y|x,a), `(N x A x N)`. This and the following: tensors, or arrays.
        rewards: `(N x A)` in [0, 1].
        costs: `(m x N x A)` in [-1, 1].
        horizon: H, the number of steps of an episode.
        start: The state every episode starts in.
    """
    transitions, rewards, costs = (torch.as_tensor(x) if isinstance(x, np.ndarray) else x for x in (transitions, rewards, costs))
    horizon = whole_number("horizon", horizon, least=1)
    if horizon >= MOST_LAYERS:
        raise InvalidInput(f"horizon is {brief(horizon)}; an episode has fewer than {MOST_LAYERS:,} steps.")
    for name, tensor in (("transitions", transitions), ("rewards", rewards), ("costs", costs)):
        check_tensor(name, tensor)
        if not tensor.is_floating_point() or tensor.device != transitions.device:
            raise InvalidInput(
                f"{name} is {brief(tensor)} on {tensor.device}; expected floating-point numbers on one device for all."
            )
    states, actions = rewards.shape[-2:] if rewards.dim() == 2 else (-1, -1)
    expected = {"transitions": (states, actions, states), "costs": (*costs.shape[:1], states, actions)}
    for name, tensor in (("transitions", transitions), ("costs", costs)):
        if tuple(tensor.shape) != expected[name]:
            raise InvalidInput(
                f"{name} has shape {tuple(tensor.shape)} and rewards {tuple(rewards.shape)}; a stationary MDP needs transitions "
                "(N x A x N), rewards (N x A) and costs (m x N x A)."
            )
    check_memory(f"{horizon} layers of {states} states and {actions} actions", horizon * actions * states**2)
    number("start", start, f"a state between 0 and {states - 1}", lambda found: found.is_integer() and 0 <= found < states)
    layers = [torch.tensor([int(start)], device=transitions.device)]
    for _ in range(horizon - 1):
        layers.append((transitions[layers[-1]] > 0).any(1).any(0).nonzero().squeeze(-1))
    layout = Layout([len(layer) for layer in layers] + [1], actions)
    P = transitions.new_zeros(layout.transition_shape)
    r = rewards.new_zeros(layout.pair_shape)
    g = costs.new_zeros(costs.shape[0], *layout.pair_shape)
    for k, layer in enumerate(layers):
        n = len(layer)
        r[k, :n] = rewards[layer]
        g[:, k, :n] = costs[:, layer]
        if k + 1 < horizon:
            P[k, :n, :, : len(layers[k + 1])] = transitions[layer][:, :, layers[k + 1]]
        else:
            P[k, :n, :, 0] = 1
    return LayeredCMDP(layout, P, r, g)


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
