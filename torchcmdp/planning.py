"""Exact optima of a known CMDP: the best safe policy, the best policy, the safest, and how much room the constraints leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, TorchCMDPError, brief, check_kind, check_tensor
from torchcmdp.layout import Layout
from torchcmdp.occupancy import checked_policy, closed_pairs, expected_value, occupancy_of, pair_occupancy_of, policy_of
from torchcmdp.optimistic import OptimisticOptimum, largest_margin, optimistic_optimum
from torchcmdp.safe_set import SafeSet
from torchcmdp.status import Status

# A violation that rounding explains.
SAFE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
# Of a step's cost in normal form: what rounding may add to the least that a policy can keep to.
BUDGET_TOLERANCE = 1e-9
# The same of the program that finds what constraints can be kept together.
JOINT_TOLERANCE = 1e-7


@dataclass(frozen=True, eq=False)
class Optimum:
    """The best policy of every CMDP of a batch.

    Attributes:
        value: Expected reward of an episode, `(...)`; NaN where no policy is feasible.
        occupancy: The occupancy q(x,a,y) that attains it, `(... x L x S x A x K)`; NaN at real transitions where none is feasible.
        feasible: `(...)` bool.
    """

    value: Tensor
    occupancy: Tensor
    feasible: Tensor


def safe_optimum(cmdp: LayeredCMDP, rewards: Tensor | None = None, costs: Tensor | None = None) -> Optimum:
    """OPT_G: max <r, q> over occupancies of the true transitions with <g_i, q> <= 0 for every i.

    An exact linear program: the optimistic one of `torchcmdp.optimistic` with the true kernel as the only plausible one, solved for
    the whole batch at once.

    Args:
        cmdp: One CMDP or a batch.
        rewards: Used in place of the CMDP's own, `(... x L x S x A)`.
        costs: Used in place of the CMDP's own, `(... x m x L x S x A)`.
    """
    rewards, costs = _rewards(cmdp, rewards), _costs(cmdp, costs)
    layout = cmdp.layout
    if cmdp.device.type == "meta":
        return _on_meta(cmdp)
    solution = optimistic_optimum(rewards, SafeSet(layout, cmdp.transitions, cmdp.transitions, costs))
    _check_solved(solution)
    feasible = solution.status == Status.SOLVED
    policy = policy_of(solution.occupancy, layout)
    # rolled out again, which removes the solver's rounding from the flow
    occupancy = occupancy_of(policy, cmdp.transitions, layout)
    value = expected_value(rewards, occupancy.sum(-1))
    nothing = layout.transition_mask(cmdp.device) & ~feasible[..., None, None, None, None]
    return Optimum(torch.where(feasible, value, torch.nan), torch.where(nothing, torch.nan, occupancy), feasible)


def unconstrained_optimum(cmdp: LayeredCMDP, rewards: Tensor | None = None) -> Optimum:
    """OPT: max <r, q> over all occupancies of the true transitions, by backward induction; ties go to the lowest action.

    Args:
        cmdp: One CMDP or a batch.
        rewards: Used in place of the CMDP's own, `(... x L x S x A)`.
    """
    rewards = _rewards(cmdp, rewards)
    if rewards.device.type != "meta" and not rewards.isfinite().all():
        raise InvalidInput("rewards has a NaN or an infinity; all of them must be finite.")
    layout = cmdp.layout
    value, closed = rewards.new_zeros(*cmdp.batch_shape, layout.width), closed_pairs(layout, cmdp.device)
    choices = []
    for k in reversed(range(layout.layers)):
        action_value = rewards[..., k, :, :] + _expected(cmdp, value, k)
        value, best = action_value.masked_fill(closed[k], -torch.inf).max(-1)
        choices.append(best)
    policy = _deterministic(cmdp, torch.stack(choices[::-1], dim=-2))
    feasible = torch.ones(cmdp.batch_shape, dtype=torch.bool, device=cmdp.device)
    return Optimum(value[..., 0], occupancy_of(policy, cmdp.transitions, layout), feasible)


def slater_gap(cmdp: LayeredCMDP, costs: Tensor | None = None) -> Tensor:
    """max_q min_i -<g_i, q>: positive if some policy is strictly safe, negative if none is safe; +inf without constraints.

    Args:
        cmdp: One CMDP or a batch.
        costs: Used in place of the CMDP's own, `(... x m x L x S x A)`.

    Returns:
        `(...)`.
    """
    costs = _costs(cmdp, costs)
    if costs.shape[-4] == 0 or cmdp.device.type == "meta":
        return torch.full(cmdp.batch_shape, torch.inf, dtype=cmdp.dtype, device=cmdp.device)
    margin, optimum = largest_margin(SafeSet(cmdp.layout, cmdp.transitions, cmdp.transitions, costs))
    _check_solved(optimum)
    return margin


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


def rho(cmdp: LayeredCMDP, worst_costs: Tensor | None = None) -> Tensor:
    """By how much the safest policy keeps every cost below zero in every pair it may visit.

    rho = max_q min over pairs with q(x,a) > 0 and constraints i of -g_i(x,a), by a bottleneck recursion over the layers: negative
    if every policy may meet a positive cost, +inf without constraints. A successor is possible where its probability is not zero.

    Args:
        cmdp: One CMDP or a batch; only its transitions count.
        worst_costs: The largest cost of every pair over all episodes, `(... x m x L x S x A)`, its batch shape broadcast with the
            CMDP's; by default the CMDP's own costs.

    Returns:
        `(...)`.
    """
    return _bottleneck(cmdp, worst_costs)[0]


def safest_policy(cmdp: LayeredCMDP, worst_costs: Tensor | None = None) -> Tensor:
    """A deterministic policy that attains `rho`; ties go to the lowest action.

    Args:
        cmdp, worst_costs: As for `rho`.

    Returns:
        `(... x L x S x A)`.
    """
    return _bottleneck(cmdp, worst_costs)[1]


def alpha_of(rho: Tensor) -> Tensor:
    """rho^+ / (1 + rho^+), the share of the best reward that can be promised against adversarial costs; one where rho is +inf."""
    check_tensor("rho", rho)
    room = rho.clamp_min(0)
    return torch.where(room.isinf(), torch.ones_like(room), room / (1 + room))


def _bottleneck(cmdp: LayeredCMDP, costs: Tensor | None) -> tuple[Tensor, Tensor]:
    """W(x_0) = rho `(...)`, by W(x) = max_a min(s(x,a), min over possible successors y of W(y)), and the policy of its maxima."""
    check_cmdp(cmdp)
    layout = cmdp.layout
    costs = cmdp.costs if costs is None else _placed(cmdp, "costs", _with_constraints(layout, costs))
    try:
        batch = torch.broadcast_shapes(cmdp.batch_shape, costs.shape[:-4])
    except RuntimeError:
        raise InvalidInput(
            f"costs has batch shape {tuple(costs.shape[:-4])}; it must broadcast with the CMDP's {tuple(cmdp.batch_shape)}."
        ) from None
    # without constraints every pair has infinite room
    room = 0 - costs.amax(-4) if costs.shape[-4] else costs.new_full((*costs.shape[:-4], *layout.pair_shape), torch.inf)
    value, closed = room.new_full((*batch, layout.width), torch.inf), closed_pairs(layout, cmdp.device)
    choices = []
    for k in reversed(range(layout.layers)):
        ahead = torch.where(cmdp.transitions[..., k, :, :, :] > 0, layout.ahead(value, k), torch.inf).amin(-1)
        value, best = torch.minimum(room[..., k, :, :], ahead).masked_fill(closed[k], -torch.inf).max(-1)
        choices.append(best)
    return value[..., 0], _deterministic(cmdp, torch.stack(choices[::-1], dim=-2))


def _expected(cmdp: LayeredCMDP, value: Tensor, k: int) -> Tensor:
    """sum_y P(y|x,a) value(y) of the pairs of layer k, `(... x S x A)`."""
    transitions = cmdp.transitions[..., k, :, :, :]
    if cmdp.layout.lists is None:
        return (transitions @ value[..., None, :, None]).squeeze(-1)
    return (transitions * cmdp.layout.ahead(value, k)).sum(-1)


def _deterministic(cmdp: LayeredCMDP, choices: Tensor) -> Tensor:
    """The policy that takes the actions `choices`, `(... x L x S)`: `(... x L x S x A)`."""
    taken = choices.unsqueeze(-1) == torch.arange(cmdp.layout.actions, device=choices.device)
    return (taken & cmdp.layout.pair_mask(choices.device)).to(cmdp.dtype)


def check_cmdp(cmdp: object) -> None:
    """Refuse what is no CMDP."""
    check_kind("cmdp", cmdp, LayeredCMDP, "a LayeredCMDP, such as random_cmdp() gives")


def _rewards(cmdp: LayeredCMDP, rewards: Tensor | None) -> Tensor:
    check_cmdp(cmdp)
    if rewards is None:
        return cmdp.rewards
    cmdp.layout.check_shape("rewards", rewards, kind="pair")
    return _to_batch(cmdp, "rewards", rewards, 3)


def _costs(cmdp: LayeredCMDP, costs: Tensor | None) -> Tensor:
    check_cmdp(cmdp)
    if costs is None:
        return cmdp.costs
    return _to_batch(cmdp, "costs", _with_constraints(cmdp.layout, costs), 4)


def _with_constraints(layout: Layout, costs: Tensor) -> Tensor:
    """The costs, refused if they do not end in (m x L x S x A)."""
    layout.check_shape("costs", costs, kind="pair")
    if costs.dim() < 4:
        raise InvalidInput(f"costs has shape {tuple(costs.shape)}; it needs a constraint axis before (L x S x A).")
    return costs


def _placed(cmdp: LayeredCMDP, name: str, tensor: Tensor) -> Tensor:
    """The tensor where the CMDP is; one without values cannot go there."""
    if tensor.device.type == "meta" != cmdp.device.type:
        raise InvalidInput(f"{name} is {brief(tensor)} without values, on the meta device; the CMDP is on {cmdp.device}.")
    return tensor.to(cmdp.transitions)


def _to_batch(cmdp: LayeredCMDP, name: str, tensor: Tensor, axes: int) -> Tensor:
    """Give a tensor the CMDP's batch shape."""
    try:
        return _placed(cmdp, name, tensor).expand(*cmdp.batch_shape, *tensor.shape[-axes:])
    except RuntimeError:
        raise InvalidInput(
            f"{name} has batch shape {tuple(tensor.shape[:-axes])}; it must broadcast to the CMDP's {tuple(cmdp.batch_shape)}."
        ) from None


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a policy does in a known CMDP, exactly.

    Attributes:
        value: Expected reward of an episode, `(...)`.
        violations: Expected cost of an episode by constraint, `(... x m)`; at most zero where it is safe.
        safe: Whether no constraint is violated by more than rounding, `(...)` bool.
    """

    value: Tensor
    violations: Tensor
    safe: Tensor


def evaluate(policy: Any, cmdp: LayeredCMDP) -> Evaluation:
    """The exact value and violations of any policy, by its occupancy under the true transitions.

    Args:
        policy: pi(a|x), `(... x L x S x A)`, as a tensor or an array, whose batch shape broadcasts with the CMDP's; or a function
            or network, which is called once with all states of all layers, numbered through as in `adapters` and one-hot, `(N x N)`
            with N = |X| and the terminal state last, and returns probabilities, `(N x A)`.
        cmdp: One CMDP or a batch.
    """
    check_cmdp(cmdp)
    if callable(policy) and not isinstance(policy, Tensor | type):
        policy = _asked(policy, cmdp)
    probabilities = _placed(cmdp, "policy", checked_policy(policy, cmdp.layout))
    occupancy = pair_occupancy_of(probabilities, cmdp.transitions, cmdp.layout)
    violations = expected_value(cmdp.costs, occupancy.unsqueeze(-4))
    value = expected_value(cmdp.rewards, occupancy)
    return Evaluation(value, violations, (violations <= SAFE_TOLERANCE.get(cmdp.dtype, 1e-2)).all(-1))


def _asked(policy: Callable[[Tensor], Any], cmdp: LayeredCMDP) -> Tensor:
    """The probabilities that a function or a network gives to the actions in every state, `(L x S x A)`."""
    layout = cmdp.layout
    weights = [weight for weight in policy.parameters() if weight.is_floating_point()] if isinstance(policy, nn.Module) else []
    like = weights[0] if weights else cmdp.transitions
    states = torch.eye(layout.total_states, dtype=like.dtype, device=like.device)
    with torch.no_grad():
        answer = policy(states)
    rows = torch.as_tensor(answer) if isinstance(answer, np.ndarray) else answer
    if not isinstance(rows, Tensor) or tuple(rows.shape) != (layout.total_states, layout.actions):
        found = tuple(rows.shape) if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
        raise InvalidInput(
            f"the policy returned {found} for the one-hot states; expected (N x A) = {(len(states), layout.actions)}."
        )
    spread = rows.new_zeros(layout.pair_shape)
    spread[layout.state_mask(rows.device)] = rows[: -layout.widths[-1]]  # all but the terminal state, layer by layer
    return spread


def _check_solved(solution: OptimisticOptimum) -> None:
    if (solution.status == Status.MAX_ITERATIONS).any():
        raise TorchCMDPError("the linear program of a CMDP could not be solved: its numbers are too ill-conditioned.")


def _on_meta(cmdp: LayeredCMDP) -> Optimum:
    """Shapes without values, so that a whole experiment can be traced on the meta device."""
    value = cmdp.rewards.new_zeros(cmdp.batch_shape)
    return Optimum(value, torch.zeros_like(cmdp.transitions), value.bool())
