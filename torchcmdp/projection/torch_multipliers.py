"""The multipliers of the safety constraints in batched torch: their step, and what they prove."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchcmdp.projection.torch_pairs import Problem, cholesky, next_states


def units(costs: Tensor) -> Tensor:
    """The unit each constraint is measured in: its largest cost, rounded to a power of two, `(B x m)`.

    Tolerances and penalties then mean the same whatever unit the costs came in, and a power of two is constant near almost all
    costs: derivatives need not know of it.
    """
    if costs.shape[1] == 0:
        return costs.new_zeros(costs.shape[:2])
    largest = costs.detach().abs().flatten(2).amax(2)
    mantissa, exponent = torch.frexp(torch.where((largest > 0) & (largest < torch.inf), largest, 1.0))
    return torch.ldexp(torch.ones_like(largest), exponent - (mantissa <= math.sqrt(0.5)).to(exponent.dtype))


def masked_solve(matrix: Tensor, free: Tensor, rhs: Tensor, fixed: bool) -> Tensor:
    """matrix[free, free]^-1 rhs on the free entries and zero on the others, for `(m x m x B)`, `(m x B)`."""
    root = torch.where(free, matrix.diagonal().mT.clamp_min(1e-300).rsqrt(), 0.0)
    scaled = matrix * root * root.unsqueeze(1)
    scaled.diagonal().mT.add_(torch.where(free, 1e-14, 1.0))
    factors = cholesky(scaled.movedim(-1, 0), fixed)
    return root * torch.cholesky_solve((root * rhs).mT.unsqueeze(2), factors).squeeze(2).mT


def sweep(matrix: Tensor, linear: Tensor, low: Tensor, room: Tensor, sweeps: int) -> tuple[Tensor, Tensor]:
    """Minimise over each coordinate in turn, from zero, within the set of `quadratic`: `(m x B)`, and what is left of the room."""
    d, spare = torch.zeros_like(linear), room.clone()
    for row, own, slope, least, one in sweeps * list(zip(matrix, matrix.diagonal().mT, linear, low, d, strict=True)):
        slope = (row * d).sum(0).add_(slope)
        spare += one
        torch.clamp(torch.addcdiv(one, slope, own, value=-1), least, spare, out=one)
        spare -= one
    return d, spare


def face_step(matrix: Tensor, slope: Tensor, free: Tensor, full: Tensor, fixed: bool) -> tuple[Tensor, Tensor]:
    """The way to the minimum over the free entries, with a sum of zero where `full`, and the price of the sum there."""
    if not fixed and not bool(full.any()):
        return masked_solve(matrix, free, -slope, fixed), torch.zeros_like(slope[0])
    own = matrix.diagonal().mT
    pivot = torch.where(free, own, torch.inf).argmin(0, keepdim=True)
    has = full & free.any(0)
    at_pivot = has & (torch.arange(len(slope), device=slope.device).unsqueeze(1) == pivot)
    row = torch.where(has, matrix.gather(0, pivot.expand_as(slope).unsqueeze(0)).squeeze(0), 0.0)
    corner = row.gather(0, pivot)
    # restricted to steps in which the pivot takes back what the others add; noise is kept away from zero
    restricted = matrix - row - row.unsqueeze(1) + corner
    kept = restricted.diagonal().mT
    kept.copy_(torch.maximum(kept, 1e-14 * (own + corner)))
    start = torch.where(has, slope.gather(0, pivot), 0.0)
    step = masked_solve(restricted, free & ~at_pivot, start - slope, fixed)
    step = torch.where(at_pivot, -step.sum(0), step)
    return step, torch.where(has, -start.squeeze(0) - (row * step).sum(0), 0.0)


def quadratic(matrix: Tensor, linear: Tensor, low: Tensor, room: Tensor, fixed: bool) -> Tensor:
    """argmin 1/2 d'Md + linear'd over low <= d, sum d <= room, by the active-set method of `kernels.quadratic`: `(m x B)`."""
    m = len(linear)
    d, spare = sweep(matrix, linear, low, room, min(m, 2))
    if m < 2:
        return d
    free, full = d > low, spare <= 1e-15 * room
    noise = 1e-13 * linear.abs().amax(0)
    slope = (matrix * d).sum(1) + linear
    step, mu = face_step(matrix, slope, free, full, fixed)
    if not fixed:
        # nearly always nothing is in the way of the first step and nothing is left to do after it
        moved = torch.maximum(d + step, low)
        price = (matrix * moved).sum(1).add_(linear).neg_()
        stopped = (step < low - d) | (~free & (price - mu > noise))
        more = stopped.any(0) | torch.where(full, -mu > noise, spare < step.sum(0))
        if not bool(more.any()):
            return moved
    index = torch.arange(m, device=d.device).unsqueeze(1)
    done = torch.zeros_like(full)  # so that what an instance's neighbours still need does not touch it
    for iteration in range(8 * m if fixed else 50 + 10 * m):
        if iteration:
            step, mu = face_step(matrix, slope, free, full, fixed)
        scale, blocking = torch.where(free & (step < 0), (low - d) / step, torch.inf).min(0)
        grown = step.sum(0)
        rise = torch.where(~full & (grown > 0), (room - d.sum(0)).clamp_min(0) / grown, torch.inf)
        filled = (rise < 1) & (rise < scale)
        hit = (scale < 1) & ~filled & (index == blocking)
        moved = torch.maximum(d + torch.minimum(scale, rise).clamp_max(1) * step, low)
        d = torch.where(done, d, torch.where(hit, low, moved))
        free, full = free & ~hit, full | filled
        blocked = filled | hit.any(0)
        slope = (matrix * d).sum(1) + linear
        worst, release = torch.where(free, 0.0, -slope - mu).max(0)
        loosen = ~blocked & full & (-mu > torch.maximum(worst, noise))
        open_up = ~blocked & ~loosen & (worst > noise)
        full, free = full & ~loosen, free | (open_up & (index == release))
        done = done | ~(blocked | loosen | open_up)
        if not fixed and bool(done.all()):
            break
    return d


def least_violation(problem: Problem, lam: Tensor) -> Tensor:
    """A lower bound on the largest violation of any occupancy (see `kernels.emptiness.least_violation`): `(B)`, of `(m x B)`."""
    weights = lam / lam.sum(0).clamp_min(1e-300)
    penalty = (weights * problem.costs).sum(3)
    layout = problem.layout
    pairs, states = (mask.unsqueeze(-1) for mask in (layout.pair_mask(lam.device), layout.state_mask(lam.device)))
    value = penalty.new_zeros(layout.layers + 1, layout.width, lam.shape[1])
    for k in range(layout.layers - 1, -1, -1):
        ends = problem.lower[:, k], problem.upper[:, k]
        after = value[k + 1][:, None, None] if layout.lists is None else value.flatten(0, 1)[next_states(layout, lam.device)[:, k]]
        ascending, order = after.expand_as(ends[0]).sort(0)
        low, high = (end.gather(0, order) for end in ends)
        span = high - low
        share = torch.minimum((1 - low.sum(0) - (span.cumsum(0) - span)).clamp_min(0), span)
        total = penalty[k] + ((low + share) * ascending).sum(0)
        value[k] = torch.where(states[k], torch.where(pairs[k], total, torch.inf).amin(1), 0.0)
    return value[0, 0]
