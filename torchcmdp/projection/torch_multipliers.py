"""The multipliers of the safety constraints in batched torch: their step, and what they prove."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchcmdp.projection.torch_pairs import Problem


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


def masked_solve(matrix: Tensor, free: Tensor, rhs: Tensor) -> Tensor:
    """matrix[free, free]^-1 rhs on the free entries and zero on the others, for `(B x m x m)`, `(B x m)`."""
    root = torch.where(free, matrix.diagonal(dim1=-2, dim2=-1).clamp_min(1e-300).rsqrt(), 0.0)
    scaled = matrix * root.unsqueeze(-1) * root.unsqueeze(-2)
    scaled = scaled + torch.diag_embed(torch.where(free, 1e-14, 1.0).to(matrix.dtype))
    cholesky, failed = torch.linalg.cholesky_ex(scaled)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    cholesky = torch.where((failed > 0)[:, None, None], identity, cholesky)
    return root * torch.cholesky_solve((root * rhs).unsqueeze(-1), cholesky).squeeze(-1)


def sweep(matrix: Tensor, linear: Tensor, low: Tensor, room: Tensor, d: Tensor) -> Tensor:
    """d, minimised over each coordinate in turn within the set of `quadratic`."""
    index = torch.arange(d.shape[-1], device=d.device)
    for i in range(d.shape[-1]):
        slope = (matrix[:, i] * d).sum(-1) + linear[:, i]
        most = d[:, i] + (room - d.sum(-1)).clamp_min(0)
        moved = torch.minimum(torch.maximum(d[:, i] - slope / matrix[:, i, i], low[:, i]), most)
        d = torch.where(index == i, moved.unsqueeze(-1), d)
    return d


def face_step(matrix: Tensor, slope: Tensor, free: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """The way to the minimum over the free entries, with a sum of zero where `full`, and the price of the sum there."""
    own = matrix.diagonal(dim1=-2, dim2=-1)
    pivot = torch.where(free, own, torch.inf).argmin(-1, keepdim=True)
    has = full.unsqueeze(-1) & free.any(-1, keepdim=True)
    at_pivot = has & (torch.arange(slope.shape[-1], device=slope.device) == pivot)
    row = torch.where(has, matrix.gather(1, pivot.unsqueeze(-1).expand(-1, -1, slope.shape[-1])).squeeze(1), 0.0)
    corner = row.gather(1, pivot)
    # restricted to steps in which the pivot takes back what the others add; noise is kept away from zero
    restricted = matrix - row.unsqueeze(1) - row.unsqueeze(2) + corner.unsqueeze(-1)
    noise = (1e-14 * (own + corner) - restricted.diagonal(dim1=-2, dim2=-1)).clamp_min(0)
    start = torch.where(has, slope.gather(1, pivot), 0.0)
    step = masked_solve(restricted + torch.diag_embed(noise), free & ~at_pivot, start - slope)
    step = torch.where(at_pivot, -step.sum(-1, keepdim=True), step)
    return step, torch.where(has.squeeze(-1), -start.squeeze(-1) - (row * step).sum(-1), 0.0)


def quadratic(matrix: Tensor, linear: Tensor, low: Tensor, room: Tensor, fixed: bool) -> Tensor:
    """argmin 1/2 d'Md + linear'd over low <= d, sum d <= room, by the active-set method of `kernels.quadratic`: `(B x m)`."""
    m = linear.shape[-1]
    d = torch.zeros_like(linear)
    if m == 0:
        return d
    for _ in range(1 if m == 1 else 2):
        d = sweep(matrix, linear, low, room, d)
    if m == 1:
        return d
    index = torch.arange(m, device=d.device)
    free, full = d > low, room - d.sum(-1) <= 1e-15 * room
    noise = 1e-13 * linear.abs().amax(-1)
    done = torch.zeros_like(full)  # so that what an instance's neighbours still need does not touch it
    for _ in range(8 * m if fixed else 50 + 10 * m):
        slope = (matrix @ d.unsqueeze(-1)).squeeze(-1) + linear
        step, mu = face_step(matrix, slope, free, full)
        reach = torch.where(free & (step < 0), (low - d) / torch.where(step < 0, step, -1.0), torch.inf)
        scale, blocking = reach.min(-1)
        grown = step.sum(-1)
        rise = torch.where(~full & (grown > 0), (room - d.sum(-1)).clamp_min(0) / torch.where(grown > 0, grown, 1.0), torch.inf)
        filled = (rise < 1) & (rise < scale)
        hit = ((scale < 1) & ~filled).unsqueeze(-1) & (index == blocking.unsqueeze(-1))
        moved = torch.maximum(d + torch.minimum(torch.minimum(scale, rise), torch.ones_like(rise)).unsqueeze(-1) * step, low)
        d = torch.where(done.unsqueeze(-1), d, torch.where(hit, low, moved))
        free, full = free & ~hit, full | filled
        blocked = filled | hit.any(-1)
        slope = (matrix @ d.unsqueeze(-1)).squeeze(-1) + linear
        worst, release = torch.where(free, 0.0, -slope - mu.unsqueeze(-1)).max(-1)
        loosen = ~blocked & full & (-mu > torch.maximum(worst, noise))
        open_up = ~blocked & ~loosen & (worst > noise)
        full, free = full & ~loosen, free | (open_up.unsqueeze(-1) & (index == release.unsqueeze(-1)))
        done = done | ~(blocked | loosen | open_up)
        if not fixed and bool(done.all()):
            break
    return d


def least_violation(problem: Problem, lam: Tensor) -> Tensor:
    """A lower bound on the largest violation of any occupancy (see `kernels.emptiness.least_violation`): `(B)`."""
    weights = lam / lam.sum(-1, keepdim=True).clamp_min(1e-300)
    penalty = (weights[:, :, None, None, None] * problem.costs).sum(1)
    layout = problem.layout
    real, pairs, states = layout.transition_mask(lam.device), layout.pair_mask(lam.device), layout.state_mask(lam.device)
    value = torch.zeros_like(penalty[:, 0, :, 0])
    for k in range(layout.layers - 1, -1, -1):
        lower, upper = (torch.where(real[k], tensor[:, k], 0.0) for tensor in (problem.lower, problem.upper))
        ahead = layout.ahead(value, k)
        order = ahead.argsort(-1).expand_as(lower)
        ascending = ahead.expand_as(lower).gather(-1, order)
        low, span = lower.gather(-1, order), (upper - lower).gather(-1, order)
        left = 1 - low.sum(-1, keepdim=True)
        share = torch.minimum((left - (span.cumsum(-1) - span)).clamp_min(0), span)
        total = torch.where(pairs[k], penalty[:, k] + ((low + share) * ascending).sum(-1), torch.inf)
        value = torch.where(states[k], total.amin(-1), 0.0)
    return value[:, 0]
