"""The Newton solver of `compiled` in batched torch, for any device: a shrinking batch, or fixed steps and no host read."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcmdp.layout import Layout
from torchcmdp.projection.limits import (
    ACCEPTABLE_GAP,
    ACCEPTABLE_RESIDUAL,
    LONGEST_MOVE,
    PLAIN_ITERATIONS,
    RELATIVE_TOLERANCE,
    SETTLED_RELATIVE,
)
from torchcmdp.projection.torch_pairs import (
    Problem,
    Response,
    box_quadratic,
    curvature,
    evaluate,
    factor,
    flows,
    hessian,
    make_problem,
    masked_solve,
    next_potentials,
)
from torchcmdp.status import ELASTIC, INVALID, MAX_ITERATIONS, SOLVED

FIXED_HALVINGS = 6


def solve(
    target: Tensor,
    lower: Tensor,
    upper: Tensor,
    costs: Tensor,
    layout: Layout,
    cap: float,
    tolerance: float,
    max_iterations: int,
    fixed_iterations: int | None,
) -> tuple[Tensor, ...]:
    """Solve a flat batch; returns the fields of `ProjectionResult` in order.

    Args:
        target, lower, upper: `(B x L x S x A x S)`.
        costs: `(B x m x L x S x A)`.
    """
    invalid = find_invalid(target, lower, upper, costs, layout)
    problem = make_problem(layout, target, lower, upper, costs, cap)
    batch, m = target.shape[0], costs.shape[1]
    v = torch.zeros(batch, layout.layers, layout.width, dtype=target.dtype, device=target.device)
    lam = torch.zeros(batch, m, dtype=target.dtype, device=target.device)
    goal = torch.full((batch,), tolerance, dtype=target.dtype, device=target.device)
    if fixed_iterations is not None:
        v, lam, iterations, _ = newton(problem, v, lam, goal, fixed_iterations, fixed=True)
    else:
        keep = (~invalid).nonzero().squeeze(-1)
        iterations = torch.zeros(batch, dtype=torch.int64, device=target.device)
        plain = min(PLAIN_ITERATIONS, max_iterations)
        v[keep], lam[keep], iterations[keep], done = newton(problem.take(keep), v[keep], lam[keep], goal[keep], plain)
        hard = keep[~done]
        if len(hard) and max_iterations > plain:
            v[hard], lam[hard], spent = cooled(problem.take(hard), tolerance, max_iterations - plain)
            iterations[hard] += spent
    response = evaluate(problem, v, lam, fixed_iterations is not None)
    return certify(problem, response, lam, iterations, invalid)


def find_invalid(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, layout: Layout) -> Tensor:
    """Instances with NaN, infinite costs, or intervals that hold no distribution: `(B)` bool."""
    real, pairs = layout.transition_mask(target.device), layout.pair_mask(target.device)
    entries = (~(target < torch.inf) | ~(lower >= 0) | ~(upper >= lower)) & real
    sums = (~(lower.sum(-1) <= 1 + 1e-9) | ~(upper.sum(-1) >= 1 - 1e-9)) & pairs
    return entries.flatten(1).any(1) | sums.flatten(1).any(1) | (~costs.isfinite() & pairs).flatten(1).any(1)


def newton(
    problem: Problem, v: Tensor, lam: Tensor, tolerance: Tensor, max_iterations: int, fixed: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Minimise the dual from (v, lam); returns them with the iterations spent and whether the tolerance was met, per instance."""
    batch = v.shape[0]
    final_v, final_lam = v.clone(), lam.clone()
    iterations = torch.full((batch,), max_iterations, dtype=torch.int64, device=v.device)
    done = torch.zeros(batch, dtype=torch.bool, device=v.device)
    active = torch.arange(batch, device=v.device)
    response = evaluate(problem, v, lam, fixed)
    best = torch.full_like(tolerance, torch.inf)
    stalled = torch.zeros_like(iterations)
    for iteration in range(max_iterations + 1):
        worst, relative, converged = judge(problem, response, lam, tolerance)
        if fixed:
            iterations = torch.where(converged & ~done, iteration, iterations)
            done = done | converged
            if iteration == max_iterations:
                return response.v, lam, iterations, done
        else:
            stalled = torch.where(worst < 0.5 * best, 0, stalled + 1)
            best = torch.minimum(best, worst)
            converged = converged | ((stalled >= 4) & (best <= ACCEPTABLE_RESIDUAL) & (relative <= SETTLED_RELATIVE))
            if iteration == max_iterations or bool(converged.any()):
                final_v[active], final_lam[active] = response.v, lam
                iterations[active], done[active] = iteration, converged
                keep = (~converged).nonzero().squeeze(-1)
                if iteration == max_iterations or len(keep) == 0:
                    break
                active, problem, response, lam = active[keep], problem.take(keep), response.take(keep), lam[keep]
                tolerance, best, stalled = tolerance[keep], best[keep], stalled[keep]
        response = rebalance(problem, response, lam, fixed)
        response, lam = newton_step(problem, response, lam, fixed)
    return final_v, final_lam, iterations, done


def judge(problem: Problem, response: Response, lam: Tensor, tolerance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest KKT residual, the largest flow residual relative to a state's flow, and whether both will do: `(B)` each."""
    inflow, outflow = flows(response)
    gap = (inflow - outflow).abs()
    through = inflow + outflow
    relative = torch.where(through > 1e-250, gap / through.clamp_min(1e-250), 0.0).flatten(1).amax(1)
    worst = gap.flatten(1).amax(1)
    if lam.shape[1]:
        used = (problem.costs * response.s.unsqueeze(1)).sum(dim=(2, 3, 4))
        residual = torch.where(lam <= 0, used.clamp_min(0), torch.where(lam >= problem.cap, (-used).clamp_min(0), used.abs()))
        # every violated constraint costs `cap` in the duality gap
        price = (problem.cap.squeeze(-1) * lam.shape[1] / 500).clamp_min(1)
        worst = torch.maximum(worst, price * residual.amax(1))
    return worst, relative, (worst <= tolerance) & (relative <= tolerance.clamp_min(RELATIVE_TOLERANCE))


def rebalance(problem: Problem, response: Response, lam: Tensor, fixed: bool) -> Response:
    """Move potentials by half the log ratio of inflow and outflow where the two are far apart (see `compiled.solve.rebalance`)."""
    inflow, outflow = flows(response)
    both = (inflow > 0) & (outflow > 0)
    imbalance = torch.where(both, inflow, 1.0).log() - torch.where(both, outflow, 1.0).log()
    imbalance = torch.where(imbalance.abs() > 3, imbalance, 0.0)
    if not fixed and not bool((imbalance != 0).any()):
        return response
    trial = evaluate(problem, response.v - 0.5 * imbalance, lam, fixed)
    return trial.where(trial.value <= response.value + 1e-12 * (1 + response.value.abs()), response)


def newton_step(problem: Problem, response: Response, lam: Tensor, fixed: bool) -> tuple[Response, Tensor]:
    """One Newton step within the box of the multipliers, shortened until the dual decreases."""
    inflow, outflow = flows(response)
    grad_v = (inflow - outflow).flatten(1)
    grad_m = -(problem.costs * response.s.unsqueeze(1)).sum(dim=(2, 3, 4))
    cholesky, scale, border, schur = factor(*hessian(problem, response))
    half = torch.linalg.solve_triangular(cholesky, -(scale * grad_v).unsqueeze(-1), upper=False)
    dlam = box_quadratic(schur, grad_m + (border.mT @ half).squeeze(-1), -lam, problem.cap - lam, fixed) if lam.shape[1] else lam
    dv = scale * torch.linalg.solve_triangular(cholesky.mT, half - border @ dlam.unsqueeze(-1), upper=True).squeeze(-1)
    slope = (grad_v * dv).sum(1) + (grad_m * dlam).sum(1)
    length = (LONGEST_MOVE / dv.abs().amax(1).clamp_min(LONGEST_MOVE)).unsqueeze(-1)
    slack = 1e-12 * (1 + response.value.abs())
    dv = dv.unflatten(1, response.v.shape[1:])
    trial, trial_lam = response, lam
    accepted = torch.zeros_like(slope, dtype=torch.bool)
    for attempt in range(FIXED_HALVINGS if fixed else 35):
        new_lam = torch.minimum((lam + length * dlam).clamp_min(0), problem.cap)
        new = evaluate(problem, response.v + length.unsqueeze(-1) * dv, new_lam, fixed)
        good = new.value <= response.value + 1e-4 * length.squeeze(-1) * slope + slack
        take = good & ~accepted
        trial, trial_lam = (
            (new, new_lam) if attempt == 0 else (new.where(take, trial), torch.where(take[:, None], new_lam, trial_lam))
        )
        accepted = accepted | good
        if not fixed and bool(accepted.all()):
            break
        length = torch.where(accepted.unsqueeze(-1), length, 0.5 * length)
    stuck = ~accepted
    return response.where(stuck, trial), torch.where(stuck[:, None], lam, trial_lam)


def cooled(problem: Problem, tolerance: float, max_iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """Newton's method on a cooling schedule (see `compiled.solve.cooled_newton`)."""
    usable = problem.upper > 0
    top = torch.where(usable, problem.target, -torch.inf).flatten(1).amax(1)
    bottom = torch.where(usable & (problem.target > -1e20), problem.target, torch.inf).flatten(1).amin(1)
    temperature = ((top - bottom + problem.cap.squeeze(-1)) / 8).clamp_min(1)
    v = torch.zeros(problem.target.shape[:3], dtype=top.dtype, device=top.device)
    lam = torch.zeros(problem.costs.shape[:2], dtype=top.dtype, device=top.device)
    used = torch.zeros(len(top), dtype=torch.int64, device=top.device)
    while True:
        last = bool((temperature <= 1).all())
        goal = torch.full_like(temperature, tolerance if last else 1e-3)
        v, lam, spent, _ = newton(problem.scaled(temperature), v, lam, goal, max_iterations if last else 30)
        used += spent
        if last:
            return v, lam, used
        cooler = (temperature / 4).clamp_min(1)
        v = v * (temperature / cooler)[:, None, None]
        lam = torch.minimum(lam * (temperature / cooler)[:, None], problem.cap / cooler[:, None])
        temperature = cooler


def certify(problem: Problem, response: Response, lam: Tensor, iterations: Tensor, invalid: Tensor) -> tuple[Tensor, ...]:
    """The occupancy of the dual's policy and kernel, with its residual and duality gap (see `compiled.solve.recover`)."""
    layout = problem.layout
    real = layout.transition_mask(lam.device)
    out = response.s.sum(-1, keepdim=True)
    policy = torch.where(out > 0, response.s / torch.where(out > 0, out, 1.0), 1.0 / layout.actions)
    mass = torch.zeros_like(out[:, 0, :, 0])
    mass[:, 0] = 1
    flow = []
    for k in range(layout.layers):
        layer = (mass.unsqueeze(-1) * policy[:, k]).unsqueeze(-1) * response.p[:, k]
        flow.append(torch.where(real[k], layer, 0.0))
        mass = flow[-1].sum(dim=(1, 2))
    occupancy = torch.stack(flow, 1)
    positive = occupancy > 0
    log_occupancy = torch.where(positive, torch.where(positive, occupancy, 1.0).log(), -torch.inf)
    used = (problem.costs * occupancy.sum(-1).unsqueeze(1)).sum(dim=(2, 3, 4))
    surplus = torch.where(positive, occupancy * (log_occupancy - problem.target), 0.0)
    gap = surplus.flatten(1).sum(1) + response.value + (problem.cap * used.clamp_min(0)).sum(1)
    zero = torch.zeros_like(gap).unsqueeze(-1)
    violation = torch.cat([used, zero], 1).amax(1)
    unpriced = torch.cat([torch.where(lam < problem.cap, used, 0.0), zero], 1).amax(1)
    elastic = violation > ACCEPTABLE_RESIDUAL
    failed = ~((unpriced <= ACCEPTABLE_RESIDUAL) & (gap <= ACCEPTABLE_GAP * (1 + torch.where(elastic, response.value.abs(), 0.0))))
    status = torch.where(failed, MAX_ITERATIONS, torch.where(elastic, ELASTIC, SOLVED)).to(torch.int8)
    status = torch.where(invalid, torch.full_like(status, INVALID), status)
    return occupancy, log_occupancy, response.v, lam, status, unpriced, gap, iterations


def _linearised(
    target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, v: Tensor, lam: Tensor, layout: Layout, cap: float
) -> tuple[Problem, Response, Tensor, Tensor, tuple[Tensor, ...]]:
    problem = make_problem(layout, target, lower, upper, costs, cap)
    # one pass more than needed is harmless, and no host read keeps the derivative usable in fixed-iteration mode
    response = evaluate(problem, v, lam, fixed=True)
    clipped = response.at_lower | response.at_upper
    z = problem.target + next_potentials(response.v)
    price = torch.where(clipped, torch.where(response.p > 0, response.p, 1.0).log() - z - response.t.unsqueeze(-1), 0.0)
    return problem, response, (lam > 0) & (lam < cap), price, factor(*hessian(problem, response))


def _constrain(problem: Problem, flow: Tensor) -> tuple[Tensor, Tensor]:
    """K flow: outflow - inflow of every state `(B x LS)`, and the costs `(B x m)`."""
    pair = flow.sum(-1)
    arrivals = flow.sum(dim=(2, 3))
    net = pair.sum(-1) - torch.cat([torch.zeros_like(arrivals[:, :1]), arrivals[:, :-1]], 1)
    return net.flatten(1), (problem.costs * pair.unsqueeze(1)).sum(dim=(2, 3, 4))


def _spread_back(problem: Problem, a_v: Tensor, a_m: Tensor) -> Tensor:
    """K^T a: a(x) - a(y) + sum_i a_i costs_i, `(B x L x S x A x S)`."""
    a_v = a_v.unflatten(1, problem.target.shape[1:3])
    pair = a_v.unsqueeze(-1) + (a_m[:, :, None, None, None] * problem.costs).sum(1)
    return pair.unsqueeze(-1) - next_potentials(a_v)


def _solve_system(factors: tuple[Tensor, ...], free: Tensor, rhs_v: Tensor, rhs_m: Tensor) -> tuple[Tensor, Tensor]:
    cholesky, scale, border, schur = factors
    half = torch.linalg.solve_triangular(cholesky, (scale * rhs_v).unsqueeze(-1), upper=False)
    x_m = masked_solve(schur, free, rhs_m - (border.mT @ half).squeeze(-1))
    x_v = torch.linalg.solve_triangular(cholesky.mT, half - border @ x_m.unsqueeze(-1), upper=True).squeeze(-1)
    return scale * x_v, x_m


def vjp(target, lower, upper, costs, v, lam, grad, layout, cap):  # type: ignore[no-untyped-def]
    """Pull the occupancy's cotangent back to target, lower, upper and costs."""
    problem, response, free, price, factors = _linearised(target, lower, upper, costs, v, lam, layout, cap)
    real = layout.transition_mask(target.device)
    grad = torch.where(real, grad, 0.0)
    rhs_v, rhs_m = _constrain(problem, curvature(response, grad)[0])
    a_v, a_m = (-solution for solution in _solve_system(factors, free, rhs_v, rhs_m))
    pulled = torch.where(real, grad + _spread_back(problem, a_v, a_m), 0.0)
    grad_target, along, mean = curvature(response, pulled)
    bound = response.s.unsqueeze(-1) * (pulled - mean - price * along)
    pairs = layout.pair_mask(target.device)
    through = a_m[:, :, None, None, None] * response.s.unsqueeze(1)
    grad_costs = torch.where(pairs, through - lam[:, :, None, None, None] * grad_target.sum(-1).unsqueeze(1), 0.0)
    grad_lower = torch.where(response.at_lower & real, bound, 0.0)
    grad_upper = torch.where(response.at_upper & real, bound, 0.0)
    return torch.where(real, grad_target, 0.0), grad_lower, grad_upper, grad_costs


def jvp(target, lower, upper, costs, v, lam, d_target, d_lower, d_upper, d_costs, layout, cap):  # type: ignore[no-untyped-def]
    """Push tangents of target, lower, upper and costs forward to the occupancy."""
    problem, response, free, price, factors = _linearised(target, lower, upper, costs, v, lam, layout, cap)
    real = layout.transition_mask(target.device)
    shift = (lam[:, :, None, None, None] * d_costs).sum(1).unsqueeze(-1)
    move = torch.where(response.at_lower, d_lower, torch.where(response.at_upper, d_upper, 0.0))
    move = torch.where(real, move, 0.0)
    d_q = curvature(response, torch.where(real, d_target - shift, 0.0))[0]
    giving = torch.where(response.at_lower | response.at_upper, 0.0, response.p)
    total = giving.sum(-1, keepdim=True)
    giving = torch.where(total > 0, giving / torch.where(total > 0, total, 1.0), response.p)
    bent = move - giving * move.sum(-1, keepdim=True) - response.p * (price * move).sum(-1, keepdim=True)
    d_q = d_q + response.s.unsqueeze(-1) * bent
    rhs_v, rhs_m = _constrain(problem, d_q)
    rhs_m = rhs_m + torch.where(layout.pair_mask(target.device), d_costs * response.s.unsqueeze(1), 0.0).sum(dim=(2, 3, 4))
    x_v, x_m = _solve_system(factors, free, rhs_v, torch.where(free, rhs_m, 0.0))
    return torch.where(real, d_q - curvature(response, _spread_back(problem, x_v, x_m))[0], 0.0)
