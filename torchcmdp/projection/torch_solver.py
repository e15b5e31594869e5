"""The Newton solver of `kernels` in batched torch, for any device: a shrinking batch, or fixed steps and no host read."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from torchcmdp.kernels.limits import (
    ACCEPTABLE_GAP,
    ACCEPTABLE_RESIDUAL,
    CERTAIN,
    HIGHEST_CAP,
    LARGEST_GAP,
    LONGEST_MOVE,
    PLAIN_ITERATIONS,
    RELATIVE_TOLERANCE,
    SETTLED_RELATIVE,
    WARM_ITERATIONS,
    WITHOUT_CURVATURE,
)
from torchcmdp.layout import Layout
from torchcmdp.occupancy import uniform_policy
from torchcmdp.projection.torch_multipliers import least_violation, units
from torchcmdp.projection.torch_pairs import Problem, Response, evaluate, flows, make_problem
from torchcmdp.projection.torch_step import direction, is_full, polished, residuals, rounding, slack
from torchcmdp.status import ELASTIC, INVALID, MAX_ITERATIONS, SOLVED

FIXED_HALVINGS = 6
# Rebalancings of potentials in a row before a Newton step.
REBALANCINGS, FIXED_REBALANCINGS = 8, 1


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
        target, lower, upper: `(B x L x S x A x K)`.
        costs: `(B x m x L x S x A)`.
    """
    invalid = find_invalid(target, lower, upper, costs, layout)
    scale = units(costs)
    problem = make_problem(layout, target, lower, upper, costs / scale[:, :, None, None, None], cap)
    batch, m = target.shape[0], costs.shape[1]
    v = torch.zeros(batch, layout.layers, layout.width, dtype=target.dtype, device=target.device)
    lam = torch.zeros(batch, m, dtype=target.dtype, device=target.device)
    if fixed_iterations is not None:
        goal = torch.full((batch,), tolerance, dtype=target.dtype, device=target.device)
        iterations = torch.full((batch,), fixed_iterations, dtype=torch.int64, device=target.device)
        v, lam, iterations, _ = newton(problem, v, lam, goal, iterations, fixed_iterations)
        empty = least_violation(problem, lam) > CERTAIN
    else:
        keep = (~invalid).nonzero().squeeze(-1)
        iterations = torch.zeros(batch, dtype=torch.int64, device=target.device)
        v[keep], lam[keep], iterations[keep] = minimise(
            problem.take(keep), v[keep], lam[keep], tolerance, max_iterations, PLAIN_ITERATIONS
        )
        empty = raise_caps(problem, v, lam, iterations, keep, tolerance, max_iterations)
    if fixed_iterations is not None:
        response = evaluate(problem, v, lam, True)
    else:
        response, lam = polished(problem, v, lam, problem.cap.squeeze(-1) > cap)
    return certify(problem, response, lam, scale, cap, empty, iterations, invalid)


def minimise(
    problem: Problem, v: Tensor, lam: Tensor, tolerance: float, max_iterations: int, plain: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Newton's method from (v, lam), and on a cooling schedule from zero where that fails; returns (v, lam) and iterations."""
    plain = min(plain, max_iterations)
    goal = torch.full_like(v[:, 0, 0], tolerance)
    limit = torch.full(goal.shape, plain, dtype=torch.int64, device=v.device)
    v, lam, iterations, done = newton(problem, v, lam, goal, limit)
    hard = (~done).nonzero().squeeze(-1)
    if len(hard) and max_iterations > plain:
        v[hard], lam[hard], spent = cooled(problem.take(hard), tolerance, max_iterations - plain)
        iterations[hard] += spent
    return v, lam, iterations


def raise_caps(
    problem: Problem, v: Tensor, lam: Tensor, iterations: Tensor, keep: Tensor, tolerance: float, max_iterations: int
) -> Tensor:
    """Raise the caps, in place, that are used up by sets which are not proven empty, until one or the other is certain.

    Returns which sets are empty, `(B)`.
    """
    empty = torch.zeros_like(iterations, dtype=torch.bool)
    open_, cap = keep[is_full(lam[keep], problem.cap[keep])], problem.cap.clone()
    now_v, now_lam, before = v.clone(), lam.clone(), torch.zeros_like(lam)
    while len(open_):
        part = problem.take(open_)._replace(cap=cap[open_])
        response, _ = polished(part, now_v[open_], now_lam[open_], (cap > problem.cap)[open_].squeeze(-1))
        violation = recover(part, response)[2].amax(1)
        undecided = is_full(now_lam[open_], cap[open_]) & (violation > ACCEPTABLE_RESIDUAL) & (cap[open_, 0] < HIGHEST_CAP)
        # as the cap rises the multipliers tend to a line, whose direction is the best proof there is
        gained = (now_lam - before)[open_].clamp_min(0)
        proven = torch.maximum(least_violation(part, now_lam[open_]), least_violation(part, gained)) > CERTAIN
        empty[open_] |= proven
        undecided &= ~proven
        # where the raised cap has led to a safe occupancy it stays; a set that turned out empty keeps its own cap's answer
        found = open_[~undecided & (violation <= ACCEPTABLE_RESIDUAL)]
        v[found], lam[found], problem.cap[found] = now_v[found], now_lam[found], cap[found]
        open_ = open_[undecided]
        if len(open_) == 0:
            break
        cap[open_] *= 10
        before = now_lam.clone()
        part = problem.take(open_)._replace(cap=cap[open_])
        now_v[open_], now_lam[open_], spent = minimise(
            part, now_v[open_], now_lam[open_], tolerance, max_iterations, WARM_ITERATIONS
        )
        iterations[open_] += spent
    return empty


def find_invalid(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, layout: Layout) -> Tensor:
    """Instances with NaN, infinite costs, or intervals that hold no distribution: `(B)` bool."""
    real, pairs = layout.transition_mask(target.device), layout.pair_mask(target.device)
    entries = (~(target < torch.inf) | ~(lower >= 0) | ~(upper >= lower)) & real
    sums = (~(lower.sum(-1) <= 1 + 1e-9) | ~(upper.sum(-1) >= 1 - 1e-9)) & pairs
    return entries.flatten(1).any(1) | sums.flatten(1).any(1) | (~costs.isfinite() & pairs).flatten(1).any(1)


def newton(
    problem: Problem, v: Tensor, lam: Tensor, tolerance: Tensor, limit: Tensor, fixed_iterations: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Minimise the dual from (v, lam) in at most `limit` iterations, or in just so many with no host read.

    Returns (v, lam), the iterations spent and whether the tolerance was met, per instance.
    """
    batch, fixed = v.shape[0], fixed_iterations is not None
    final_v, final_lam = v.clone(), lam.clone()
    iterations = limit.clone()
    done = torch.zeros(batch, dtype=torch.bool, device=v.device)
    active = torch.arange(batch, device=v.device)
    response = evaluate(problem, v, lam, fixed)
    best = previous = torch.full_like(tolerance, torch.inf)
    reach = torch.full_like(tolerance, LONGEST_MOVE)
    stalled = torch.zeros_like(iterations)
    for iteration in itertools.count():
        worst, converged, acceptable = judge(problem, response, lam, tolerance)
        if fixed:
            iterations = torch.where(converged & ~done, iteration, iterations)
            done = done | converged
            if iteration == fixed_iterations:
                return response.v, lam, iterations, done
        else:
            moving = (worst < 0.5 * best) | (previous - response.value > slack(response, lam))
            stalled = torch.where(moving, 0, stalled + 1)
            best, previous = torch.minimum(best, worst), response.value
            converged = converged | ((stalled >= 4) & acceptable)
            stop = converged | (limit[active] <= iteration)
            if bool(stop.any()):
                final_v[active], final_lam[active] = response.v, lam
                iterations[active], done[active] = iteration, converged
                keep = (~stop).nonzero().squeeze(-1)
                if len(keep) == 0:
                    break
                active, problem, response, lam = active[keep], problem.take(keep), response.take(keep), lam[keep]
                tolerance, best, reach, stalled = tolerance[keep], best[keep], reach[keep], stalled[keep]
                previous = previous[keep]
        response = rebalance(problem, response, lam, fixed)
        response, lam, reach = newton_step(problem, response, lam, reach, fixed)
    return final_v, final_lam, iterations, done


def judge(problem: Problem, response: Response, lam: Tensor, tolerance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest KKT residual, whether it and each state's own will do, and whether they do for want of precision: `(B)` each."""
    flow, relative, safety = residuals(problem, response, lam)
    # a violation costs `cap` in the duality gap
    price = (problem.cap.squeeze(-1) / 500).clamp_min(1)
    worst = torch.maximum(flow, price * safety)
    acceptable = (price * rounding(response, lam)).clamp_min(ACCEPTABLE_RESIDUAL)
    converged = (worst <= tolerance) & (relative <= tolerance.clamp_min(RELATIVE_TOLERANCE))
    return worst, converged, (worst <= acceptable) & (relative <= SETTLED_RELATIVE)


def rebalance(problem: Problem, response: Response, lam: Tensor, fixed: bool) -> Response:
    """Move potentials by half the log ratio of inflow and outflow where the two are far apart, a few times in a row.

    There the dual is an exponential in v(x), along which Newton's method moves by one a step however far it has to go.
    """
    for _ in range(FIXED_REBALANCINGS if fixed else REBALANCINGS):
        inflow, outflow = flows(problem.layout, response)
        both = (inflow > 0) & (outflow > 0)
        imbalance = torch.where(both, inflow, 1.0).log() - torch.where(both, outflow, 1.0).log()
        imbalance = torch.where(imbalance.abs() > 3, imbalance, 0.0)
        if not fixed and not bool((imbalance != 0).any()):
            break
        trial = evaluate(problem, response.v - 0.5 * imbalance, lam, fixed)
        better = (trial.value <= response.value + slack(response, lam)) & (imbalance != 0).flatten(1).any(1)
        response = trial.where(better, response)
        if not fixed and not bool(better.any()):
            break
    return response


def newton_step(problem: Problem, response: Response, lam: Tensor, reach: Tensor, fixed: bool) -> tuple[Response, Tensor, Tensor]:
    """One Newton step, shortened until the dual decreases, or doubled while it falls as if it had no curvature.

    No potential moves further than `reach` `(B)`; the next step may go twice as far where this one was cut and did well.
    """
    dv, dlam, slope = direction(problem, response, lam, fixed)
    longest = dv.abs().flatten(1).amax(1)
    length = reach / torch.maximum(longest, reach)
    allowed = slack(response, lam)

    def go(length: Tensor) -> tuple[Response, Tensor]:
        moved = (lam + length[:, None] * dlam).clamp_min(0)
        moved = moved * (problem.cap / torch.maximum(moved.sum(-1, keepdim=True), problem.cap))
        return evaluate(problem, response.v + length[:, None, None] * dv, moved, fixed), moved

    trial, trial_lam = response, lam
    accepted = torch.zeros_like(slope, dtype=torch.bool)
    whole = accepted
    for attempt in range(FIXED_HALVINGS if fixed else 35):
        new, new_lam = go(length)
        good = new.value <= response.value + 1e-4 * length * slope + allowed
        if attempt == 0:
            whole = good & (longest > 1) & (longest <= reach)
            reach = torch.where(good & (longest > reach), 2 * reach, reach)
        take = good & ~accepted
        trial, trial_lam = (
            (new, new_lam) if attempt == 0 else (new.where(take, trial), torch.where(take[:, None], new_lam, trial_lam))
        )
        accepted = accepted | good
        if not fixed and bool(accepted.all()):
            break
        length = torch.where(accepted, length, 0.5 * length)
    for _ in range(0 if fixed else 35):
        whole = whole & (trial.value < response.value + WITHOUT_CURVATURE * length * slope - allowed)
        if not bool(whole.any()):
            break
        length = torch.where(whole, 2 * length, length)
        new, new_lam = go(length)
        whole = whole & (new.value < trial.value)
        trial, trial_lam = new.where(whole, trial), torch.where(whole[:, None], new_lam, trial_lam)
    stuck = ~accepted
    return response.where(stuck, trial), torch.where(stuck[:, None], lam, trial_lam), reach


def cooled(problem: Problem, tolerance: float, max_iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """Newton's method on a cooling schedule (see `kernels.newton.cooled_newton`)."""
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
        left = max_iterations - used
        v, lam, spent, _ = newton(problem.scaled(temperature), v, lam, goal, left if last else left.clamp_max(30))
        used += spent
        if last:
            return v, lam, used
        cooler = (temperature / 4).clamp_min(1)
        v = v * (temperature / cooler)[:, None, None]
        lam = lam * (temperature / cooler)[:, None]
        temperature = cooler


def recover(problem: Problem, response: Response) -> tuple[Tensor, Tensor, Tensor]:
    """The occupancy of the dual's policy and kernel, its logarithm, and what it spends of each constraint and a zero."""
    layout = problem.layout
    real = layout.transition_mask(response.v.device)
    out = response.s.sum(-1, keepdim=True)
    policy = torch.where(out > 0, response.s / torch.where(out > 0, out, 1.0), uniform_policy(layout, device=out.device))
    mass = torch.zeros_like(out[:, 0, :, 0])
    mass[:, 0] = 1
    flow = []
    for k in range(layout.layers):
        layer = (mass.unsqueeze(-1) * policy[:, k]).unsqueeze(-1) * response.p[:, k]
        flow.append(torch.where(real[k], layer, 0.0))
        mass = layout.arrivals(flow[-1], k)
    occupancy = torch.stack(flow, 1)
    positive = occupancy > 0
    log_occupancy = torch.where(positive, torch.where(positive, occupancy, 1.0).log(), -torch.inf)
    used = (problem.costs * occupancy.sum(-1).unsqueeze(1)).sum(dim=(2, 3, 4))
    return occupancy, log_occupancy, torch.nn.functional.pad(used, (0, 1))


def certify(
    problem: Problem, response: Response, lam: Tensor, scale: Tensor, cap: float, empty: Tensor, iterations: Tensor, invalid: Tensor
) -> tuple[Tensor, ...]:
    """The fields of the result, with residual and duality gap (see `kernels.projection.certify`)."""
    occupancy, log_occupancy, used = recover(problem, response)
    violation = used.amax(1)
    surplus = torch.where(occupancy > 0, occupancy * (log_occupancy - problem.target), 0.0)
    gap = surplus.flatten(1).sum(1) + response.value + lam.sum(1) * violation
    level = (lam * used[:, :-1]).sum(1) / problem.cap.squeeze(-1)
    full = is_full(lam, problem.cap)
    unpriced = violation - torch.where(full, level.clamp_min(0), 0.0)
    empty = empty & full & (violation > ACCEPTABLE_RESIDUAL)
    safe = empty | (violation <= ACCEPTABLE_RESIDUAL)
    # at the cap the gap is a difference of numbers as large as the dual value, and it grows with the multipliers
    raised = (ACCEPTABLE_GAP * problem.cap.squeeze(-1) / cap).clamp_max(LARGEST_GAP)
    allowed = torch.where(empty, ACCEPTABLE_GAP * (1 + response.value.abs()), raised)
    failed = ~((unpriced <= ACCEPTABLE_RESIDUAL) & (gap <= allowed) & safe)
    status = torch.where(failed, MAX_ITERATIONS, torch.where(empty, ELASTIC, SOLVED)).to(torch.int8)
    status = torch.where(invalid, torch.full_like(status, INVALID), status)
    return occupancy, log_occupancy, response.v, lam / scale, status, unpriced, gap, iterations
