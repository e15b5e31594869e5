"""The Newton solver of `kernels` in batched torch, for any device: a shrinking batch, or fixed steps and no host read.

Inside, the batch is the last axis (see `torch_pairs`).
"""

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
from torchcmdp.projection.torch_multipliers import least_violation, units
from torchcmdp.projection.torch_pairs import Problem, Response, arrivals_at, batch_last, evaluate, make_problem, put, take
from torchcmdp.projection.torch_step import direction, is_full, polished, residuals, rounding
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
    scale = units(costs)
    problem = make_problem(layout, target, lower, upper, costs / scale[:, :, None, None, None], cap)
    invalid = find_invalid(problem)
    if fixed_iterations is None and (len(target) == 0 or bool(invalid.any())):
        fixed_iterations = 0  # there is nothing to iterate on, or the whole batch will be refused
    batch, m = costs.shape[:2]
    v, lam = target.new_zeros(layout.layers, layout.width, batch), target.new_zeros(m, batch)
    if fixed_iterations is not None:
        limit = torch.full((batch,), fixed_iterations, dtype=torch.int64, device=target.device)
        response, lam, iterations, _ = newton(problem, v, lam, tolerance, limit, fixed_iterations)
        empty = least_violation(problem, lam) > CERTAIN
    else:
        response, lam, iterations = minimise(problem, v, lam, tolerance, max_iterations)
        empty = raise_caps(problem, response, lam, iterations, tolerance, max_iterations)
    return certify(problem, response, lam, scale, cap, empty, iterations, invalid)


def minimise(
    problem: Problem, v: Tensor, lam: Tensor, tolerance: float, max_iterations: int, warm: bool = False
) -> tuple[Response, Tensor, Tensor]:
    """Newton's method from (v, lam), and on a cooling schedule from zero where the certificate says that it failed.

    Args:
        warm: (v, lam) is the solution with a lower cap.

    Returns:
        The response, lam and the iterations.
    """
    plain = min(WARM_ITERATIONS if warm else PLAIN_ITERATIONS, max_iterations)
    limit = torch.full_like(problem.cap, plain, dtype=torch.int64)
    response, lam, iterations, done = newton(problem, v, lam, tolerance, limit)
    if warm:
        response, lam = polished(problem, response, lam)
    # what rounding lets pass for converged may still be far from safe
    done &= unpriced(problem, lam, spend(problem, response)[1]) <= ACCEPTABLE_RESIDUAL
    hard = (~done).nonzero().squeeze(-1)
    if len(hard) and max_iterations > plain:
        part = problem.take(hard)
        cooler, cooler_lam, more = cooled(part, tolerance, max_iterations - iterations[hard])
        if warm:
            cooler, cooler_lam = polished(part, cooler, cooler_lam)
        iterations[hard] += more
        if not warm:  # where cooling has led astray, the dual is larger than before
            before = response.value[hard]
            kept = (cooler.value <= before + 1e-12 * (1 + before.abs())).nonzero().squeeze(-1)
            hard, cooler, cooler_lam = hard[kept], cooler.take(kept), take(cooler_lam, kept)
        response.put(hard, cooler)
        put(lam, hard, cooler_lam)
    return response, lam, iterations


def raise_caps(
    problem: Problem, response: Response, lam: Tensor, iterations: Tensor, tolerance: float, max_iterations: int
) -> Tensor:
    """Raise the caps, in place, that are used up by sets which are not proven empty, until one or the other is certain.

    Where that ends in an occupancy, it and its cap stay; an empty set keeps the answer of its own cap.

    Returns:
        Which sets are empty, `(B)`.
    """
    empty = torch.zeros_like(iterations, dtype=torch.bool)
    open_ = is_full(lam, problem.cap).nonzero().squeeze(-1)
    if not len(open_):
        return empty
    part, now, now_lam = problem.take(open_), response.take(open_), take(lam, open_)
    before = torch.zeros_like(now_lam)
    while len(open_):
        violated = spend(part, now)[1].amax(0) > ACCEPTABLE_RESIDUAL
        # as the cap rises the multipliers tend to a line, whose direction is the best proof there is
        gained = (now_lam - before).clamp_min(0)
        proven = violated & (torch.maximum(least_violation(part, now_lam), least_violation(part, gained)) > CERTAIN)
        undecided = violated & ~proven & is_full(now_lam, part.cap) & (part.cap < HIGHEST_CAP)
        empty[open_] = proven
        found, left = (which.nonzero().squeeze(-1) for which in (~proven & ~undecided, undecided))
        response.put(open_[found], now.take(found))
        put(lam, open_[found], take(now_lam, found))
        put(problem.cap, open_[found], take(part.cap, found))
        open_, part, before = open_[left], part.take(left), take(now_lam, left)
        part = part._replace(cap=10 * part.cap)
        if len(open_):
            now, now_lam, more = minimise(part, take(now.v, left), before, tolerance, max_iterations, warm=True)
            iterations[open_] += more
    return empty


def find_invalid(problem: Problem) -> Tensor:
    """Instances with NaN, infinite costs, or intervals that hold no distribution: `(B)` bool."""
    low, high = problem.lower, problem.upper
    least = torch.minimum(low, high - low).flatten(0, 3).amin(0)
    most = torch.maximum(low.sum(0), 2 - high.sum(0)).flatten(0, 2).amax(0)
    finite = (problem.target.flatten(0, 3).amax(0) < torch.inf) & problem.costs.isfinite().flatten(0, 3).all(0)
    return ~((least >= 0) & (most <= 1 + 1e-9) & finite)


def newton(
    problem: Problem, v: Tensor, lam: Tensor, tolerance: float, limit: Tensor, fixed_iterations: int | None = None
) -> tuple[Response, Tensor, Tensor, Tensor]:
    """Minimise the dual from (v, lam) in at most `limit` iterations `(B)`, or in just so many with no host read.

    Returns the response, lam, the iterations spent and whether the tolerance was met, or as nearly as rounding lets it.
    """
    fixed = fixed_iterations is not None
    iterations, final_lam = limit.clone(), lam.clone()
    done = torch.zeros_like(limit, dtype=torch.bool)
    active = torch.arange(len(limit), device=v.device)
    final = response = evaluate(problem, v, lam, fixed)
    best = previous = torch.full_like(problem.cap, torch.inf)
    reach = torch.full_like(problem.cap, LONGEST_MOVE)
    stalled, stuck = torch.zeros_like(iterations), done
    for iteration in itertools.count():
        open_digits = rounding(response, lam)
        worst, converged, acceptable = judge(problem, response, lam, tolerance, open_digits)
        # a dual value may rise by this without meaning it: it cannot resolve the last steps
        allowed = (1 + response.value.abs()).mul_(1e-12).add_(open_digits)
        if fixed:
            iterations = torch.where(converged & ~done, iteration, iterations)
            done = done | converged
            if iteration == fixed_iterations:
                return response, lam, iterations, done
        else:
            moving = (worst < 0.5 * best) | (previous - response.value > allowed)
            stalled = torch.where(moving, 0, stalled + 1)
            best, previous = torch.minimum(best, worst), response.value
            converged = converged | (((stalled >= 4) | stuck) & acceptable)
            stop = converged | stuck | (limit <= iteration)
            if bool(stop.any()):
                if iteration:
                    final.put(active, response)
                    put(final_lam, active, lam)
                iterations.index_fill_(0, active, iteration)
                done.index_copy_(0, active, converged)
                keep = (~stop).nonzero().squeeze(-1)
                if len(keep) == 0:
                    break
                active, problem, response, lam = active[keep], problem.take(keep), response.take(keep), take(lam, keep)
                limit, best, reach, stalled, previous, allowed = (
                    state[keep] for state in (limit, best, reach, stalled, previous, allowed)
                )
        response = rebalance(problem, response, lam, allowed, fixed)
        response, lam, reach, stuck = newton_step(problem, response, lam, reach, allowed, fixed)
    return final, final_lam, iterations, done


def judge(
    problem: Problem, response: Response, lam: Tensor, tolerance: float, open_digits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The largest KKT residual, whether it and each state's own will do, and whether they do for want of precision: `(B)` each."""
    flow, relative, safety = residuals(problem, response, lam)
    # a violation costs `cap` in the duality gap
    price = (problem.cap / 500).clamp_min(1)
    worst = torch.maximum(flow, price * safety)
    acceptable = (price * open_digits).clamp_min(ACCEPTABLE_RESIDUAL)
    converged = (worst <= tolerance) & (relative <= max(tolerance, RELATIVE_TOLERANCE))
    return worst, converged, (worst <= acceptable) & (relative <= SETTLED_RELATIVE)


def rebalance(problem: Problem, response: Response, lam: Tensor, allowed: Tensor, fixed: bool) -> Response:
    """Move potentials by half the log ratio of inflow and outflow where the two are far apart, a few times in a row.

    There the dual is an exponential in v(x), along which Newton's method moves by one a step however far it has to go. The dual
    may rise by what is `allowed` `(B)`.
    """
    for _ in range(FIXED_REBALANCINGS if fixed else REBALANCINGS):
        imbalance = response.inflow.log() - response.outflow.log()
        size = imbalance.abs()
        far = (size > 3) & (size < torch.inf)
        if not fixed and not bool(far.any()):
            break
        trial = evaluate(problem, response.v - torch.where(far, 0.5 * imbalance, 0.0), lam, fixed)
        better = (trial.value <= response.value + allowed) & far.flatten(0, 1).any(0)
        response = trial.where(better, response)
        if not fixed and not bool(better.any()):
            break
    return response


def newton_step(
    problem: Problem, response: Response, lam: Tensor, reach: Tensor, allowed: Tensor, fixed: bool
) -> tuple[Response, Tensor, Tensor, Tensor]:
    """One Newton step, shortened until the dual decreases, or doubled while it falls as if it had no curvature.

    No potential moves further than `reach` `(B)`; the next step may go twice as far where this one was cut and did well.

    Returns:
        The response, lam, the next step's reach, and whether the dual would not decrease.
    """
    dv, dlam, slope = direction(problem, response, lam, fixed)
    longest = dv.abs().amax((0, 1))
    length = reach / torch.maximum(longest, reach)

    def go(length: Tensor) -> tuple[Response, Tensor]:
        moved = (lam + length * dlam).clamp_min(0)
        moved = moved * (problem.cap / torch.maximum(moved.sum(0), problem.cap))
        return evaluate(problem, response.v + length * dv, moved, fixed), moved

    trial, trial_lam = go(length)
    value = response.value
    highest = value + allowed
    good = trial.value <= torch.addcmul(highest, length, slope, value=1e-4)
    whole = good & (longest > 1) & (longest <= reach)
    reach = torch.where(good & (longest > reach), 2 * reach, reach)
    for attempt in range(1, FIXED_HALVINGS if fixed else 35):
        if not fixed and bool(good.all()):
            break
        if attempt == 1:
            trial, trial_lam = trial.where(good, response), torch.where(good, trial_lam, lam)
        length = torch.where(good, length, 0.5 * length)
        new, new_lam = go(length)
        take = (new.value <= torch.addcmul(highest, length, slope, value=1e-4)) & ~good
        trial, trial_lam = new.where(take, trial), torch.where(take, new_lam, trial_lam)
        good = good | take
    for _ in range(0 if fixed else 35):
        whole = whole & (trial.value < torch.addcmul(value - allowed, length, slope, value=WITHOUT_CURVATURE))
        if not bool(whole.any()):
            break
        length = torch.where(whole, 2 * length, length)
        new, new_lam = go(length)
        whole = whole & (new.value < trial.value)
        trial, trial_lam = new.where(whole, trial), torch.where(whole, new_lam, trial_lam)
    return trial, trial_lam, reach, ~good


def cooled(problem: Problem, tolerance: float, limit: Tensor) -> tuple[Response, Tensor, Tensor]:
    """Newton's method on a cooling schedule, for at most `limit` iterations (see `kernels.newton.cooled_newton`)."""
    usable, target = (tensor.flatten(0, 3) for tensor in (problem.upper > 0, problem.target))
    top = torch.where(usable, target, -torch.inf).amax(0)
    bottom = torch.where(usable & (target > -1e20), target, torch.inf).amin(0)
    temperature = ((top - bottom + problem.cap) / 8).clamp_min(1)
    v, lam = top.new_zeros(problem.target.shape[1:3] + top.shape), top.new_zeros(problem.costs.shape[3:])
    used = torch.zeros_like(top, dtype=torch.int64)
    while True:
        last = bool((temperature <= 1).all())
        goal, left = (tolerance, limit - used) if last else (1e-3, (limit - used).clamp_max(30))
        response, lam, spent, _ = newton(problem.scaled(temperature), v, lam, goal, left)
        used += spent
        if last:
            return response, lam, used
        cooler = (temperature / 4).clamp_min(1)
        v, lam = response.v * (temperature / cooler), lam * (temperature / cooler)
        temperature = cooler


def spend(problem: Problem, response: Response) -> tuple[Tensor, Tensor]:
    """The occupancy of the dual's policy and kernel, and what it spends of each constraint and a zero, `(m + 1 x B)`."""
    layout = problem.layout
    real = layout.transition_mask(response.v.device).movedim(-1, 0).unsqueeze(-1)
    pairs = layout.pair_mask(response.v.device).unsqueeze(-1)
    out = response.outflow.unsqueeze(2)
    policy = torch.where(out > 0, response.s / out, pairs / layout.action_counts(out.device).unsqueeze(-1))
    flow = torch.where(real, response.p * policy, 0.0)
    for k in range(1, layout.layers):
        flow[:, k] *= arrivals_at(layout, flow, k).unsqueeze(1)
    used = (problem.costs * flow.sum(0).unsqueeze(3)).sum((0, 1, 2))
    return flow, torch.nn.functional.pad(used, (0, 0, 0, 1))


def unpriced(problem: Problem, lam: Tensor, used: Tensor) -> Tensor:
    """What the multipliers do not price of the largest violation, `(B)`."""
    level = torch.where(is_full(lam, problem.cap), (lam * used[:-1]).sum(0) / problem.cap, 0.0)
    return used.amax(0) - level.clamp_min(0)


def certify(
    problem: Problem, response: Response, lam: Tensor, scale: Tensor, cap: float, empty: Tensor, iterations: Tensor, invalid: Tensor
) -> tuple[Tensor, ...]:
    """The fields of the result, batch first, with residual and duality gap (see `kernels.projection.certify`)."""
    occupancy, used = spend(problem, response)
    log_occupancy, violation, residual = occupancy.log(), used.amax(0), unpriced(problem, lam, used)
    surplus = torch.where(occupancy > 0, occupancy * (log_occupancy - problem.target), 0.0)
    gap = surplus.sum((0, 1, 2, 3)) + response.value + lam.sum(0) * violation
    empty = empty & is_full(lam, problem.cap) & (violation > ACCEPTABLE_RESIDUAL)
    safe = empty | (violation <= ACCEPTABLE_RESIDUAL)
    # at the cap the gap is a difference of numbers as large as the dual value, and it grows with the multipliers
    raised = (ACCEPTABLE_GAP * problem.cap / cap).clamp_max(LARGEST_GAP)
    allowed = torch.where(empty, ACCEPTABLE_GAP * (1 + response.value.abs()), raised)
    failed = ~((residual <= ACCEPTABLE_RESIDUAL) & (gap <= allowed) & safe)
    status = torch.where(failed, MAX_ITERATIONS, torch.where(empty, ELASTIC, SOLVED))
    status = torch.where(invalid, INVALID, status).to(torch.int8)
    v = response.v.movedim(-1, 0).contiguous()
    return batch_last(occupancy), batch_last(log_occupancy), v, lam.mT / scale, status, residual, gap, iterations
