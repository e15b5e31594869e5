"""A constrained MDP with layers: transitions, mean rewards and mean costs, checked on entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, check_device, check_dtype, check_kind, check_shape, first, kind_of, listed, tensors_of
from torchcmdp.layout import Layout, check_layout
from torchcmdp.units import Units, stack_units

TABLES = ("transitions", "rewards", "costs")
ROW_SUM_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


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
        transitions: P(y|x,a), `(... x L x S x A x K)`, rows summing to one, zero in the padding. Arrays become tensors, here and in
            the following.
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
        for name, tensor in zip(TABLES, tensors_of(*(getattr(self, name) for name in TABLES)), strict=True):
            object.__setattr__(self, name, tensor)
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                raise InvalidInput(f"{name} must be a floating-point torch tensor, not {kind_of(tensor)}.")
            if (tensor.dtype, tensor.device) != (self.transitions.dtype, self.transitions.device):
                raise InvalidInput(
                    f"{name} is {tensor.dtype} on {tensor.device}, but transitions is {self.transitions.dtype} on "
                    f"{self.transitions.device}; all three must agree."
                )
        for name, kind in zip(TABLES, ("transition", "pair", "constraint"), strict=True):
            layout.check_shape(name, getattr(self, name), kind=kind)
        batches = (self.transitions.shape[:-4], self.rewards.shape[:-3], self.costs.shape[:-4])
        if len(set(batches)) != 1:
            raise InvalidInput(
                f"transitions, rewards and costs have batch shapes {', '.join(str(tuple(b)) for b in batches)}; they must be equal."
            )
        for name in TABLES:
            _check_values(layout, name, getattr(self, name), -1.0 if name == "costs" else 0.0)
        _check_rows(layout, self.transitions)
        self._check_extras()

    def _check_extras(self) -> None:
        """Refuse units of another CMDP, and what is neither units nor an origin."""
        check_kind("origin", self.origin, Origin | None, "an Origin, or None")
        check_kind("units", self.units, Units | None, "Units, or None")
        if self.units is None:
            return
        shapes = {
            "reward_scale": self.batch_shape,
            "cost_scale": (*self.batch_shape, self.constraints),
            "reward_high": self.rewards.shape,
            "cost_low": self.costs.shape,
        }
        for name, shape in shapes.items():
            check_shape(f"units.{name}", getattr(self.units, name), [tuple(shape)], f"that of this CMDP is {tuple(shape)}")

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
        tables = {name: getattr(self, name).to(device, dtype) for name in TABLES}
        return replace(self, **tables, units=self.units and self.units.to(device, dtype))

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
    cmdps = listed("cmdps", cmdps, "a list of CMDPs")
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
    P, r, g = (torch.stack([getattr(cmdp, name) for cmdp in cmdps]) for name in TABLES)
    return LayeredCMDP(cmdps[0].layout, P, r, g, stack_units([c.units for c in cmdps]), _common_origin([c.origin for c in cmdps]))


def _common_origin(origins: Sequence[Origin | None]) -> Origin | None:
    """That of all members of a batch, if they have the same states at the same places."""
    first = origins[0]
    if first is None or any(each is None or not torch.equal(each.states, first.states) for each in origins):
        return None
    return replace(first, stationary=all(each is not None and each.stationary for each in origins), truncation=None)


def _check_values(layout: Layout, name: str, tensor: Tensor, low: float) -> None:
    """Refuse NaN, values out of range, and anything but zero in the padding, naming the first offending entry."""
    mask = layout.transition_mask(tensor.device) if name == "transitions" else layout.pair_mask(tensor.device)
    slack = ROW_SUM_TOLERANCE.get(tensor.dtype, 1e-3) if name == "transitions" else 0.0
    for wrong, expected in (
        (tensor.isnan(), "a number"),
        ((tensor < low) | (tensor > 1 + slack), f"a value in [{low:g}, 1]"),
        ((tensor != 0) & ~mask, "exactly zero, since that state does not exist in that layer"),
    ):
        if index := first(wrong):
            place = _place(name, index, tensor.dim())
            raise InvalidInput(f"{name} is {tensor[tuple(index)].item():.12g} at {place}; expected {expected}.")


def _check_rows(layout: Layout, transitions: Tensor) -> None:
    sums = transitions.sum(-1)
    wrong = (sums - 1).abs() > ROW_SUM_TOLERANCE.get(transitions.dtype, 1e-3)
    if index := first(wrong & layout.pair_mask(transitions.device)):
        place = _place("rewards", index, sums.dim())
        raise InvalidInput(f"transitions sum to {sums[tuple(index)].item():.12g} at {place}; every row must sum to one.")


def _place(name: str, index: list[int], dims: int) -> str:
    """Say an index in words: the batch entry, the constraint, then layer, state, action and successor."""
    axes = {"transitions": ["layer", "state", "action", "next state"], "rewards": ["layer", "state", "action"]}
    words = axes.get(name, ["constraint", "layer", "state", "action"])
    words = ["batch entry"] * (dims - len(words)) + words
    return ", ".join(f"{word} {i}" for word, i in zip(words, index, strict=True))
