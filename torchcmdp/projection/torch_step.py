"""A step of the Newton solver in batched torch: what is left to do, which way to go, and the last steps of huge potentials."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcmdp.kernels.limits import HARDLY_ANY, LONGEST_MOVE, MOST_POLISHED, POLISHED, UNIT_ROUNDING
from torchcmdp.projection.torch_multipliers import quadratic
from torchcmdp.projection.torch_pairs import Problem, Response, ahead, answered, arrivals, factor


def is_full(lam: Tensor, cap: Tensor) -> Tensor:
    """Whether the multipliers use up the cap: `(B)`."""
    return lam.sum(0) >= cap * (1 - 1e-12)


def residuals(problem: Problem, response: Response, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The residuals of `kernels.newton.kkt_residual`, `(B)` each: of flow, of flow relative to a state's own, and of safety."""
    gap = (response.inflow - response.outflow).abs()
    through = response.inflow + response.outflow
    relative = torch.where(response.inflow > 1e-250, gap / through, 0.0).amax((0, 1))
    flow = gap.amax((0, 1))
    if len(lam) == 0:
        return flow, relative, torch.zeros_like(flow)
    # at the cap, the constraints with a multiplier share the largest violation
    level = torch.where(is_full(lam, problem.cap), (lam * response.used).sum(0) / problem.cap, 0.0)
    excess = response.used - level
    residual = torch.where(lam > 0, excess.abs(), excess).amax(0)
    return flow, relative, torch.maximum(residual, -level).clamp_min(0)


def rounding(response: Response, lam: Tensor) -> Tensor:
    """What rounding leaves open of the exponents of a pair's occupancy (see `kernels.newton.rounding`): `(B)`."""
    return UNIT_ROUNDING * (response.v.abs().amax((0, 1)) + lam.sum(0))


def direction(problem: Problem, response: Response, lam: Tensor, fixed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The Newton step within {multipliers >= 0, sum <= cap}, `(L x S x B)` and `(m x B)`, and the dual's slope along it, `(B)`."""
    cholesky, scale = factor(problem.layout, response, fixed)
    weighted = problem.costs * response.s.unsqueeze(3)
    border = weighted.sum(2) - arrivals(problem.layout, weighted[:-1] * response.p[:, :-1].unsqueeze(4))
    corner = (weighted.unsqueeze(3) * problem.costs.unsqueeze(4)).sum((0, 1, 2))
    grad = response.inflow - response.outflow
    columns = torch.cat([-grad.unsqueeze(2), border], 2).flatten(0, 1).movedim(-1, 0)
    half = torch.linalg.solve_triangular(cholesky, scale.unsqueeze(2) * columns, upper=False)
    gram = (half.mT @ half).movedim(0, -1)
    schur = corner - gram[1:, 1:]
    own = schur.diagonal()
    own.add_(1e-13 * corner.diagonal() + 1e-250 - own.clamp_max(0))
    room = (problem.cap - lam.sum(0)).clamp_min(0)
    dlam = quadratic(schur, gram[1:, 0] - response.used, -lam, room, fixed)
    left = torch.baddbmm(half[..., :1], half[..., 1:], dlam.mT.unsqueeze(2), alpha=-1)
    dv = scale * torch.linalg.solve_triangular(cholesky.mT, left, upper=True).squeeze(2)
    dv = dv.mT.unflatten(0, response.v.shape[:2])
    hardly = response.inflow + response.outflow < HARDLY_ANY
    dv = torch.where(hardly, dv.clamp(-LONGEST_MOVE, LONGEST_MOVE), dv)
    return dv, dlam, (grad * dv).sum((0, 1)) - (response.used * dlam).sum(0)


def polished(problem: Problem, response: Response, lam: Tensor) -> tuple[Response, Tensor]:
    """The response and lam without what rounding of huge duals has left in them (see `kernels.newton.polish`)."""
    for _ in range(MOST_POLISHED):
        flow, _, safety = residuals(problem, response, lam)
        dv, dlam, _ = direction(problem, response, lam, False)
        new, small = follow(problem, response, dv, dlam)
        small = small & (torch.maximum(flow, safety) > POLISHED)
        if not bool(small.any()):
            break
        response, lam = new.where(small, response), torch.where(small, (lam + dlam).clamp_min(0), lam)
    return response, lam


def follow(problem: Problem, response: Response, dv: Tensor, dlam: Tensor) -> tuple[Response, Tensor]:
    """Take a step in p and s themselves, keeping the bounds that are met; and if it was small and crossed no other one."""
    after = ahead(problem.layout, dv).expand_as(response.p)
    held = response.side != 0
    moving = ~held & (response.p > 0)
    free = torch.where(moving, response.p, 0.0).sum(0)
    top = torch.where(free > 0, torch.where(moving, after, -torch.inf).amax(0), 0.0)
    growth = torch.where(moving, after - top, 0.0).exp()
    grown = torch.where(moving, response.p * growth, 0.0).sum(0)
    rise = top + torch.where(free > 0, grown / free, 1.0).log()
    change = free * rise + torch.where(held, response.p * after, 0.0).sum(0) - dv.unsqueeze(2)
    change = torch.where(response.s > 0, change - (dlam * problem.costs).sum(3), 0.0)
    p = torch.where(moving, response.p * (growth * (top - rise).exp()), response.p)
    s = response.s * change.exp()
    s = s / s.sum((1, 2), keepdim=True)
    inside = (p >= problem.lower - POLISHED) & (p <= problem.upper + POLISHED) | ~moving
    small = inside.flatten(0, 3).all(0) & (change <= 1).flatten(0, 2).all(0)
    return answered(problem, response.v + dv, p, response.side, s), small
