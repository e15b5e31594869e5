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
from torchcmdp.layout import Layout, broadcast_shapes
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
    the whole batch at once. Rewards, `(... x L x S x A)`, and costs, `(... x m x L x S x A)`, stand in for the CMDP's own.
    """
    rewards, costs = _batched(cmdp, "rewards", rewards), _batched(cmdp, "costs", costs)
    layout = cmdp.layout
    if cmdp.device.type == "meta":  # shapes without values, so that a whole experiment can be traced there
        value = cmdp.rewards.new_zeros(cmdp.batch_shape)
        return Optimum(value, torch.zeros_like(cmdp.transitions), value.bool())
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

    Rewards, `(... x L x S x A)`, stand in for the CMDP's own.
    """
    rewards = _batched(cmdp, "rewards", rewards)
    if rewards.device.type != "meta" and not rewards.isfinite().all():
        raise InvalidInput("rewards has a NaN or an infinity; all of them must be finite.")
    ended = rewards.new_zeros(*cmdp.batch_shape, cmdp.layout.width)
    value, policy = _backward(cmdp, ended, lambda ahead, k: rewards[..., k, :, :] + _expected(cmdp, ahead, k))
    feasible = torch.ones(cmdp.batch_shape, dtype=torch.bool, device=cmdp.device)
    return Optimum(value, occupancy_of(policy, cmdp.transitions, cmdp.layout), feasible)


def slater_gap(cmdp: LayeredCMDP, costs: Tensor | None = None) -> Tensor:
    """max_q min_i -<g_i, q>: positive if some policy is strictly safe, negative if none is safe; +inf without constraints, `(...)`.

    Costs, `(... x m x L x S x A)`, stand in for the CMDP's own.
    """
    costs = _batched(cmdp, "costs", costs)
    if costs.shape[-4] == 0 or cmdp.device.type == "meta":
        return torch.full(cmdp.batch_shape, torch.inf, dtype=cmdp.dtype, device=cmdp.device)
    margin, optimum = largest_margin(SafeSet(cmdp.layout, cmdp.transitions, cmdp.transitions, costs))
    _check_solved(optimum)
    return margin


def least_totals(values: Tensor, transitions: Tensor, layout: Layout) -> Tensor:
    """The least that values of pairs, `(... x m x L x S x A)`, can sum to over an episode in expectation: `(... x m)` float64.

    Each table alone, by backward induction under the transitions P(y|x,a), `(... x L x S x A x K)`.
    """
    values, transitions = values.double(), transitions.double().unsqueeze(-5)
    pairs, states = layout.pair_mask(values.device), layout.state_mask(values.device)
    least = values.new_zeros(*broadcast_shapes(values.shape[:-3], transitions.shape[:-4]), layout.width)
    for k in reversed(range(layout.layers)):
        ahead = (transitions[..., k, :, :, :] * layout.ahead(least, k)).sum(-1)
        least = torch.where(pairs[k], values[..., k, :, :] + ahead, torch.inf).amin(-1)
        least = torch.where(states[k], least, 0.0)
    return least[..., 0]


def refuse_unkept(
    least: Tensor, limits: Tensor, scales: Tensor, signs: Tensor, layers: int, margin: Callable[[], Tensor] | None = None
) -> None:
    """Refuse budgets that no policy keeps, alone or together; all of them as costs, of which a utility is the negative.

    Args:
        least: What the costs of an episode sum to at least, each alone, `(... x m)`.
        limits: What they may sum to, `(... x m)`.
        scales: In what units rounding is measured, `(... x m)`.
        signs: One for a cost, minus one for a utility, `(m,)`.
        layers: L.
        margin: Says by how much all can be kept together in normal form, `(...)`; None where nobody knows.
    """
    least, limits, scales = (each[None].flatten(0, -2) for each in torch.broadcast_tensors(least, limits, scales))
    wrong = least - limits > BUDGET_TOLERANCE * layers * scales
    if wrong.any():
        j, i = wrong.nonzero()[0].tolist()
        words, reached = "costs at least" if signs[i] > 0 else "gets at most", (signs * least)[j, i].round(decimals=12).item()
        raise InvalidInput(
            f"budget is {(signs * limits)[j, i].item():g} for constraint {i}, which no policy keeps: every one {words} "
            f"{reached:z.6g}."
        )
    if margin is not None and len(signs) > 1 and (margin() < -JOINT_TOLERANCE * layers).any():
        budget = brief((signs * limits)[0].tolist())
        raise InvalidInput(f"budget is {budget}; no policy keeps all {len(signs)} of the constraints at once.")


def rho(cmdp: LayeredCMDP, worst_costs: Tensor | None = None) -> Tensor:
    """By how much the safest policy keeps every cost below zero in every pair it may visit: `(...)`.

    rho = max_q min over pairs with q(x,a) > 0 and constraints i of -g_i(x,a), by a bottleneck recursion over the layers: negative
    if every policy may meet a positive cost, +inf without constraints. A successor is possible where its probability is not zero.

    Args:
        cmdp: One CMDP or a batch; only its transitions count.
        worst_costs: The largest cost of every pair over all episodes, `(... x m x L x S x A)`, its batch shape broadcast with the
            CMDP's; by default the CMDP's own costs.
    """
    return _bottleneck(cmdp, worst_costs)[0]


def safest_policy(cmdp: LayeredCMDP, worst_costs: Tensor | None = None) -> Tensor:
    """A deterministic policy that attains `rho`, `(... x L x S x A)`; ties go to the lowest action."""
    return _bottleneck(cmdp, worst_costs)[1]


def alpha_of(rho: Tensor) -> Tensor:
    """rho^+ / (1 + rho^+), the share of the best reward that can be promised against adversarial costs; one where rho is +inf."""
    check_tensor("rho", rho)
    room = rho.clamp_min(0)
    return torch.where(room.isinf(), torch.ones_like(room), room / (1 + room))


def _bottleneck(cmdp: LayeredCMDP, costs: Tensor | None) -> tuple[Tensor, Tensor]:
    """W(x_0) = rho `(...)`, by W(x) = max_a min(s(x,a), min over possible successors y of W(y)), and the policy of its maxima."""
    costs, layout = _table(cmdp, "costs", costs), cmdp.layout
    try:
        batch = broadcast_shapes(cmdp.batch_shape, costs.shape[:-4])
    except RuntimeError:
        raise InvalidInput(
            f"costs has batch shape {tuple(costs.shape[:-4])}; it must broadcast with the CMDP's {tuple(cmdp.batch_shape)}."
        ) from None
    # without constraints every pair has infinite room
    room = 0 - costs.amax(-4) if costs.shape[-4] else costs.new_full((*costs.shape[:-4], *layout.pair_shape), torch.inf)

    def pairs(value: Tensor, k: int) -> Tensor:
        ahead = torch.where(cmdp.transitions[..., k, :, :, :] > 0, layout.ahead(value, k), torch.inf).amin(-1)
        return torch.minimum(room[..., k, :, :], ahead)

    return _backward(cmdp, room.new_full((*batch, layout.width), torch.inf), pairs)


def _expected(cmdp: LayeredCMDP, value: Tensor, k: int) -> Tensor:
    """sum_y P(y|x,a) value(y) of the pairs of layer k, `(... x S x A)`."""
    transitions = cmdp.transitions[..., k, :, :, :]
    if cmdp.layout.lists is None:
        return (transitions @ value[..., None, :, None]).squeeze(-1)
    return (transitions * cmdp.layout.ahead(value, k)).sum(-1)


def _backward(cmdp: LayeredCMDP, value: Tensor, pairs: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, Tensor]:
    """What is best from x_0 on, `(...)`, and the deterministic policy that attains it; ties go to the lowest action.

    `value` is of the states after the last layer, and `pairs` leads from the states of a next layer to the pairs before them.
    """
    layout, choices = cmdp.layout, []
    closed = closed_pairs(layout, cmdp.device)
    for k in reversed(range(layout.layers)):
        value, best = pairs(value, k).masked_fill(closed[k], -torch.inf).max(-1)
        choices.append(best)
    taken = torch.stack(choices[::-1], dim=-2).unsqueeze(-1) == torch.arange(layout.actions, device=cmdp.device)
    return value[..., 0], (taken & layout.pair_mask(cmdp.device)).to(cmdp.dtype)


def check_cmdp(cmdp: object) -> None:
    """Refuse what is no CMDP."""
    check_kind("cmdp", cmdp, LayeredCMDP, "a LayeredCMDP, such as random_cmdp() gives")


def _table(cmdp: LayeredCMDP, name: str, given: Tensor | None) -> Tensor:
    """The "rewards" or the "costs" of the CMDP, or what is given in their place, of any batch shape."""
    check_cmdp(cmdp)
    if given is None:
        return cmdp.costs if name == "costs" else cmdp.rewards
    cmdp.layout.check_shape(name, given, kind="constraint" if name == "costs" else "pair")
    return _placed(cmdp, name, given)


def _batched(cmdp: LayeredCMDP, name: str, given: Tensor | None) -> Tensor:
    """The same in the CMDP's batch shape."""
    table, axes = _table(cmdp, name, given), 4 if name == "costs" else 3
    batch, own = tuple(cmdp.batch_shape), table.shape[-axes:]
    try:
        return table.expand(*batch, *own)
    except RuntimeError:
        found = tuple(table.shape[:-axes])
        raise InvalidInput(f"{name} has batch shape {found}; it must broadcast to the CMDP's {batch}.") from None


def _placed(cmdp: LayeredCMDP, name: str, tensor: Tensor) -> Tensor:
    """The tensor where the CMDP is; one without values cannot go there."""
    if tensor.device.type == "meta" != cmdp.device.type:
        raise InvalidInput(f"{name} is {brief(tensor)} without values, on the meta device; the CMDP is on {cmdp.device}.")
    return tensor.to(cmdp.transitions)


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
