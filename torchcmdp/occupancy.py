"""Occupancy measures: from policies and transitions, back again, and how far a tensor is from being one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, brief, check_place, check_tensor, first, kind_of
from torchcmdp.layout import Layout, broadcast_shapes, check_layout

# How far a row of a policy may miss a sum of one: much more than rounding, much less than a mistake.
ROW_SUM_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


def occupancy_of(policy: Tensor, transitions: Tensor, layout: Layout | None = None) -> Tensor:
    """The occupancy q^{P,pi}(x,a,y) of a policy, by the forward recursion over layers: `(... x L x S x A x K)`.

    Args:
        policy: `(... x L x S x A)`.
        transitions: `(... x L x S x A x K)`; batch shapes broadcast.
        layout: Needed where it has successor lists; without one the K = S slots are the states of the next layer.
    """
    return pair_occupancy_of(policy, transitions, layout).unsqueeze(-1) * transitions


def pair_occupancy_of(policy: Tensor, transitions: Tensor, layout: Layout | None = None) -> Tensor:
    """The state-action occupancy q^{P,pi}(x,a) of a policy, `(... x L x S x A)`: `occupancy_of` without the successor axis."""
    _check_pair(policy, transitions)
    layout = _layout_of(transitions, layout)
    policy = policy.expand(*broadcast_shapes(policy.shape[:-3], transitions.shape[:-4]), *policy.shape[-3:])
    pairs = [policy[..., 0, :, :]]  # layer 0 holds x_0 alone, so its policy is its occupancy
    for k in range(1, policy.shape[-3]):
        mass = layout.arrivals(pairs[-1].unsqueeze(-1) * transitions[..., k - 1, :, :, :], k - 1)
        pairs.append(mass.unsqueeze(-1) * policy[..., k, :, :])
    return torch.stack(pairs, dim=-3)


def expected_value(values: Tensor, occupancy: Tensor) -> Tensor:
    """<v, q>, the expected sum over an episode: `(...)`, of `(... x L x S x A)` each; batch shapes broadcast."""
    return (values * occupancy).sum(dim=(-1, -2, -3))


def policy_of(occupancy: Tensor, layout: Layout) -> Tensor:
    """pi(a|x) = q(x,a) / q(x), and uniform where q(x) = 0: `(... x L x S x A)` of `(... x L x S x A x K)`, zero in the padding."""
    _check(occupancy, layout)
    pair = occupancy.sum(-1)
    state = pair.sum(-1, keepdim=True)
    empty = state <= 0  # false for NaN, which must show and not turn into a uniform policy
    # divide by one where the state has no mass, so that neither the value nor its gradient is ever 0/0
    uniform = (1.0 / layout.action_counts(pair.device)).to(pair.dtype)
    policy = torch.where(empty, uniform, pair / torch.where(empty, torch.ones_like(state), state))
    return policy * layout.pair_mask(policy.device)


def checked_policy(policy: Any, layout: Layout, runs: int | None = None) -> Tensor:
    """As `shaped_policy`, and zero in the padding whatever stood there; refused if it is none.

    The softmax of logits that are -inf in the padding is NaN there, which is fine. Off the CPU only the shape is looked at, since
    reading values would wait for the device.
    """
    policy = shaped_policy(policy, layout, runs)
    policy = torch.where(layout.pair_mask(policy.device), policy, 0)
    if policy.device.type == "cpu":
        _check_probabilities(policy.detach(), layout)
    return policy  # type: ignore[no-any-return]


def shaped_policy(policy: Any, layout: Layout, runs: int | None = None) -> Tensor:
    """A policy `(... x L x S x A)`, a tensor or an array, whose values nobody has looked at; refused if its shape is wrong.

    If `runs` is given, the batch shape is (runs,) or empty.
    """
    if isinstance(policy, np.ndarray) and policy.dtype.kind in "iuf":
        policy = torch.from_numpy(policy)
    if not isinstance(policy, Tensor) or not policy.is_floating_point():
        hint = ", such as what it returns" if callable(policy) else ""
        raise InvalidInput(f"policy is {kind_of(policy)}; expected a tensor or an array of probabilities (L x S x A){hint}.")
    if tuple(policy.shape[-3:]) != layout.pair_shape:
        raise InvalidInput(f"policy has shape {tuple(policy.shape)}; expected it to end in (L x S x A) = {layout.pair_shape}.")
    if runs is not None and tuple(policy.shape[:-3]) not in ((), (runs,)):
        raise InvalidInput(
            f"policy has shape {tuple(policy.shape)}; expected (runs x L x S x A) = {(runs, *layout.pair_shape)} or, for all runs, "
            f"(L x S x A) = {layout.pair_shape}."
        )
    return policy


def _check_probabilities(policy: Tensor, layout: Layout) -> None:
    """Refuse what would otherwise be drawn from in silence: entries that are no probabilities, and rows that do not sum to one."""
    if index := first(~((policy >= 0) & (policy < torch.inf))):  # true for NaN as well
        *runs, k, x, a = index
        place = f"{_run(runs)}at layer {k}, state {x}, action {a}"
        raise InvalidInput(f"policy is {policy[tuple(index)].item():g} {place}; expected a probability.")
    sums = policy.sum(-1)
    wrong = (sums - 1).abs() > ROW_SUM_TOLERANCE.get(policy.dtype, 2e-2)
    if index := first(wrong & layout.state_mask(policy.device)):
        *runs, k, x = index
        raise InvalidInput(f"policy sums to {sums[tuple(index)].item():.6g} {_run(runs)}at layer {k}, state {x}; expected one.")


def _run(batch: list[int]) -> str:
    return f"in run {', '.join(map(str, batch))} " if batch else ""


def transitions_of(occupancy: Tensor, layout: Layout) -> Tensor:
    """P(y|x,a) = q(x,a,y) / q(x,a), `(... x L x S x A x K)`, and uniform over the possible successors where q(x,a) = 0."""
    _check(occupancy, layout)
    pair = occupancy.sum(-1, keepdim=True)
    empty = pair <= 0
    mask = layout.transition_mask(occupancy.device)
    uniform = layout.uniform_transitions(occupancy.dtype, occupancy.device)
    return torch.where(empty, uniform, occupancy / torch.where(empty, torch.ones_like(pair), pair)) * mask


def uniform_policy(layout: Layout, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
    """The policy that plays every action alike: `(L x S x A)`."""
    _check_kind(layout, dtype, device)
    return layout.pair_mask(device).to(dtype) / layout.action_counts(device).to(dtype)


def softmax_policy(logits: Tensor, layout: Layout) -> Tensor:
    """The softmax of logits over the actions that a state has, `(... x L x S x A)`, zero in the padding."""
    mask = layout.pair_mask(logits.device)
    return open_logits(logits, layout).softmax(-1) * mask


def open_logits(logits: Tensor, layout: Layout) -> Tensor:
    """The logits, -inf at the actions that a real state does not have, `(... x L x S x A)`."""
    return logits if layout.choices is None else logits.masked_fill(closed_pairs(layout, logits.device), -torch.inf)


def closed_pairs(layout: Layout, device: torch.device) -> Tensor:
    """True at the actions that real states do not have, `(L x S x A)`."""
    return layout.state_mask(device).unsqueeze(-1) & ~layout.pair_mask(device)


def uniform_occupancy(layout: Layout, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
    """WC-OPS's first occupancy, that of the uniform policy under uniform transitions: 1 / (n_k |A| n_{k+1}) (D12)."""
    _check_kind(layout, dtype, device)
    if layout.lists is not None or layout.choices is not None:
        policy = uniform_policy(layout, dtype=dtype, device=device)
        return occupancy_of(policy, layout.uniform_transitions(dtype, device), layout)
    mask = layout.transition_mask(device).to(dtype)
    return mask / mask.sum(dim=(-3, -2, -1), keepdim=True)


def flow_residual(occupancy: Tensor, layout: Layout | None = None) -> Tensor:
    """The largest violation of unit mass at x_0 and of inflow = outflow at any other state: `(...)`.

    The occupancy is `(... x L x S x A x K)`, and the layout needed as in `occupancy_of`.
    """
    check_tensor("occupancy", occupancy, axes=4)
    layout = _layout_of(occupancy, layout)
    outflow = occupancy.sum(dim=(-1, -2))
    inflow = layout.arrivals(occupancy)
    start = (outflow[..., 0, :].sum(-1) - 1).abs()
    if occupancy.shape[-4] == 1:
        return start
    conservation = (outflow[..., 1:, :] - inflow[..., :-1, :]).abs().amax(dim=(-1, -2))
    return torch.maximum(start, conservation)


def interval_residual(occupancy: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """The largest amount by which lower * q(x,a) <= q(x,a,y) <= upper * q(x,a) or q >= 0 is broken: `(...)`.

    All three are `(... x L x S x A x K)`.
    """
    for name, tensor in (("occupancy", occupancy), ("lower", lower), ("upper", upper)):
        check_tensor(name, tensor, axes=4)
        if tensor.shape[-4:] != occupancy.shape[-4:] or tensor.device != occupancy.device:
            raise InvalidInput(f"{name} is {brief(tensor)} on {tensor.device}; it must be like occupancy, {brief(occupancy)}.")
    _broadcast(occupancy.shape[:-4], lower.shape[:-4], upper.shape[:-4])
    if 0 in occupancy.shape[-4:]:
        raise InvalidInput(f"occupancy has shape {tuple(occupancy.shape)}; it is empty.")
    pair = occupancy.sum(-1, keepdim=True)
    excess = torch.maximum(torch.maximum(lower * pair - occupancy, occupancy - upper * pair), -occupancy)
    return excess.clamp_min(0).amax(dim=(-1, -2, -3, -4))


def _check(occupancy: Tensor, layout: Layout) -> None:
    check_layout(layout)
    layout.check_shape("occupancy", occupancy, kind="transition")


def _check_kind(layout: Layout, dtype: torch.dtype, device: torch.device | str | None) -> None:
    check_layout(layout)
    check_place(dtype, device)


@lru_cache(maxsize=64)
def _square(layers: int, width: int, actions: int) -> Layout:
    """A layout without successor lists that knows of no padding."""
    return Layout((1, *[width] * max(layers - 1, 1), 1), actions)


def _layout_of(tensor: Tensor, layout: Layout | None) -> Layout:
    """The layout of a tensor over transitions; where none was given, one of as many slots as states."""
    if layout is not None:
        check_layout(layout)
        layout.check_shape("the tensor over transitions", tensor, kind="transition")
        return layout
    layers, width, actions, slots = tensor.shape[-4:]
    if slots != width or 0 in tensor.shape[-4:]:
        raise InvalidInput(
            f"a tensor over transitions has shape {tuple(tensor.shape)}; its last axes must be (L x S x A x S), or pass the layout "
            "whose successor lists they follow."
        )
    return _square(layers, width, actions)


def _check_pair(policy: Tensor, transitions: Tensor) -> None:
    """Refuse a policy and transitions that do not belong together."""
    check_tensor("policy", policy, axes=3)
    check_tensor("transitions", transitions, axes=4)
    if policy.shape[-3:] != transitions.shape[-4:-1] or policy.device != transitions.device:
        raise InvalidInput(
            f"policy is {brief(policy)} on {policy.device} and transitions {brief(transitions)} on {transitions.device}; expected "
            "(... x L x S x A) and (... x L x S x A x S) on one device."
        )
    _broadcast(policy.shape[:-3], transitions.shape[:-4])


def _broadcast(*batches: torch.Size) -> None:
    if len(set(batches)) == 1:
        return
    try:
        broadcast_shapes(*batches)
    except RuntimeError:
        raise InvalidInput(f"the batch shapes {', '.join(str(tuple(b)) for b in batches)} do not broadcast.") from None
