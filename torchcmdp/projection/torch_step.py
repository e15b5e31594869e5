"""A step of the Newton solver in batched torch: what is left to do, which way to go, and the last steps of huge potentials."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcmdp.kernels.limits import HARDLY_ANY, LONGEST_MOVE, MOST_POLISHED, POLISHED, UNIT_ROUNDING
from torchcmdp.projection.torch_multipliers import quadratic
from torchcmdp.projection.torch_pairs import Problem, Response, evaluate, factor, flows, hessian, next_potentials


def is_full(lam: Tensor, cap: Tensor) -> Tensor:
    """Whether the multipliers use up the cap: `(B)`."""
    return lam.sum(-1) >= cap.squeeze(-1) * (1 - 1e-12)


def residuals(problem: Problem, response: Response, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest flow residual, the same relative to a state's flow, and the safety residual: `(B)` each."""
    inflow, outflow = flows(problem.layout, response)
    gap = (inflow - outflow).abs()
    through = inflow + outflow
    relative = torch.where(through > 1e-250, gap / through.clamp_min(1e-250), 0.0).flatten(1).amax(1)
    flow = gap.flatten(1).amax(1)
    if lam.shape[1] == 0:
        return flow, relative, torch.zeros_like(flow)
    used = (problem.costs * response.s.unsqueeze(1)).sum(dim=(2, 3, 4))
    # at the cap, the constraints with a multiplier share the largest violation
    level = torch.where(is_full(lam, problem.cap), (lam * used).sum(1) / problem.cap.squeeze(-1), 0.0).unsqueeze(-1)
    residual = torch.where(lam > 0, (used - level).abs(), (used - level).clamp_min(0))
    return flow, relative, torch.maximum(residual.amax(1), -level.squeeze(-1))


def rounding(response: Response, lam: Tensor) -> Tensor:
    """What rounding leaves open of the exponents of a pair's occupancy (see `kernels.newton.rounding`): `(B)`."""
    return UNIT_ROUNDING * (response.v.abs().flatten(1).amax(1) + lam.sum(1))


def slack(response: Response, lam: Tensor) -> Tensor:
    """What a dual value may rise by without meaning it: it cannot resolve the last steps: `(B)`."""
    return 1e-12 * (1 + response.value.abs()) + rounding(response, lam)


def direction(problem: Problem, response: Response, lam: Tensor, fixed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The Newton step within {multipliers >= 0, sum <= cap}, `(B x L x S)` and `(B x m)`, and the dual's slope along it, `(B)`."""
    inflow, outflow = flows(problem.layout, response)
    grad_v = (inflow - outflow).flatten(1)
    grad_m = -(problem.costs * response.s.unsqueeze(1)).sum(dim=(2, 3, 4))
    cholesky, scale, border, schur = factor(*hessian(problem, response))
    half = torch.linalg.solve_triangular(cholesky, -(scale * grad_v).unsqueeze(-1), upper=False)
    room = (problem.cap.squeeze(-1) - lam.sum(-1)).clamp_min(0)
    dlam = quadratic(schur, grad_m + (border.mT @ half).squeeze(-1), -lam, room, fixed)
    dv = scale * torch.linalg.solve_triangular(cholesky.mT, half - border @ dlam.unsqueeze(-1), upper=True).squeeze(-1)
    cut = dv.clamp(-LONGEST_MOVE, LONGEST_MOVE)
    dv = torch.where((inflow + outflow).flatten(1) < HARDLY_ANY, cut, dv)
    slope = (grad_v * dv).sum(1) + (grad_m * dlam).sum(1)
    return dv.unflatten(1, response.v.shape[1:]), dlam, slope


def polished(problem: Problem, v: Tensor, lam: Tensor, raised: Tensor) -> tuple[Response, Tensor]:
    """The responses at (v, lam), and lam, without what rounding of (v, lam) has left in them where the cap was `raised` `(B)`."""
    response = evaluate(problem, v, lam, False)
    index = raised.nonzero().squeeze(-1)
    if len(index) == 0:
        return response, lam
    part, now, now_lam = problem.take(index), response.take(index), lam[index]
    for _ in range(MOST_POLISHED):
        flow, _, safety = residuals(part, now, now_lam)
        dv, dlam, _ = direction(part, now, now_lam, False)
        new, small = follow(part, now, dv, dlam)
        small = small & (torch.maximum(flow, safety) > POLISHED)
        if not bool(small.any()):
            break
        now, now_lam = new.where(small, now), torch.where(small[:, None], (now_lam + dlam).clamp_min(0), now_lam)
    whole = Response(*(tensor.index_copy(0, index, new) for tensor, new in zip(response, now, strict=True)))
    return whole, lam.index_copy(0, index, now_lam)


def follow(problem: Problem, response: Response, dv: Tensor, dlam: Tensor) -> tuple[Response, Tensor]:
    """Take a step in p and s themselves, keeping the bounds that are met; and if it was small and crossed no other one."""
    ahead = next_potentials(problem.layout, dv).expand_as(response.p)
    held = response.at_lower | response.at_upper
    moving = ~held & (response.p > 0)
    free = torch.where(moving, response.p, 0.0).sum(-1)
    top = torch.where(moving, ahead, -torch.inf).amax(-1)
    top = torch.where(free > 0, top, 0.0)
    growth = torch.where(moving, ahead - top.unsqueeze(-1), 0.0).exp()
    grown = torch.where(moving, response.p * growth, 0.0).sum(-1)
    rise = top + torch.where(free > 0, grown / torch.where(free > 0, free, 1.0), 1.0).log()
    change = free * rise + torch.where(held, response.p * ahead, 0.0).sum(-1) - dv.unsqueeze(-1)
    change = change - (dlam[:, :, None, None, None] * problem.costs).sum(1)
    p = torch.where(moving, response.p * (growth * (top - rise).exp().unsqueeze(-1)), response.p)
    change = torch.where(response.s > 0, change, 0.0)
    s = response.s * change.exp()
    s = s / s.flatten(2).sum(-1)[:, :, None, None]
    inside = (p >= problem.lower - POLISHED) & (p <= problem.upper + POLISHED) | ~moving
    small = inside.flatten(1).all(1) & (change <= 1).flatten(1).all(1)
    v = response.v + dv
    return response._replace(v=v, value=v[:, 0, 0], p=p, t=response.t - rise, s=s), small
