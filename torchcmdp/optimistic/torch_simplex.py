"""The same column generation as in `kernels.program`, for a whole batch at once in torch: for other devices than the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcmdp.kernels.limits import FEASIBILITY, HAIR, IMPROVEMENT, RELAXATION, ROUNDING, SMALLEST_PIVOT
from torchcmdp.layout import Layout
from torchcmdp.occupancy import closed_pairs
from torchcmdp.optimistic.problem import program_faults
from torchcmdp.status import INFEASIBLE, INVALID, MAX_ITERATIONS


@dataclass
class _Simplex:
    """A basis of every instance: what its columns are, and how far the instance has come.

    Attributes:
        basis: `(batch x n x n)` with n = m + 1.
        columns: The occupancies behind its columns, zero for slacks, `(batch x n x L x S x A x K)`.
        occupied, common: Which columns are occupancies, and which is the common violation, `(batch x n)` bool.
        gain: The columns' rewards, `(batch x n)`.
        limits: Right-hand side, `(batch x n)`.
        first_phase, done, infeasible: `(batch,)` bool.
        excess, iterations: `(batch,)`.
    """

    basis: Tensor
    columns: Tensor
    occupied: Tensor
    common: Tensor
    gain: Tensor
    limits: Tensor
    first_phase: Tensor
    done: Tensor
    infeasible: Tensor
    excess: Tensor
    iterations: Tensor


def solve(program: Sequence[Tensor], layout: Layout, max_iterations: int, fixed_iterations: int | None = None) -> list[Tensor]:
    """The fields of an `OptimisticOptimum` with one batch axis, for rewards, lower and upper ends and costs with one."""
    wrong = [where for _, where, _ in program_faults(layout, *program)]
    invalid = torch.stack(wrong).any(0).flatten(1).any(-1)
    state = _start(layout, invalid, *program)
    # the last evaluation only reads off the answer
    for _ in range(max_iterations if fixed_iterations is None else fixed_iterations):
        if fixed_iterations is None and bool(state.done.all()):
            break
        _pivot(state, layout, *program)
    point, duals, promise = _evaluate(state, layout, *program)[:3]
    weights = torch.where(state.occupied, point.clamp_min(0), 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    occupancy = torch.einsum("bn,bn...->b...", weights, state.columns)
    status = torch.where(state.done, torch.where(state.infeasible, INFEASIBLE, 0), MAX_ITERATIONS)
    status = torch.where(invalid, INVALID, status).to(torch.int8)
    value, multipliers = (weights * state.gain).sum(-1), duals[:, :-1].clamp_min(0)
    return [value, occupancy, multipliers, state.excess, status, promise.clamp_min(0), state.iterations]


def best_occupancy(pair_reward: Tensor, lower: Tensor, upper: Tensor, layout: Layout) -> Tensor:
    """The occupancy of the plausible kernel and deterministic policy with the largest total reward; ties go to the lowest action.

    Args:
        pair_reward: `(batch x L x S x A)`.
        lower, upper: `(batch x L x S x A x K)`.

    Returns:
        `(batch x L x S x A x K)`.
    """
    batch, layers, states, actions = pair_reward.shape
    values = pair_reward.new_zeros(batch, states)
    closed, chosen = closed_pairs(layout, values.device), []
    for k in reversed(range(layers)):
        low, room = lower[:, k], upper[:, k] - lower[:, k]
        ahead = layout.ahead(values, k)
        order = ahead.argsort(dim=-1, descending=True, stable=True).expand_as(room)
        sorted_room = room.gather(-1, order)
        before = sorted_room.cumsum(-1) - sorted_room
        take = torch.minimum((1 - low.sum(-1, keepdim=True) - before).clamp_min(0), sorted_room)
        row = low + torch.zeros_like(room).scatter(-1, order, take)
        total = (pair_reward[:, k] + (row * ahead).sum(-1)).masked_fill(closed[k], -torch.inf)
        best = torch.nn.functional.one_hot(total.argmax(-1), actions).to(total.dtype)
        values = total.amax(-1)
        chosen.append(best.unsqueeze(-1) * row)
    reach = torch.nn.functional.one_hot(torch.zeros(batch, dtype=torch.int64, device=lower.device), states).to(pair_reward.dtype)
    occupancy = []
    for k, kernel in enumerate(reversed(chosen)):
        occupancy.append(reach[:, :, None, None] * kernel)
        reach = layout.arrivals(occupancy[-1], k)
    return torch.stack(occupancy, dim=1)


def _start(layout: Layout, invalid: Tensor, rewards: Tensor, lower: Tensor, upper: Tensor, costs: Tensor) -> _Simplex:
    """The slacks and the best occupancy of all; where that is unsafe, the common violation in place of the worst slack."""
    batch, m = costs.shape[:2]
    column = best_occupancy(rewards, lower, upper, layout)
    violation = _totals(costs, column)
    basis = torch.eye(m + 1, dtype=rewards.dtype, device=rewards.device).repeat(batch, 1, 1)
    basis[:, :m, m] = violation
    unsafe = (violation > 0).any(-1) & ~invalid
    common = torch.zeros(batch, m + 1, dtype=torch.bool, device=rewards.device)
    if m:
        common[:, :m] = torch.nn.functional.one_hot(violation.argmax(-1), m).bool() & unsafe[:, None]
    shared = torch.where(torch.arange(m + 1, device=rewards.device) < m, -1.0, 0.0).to(rewards.dtype)
    basis = torch.where(common[:, None, :], shared[:, None], basis)
    last = torch.nn.functional.one_hot(torch.full((batch,), m, device=rewards.device), m + 1).to(rewards.dtype)
    return _Simplex(
        basis=basis,
        columns=last[:, :, None, None, None, None] * column.unsqueeze(1),
        occupied=last > 0,
        common=common,
        gain=last * _totals(rewards.unsqueeze(1), column),
        limits=last,
        first_phase=unsafe,
        done=~unsafe,
        infeasible=torch.zeros_like(unsafe),
        excess=rewards.new_zeros(batch),
        iterations=torch.ones(batch, dtype=torch.int64, device=rewards.device),
    )


def _totals(values: Tensor, occupancy: Tensor) -> Tensor:
    """<values_i, q>: `(batch x m x L x S x A)` with `(batch x L x S x A x K)` gives `(batch x m)`."""
    return (values * occupancy.sum(-1).unsqueeze(1)).flatten(2).sum(-1)


def _evaluate(state: _Simplex, layout: Layout, rewards: Tensor, lower: Tensor, upper: Tensor, costs: Tensor) -> tuple[Tensor, ...]:
    """Basic variables, duals, what the best new column promises, that column, and the inverse basis."""
    inverse = torch.linalg.inv_ex(state.basis).inverse
    point = (inverse @ state.limits.unsqueeze(-1)).squeeze(-1)
    worth = torch.where(state.first_phase[:, None], -state.common.to(rewards.dtype), state.gain)
    duals = (worth.unsqueeze(1) @ inverse).squeeze(1)
    base = torch.where(state.first_phase[:, None, None, None], 0.0, rewards)
    pair_reward = base - torch.einsum("bi,bi...->b...", duals[:, :-1], costs)
    column = best_occupancy(pair_reward, lower, upper, layout)
    promise = _totals(pair_reward.unsqueeze(1), column).squeeze(1) - duals[:, -1]
    return point, duals, promise, column, inverse


def _pivot(state: _Simplex, layout: Layout, rewards: Tensor, lower: Tensor, upper: Tensor, costs: Tensor) -> None:
    """One step of every instance that is not done: a pivot, or the end of a phase."""
    m = costs.shape[1]
    if m == 0:
        return
    point, duals, promise, column, inverse = _evaluate(state, layout, rewards, lower, upper, costs)
    tolerance = IMPROVEMENT + ROUNDING * duals[:, :m].abs().amax(-1)
    least, slack = duals[:, :m].min(-1)
    by_slack = -least > torch.maximum(promise, tolerance)
    optimal = (promise <= tolerance) & ~by_slack
    active = ~state.done
    ends = active & optimal & state.first_phase
    state.done = state.done | (optimal & ~state.first_phase)
    moves = active & ~optimal
    slack_column = torch.nn.functional.one_hot(slack, m + 1).to(rewards.dtype)
    own = torch.cat([_totals(costs, column), torch.ones_like(promise).unsqueeze(1)], dim=1)
    entering = torch.where(by_slack[:, None], slack_column, own)
    direction = (inverse @ entering.unsqueeze(-1)).squeeze(-1)
    leaving = _leaving(point, direction, state.common) & moves[:, None]
    new_gain = torch.where(by_slack, 0.0, _totals(rewards.unsqueeze(1), column).squeeze(1))
    _end_first_phase(state, point, ends)
    state.basis = torch.where(leaving[:, None, :], entering.unsqueeze(-1), state.basis)
    state.gain = torch.where(leaving, new_gain[:, None], state.gain)
    state.occupied = torch.where(leaving, ~by_slack[:, None], state.occupied)
    state.common = state.common & ~leaving
    state.columns = torch.where(leaving[:, :, None, None, None, None], column.unsqueeze(1), state.columns)
    state.first_phase = state.first_phase & state.common.any(-1)
    state.iterations = state.iterations + active


def _leaving(point: Tensor, direction: Tensor, common: Tensor) -> Tensor:
    """The column that leaves, one-hot `(batch x n)`: among those that block the step, the common violation or the largest pivot."""
    falls = direction > SMALLEST_PIVOT
    ratio = (point.clamp_min(0) + HAIR) / direction
    longest = torch.where(falls, ratio, torch.inf).amin(-1, keepdim=True)
    blocks = falls & (point.clamp_min(0) <= longest * direction)
    rank = torch.where(common, torch.inf, direction)
    best = torch.where(blocks, rank, -torch.inf).argmax(-1)
    return torch.nn.functional.one_hot(best, point.shape[-1]).bool() & blocks


def _end_first_phase(state: _Simplex, point: Tensor, ends: Tensor) -> None:
    """Fix the violation that cannot be avoided: its column turns into a slack that all constraints share."""
    m = point.shape[-1] - 1
    excess = torch.where(state.common, point, 0.0).sum(-1).clamp_min(0)
    infeasible = ends & (excess > FEASIBILITY)
    state.infeasible = state.infeasible | infeasible
    state.excess = torch.where(infeasible, excess, state.excess)
    limit = torch.where(infeasible, excess + RELAXATION, excess)
    rows = torch.arange(m + 1, device=point.device) < m
    state.limits = torch.where(ends[:, None] & rows, limit[:, None], state.limits)
    turned = (ends[:, None] & state.common)[:, None, :] & rows[:, None]
    state.basis = torch.where(turned, 1.0, state.basis)
    state.common = state.common & ~ends[:, None]
