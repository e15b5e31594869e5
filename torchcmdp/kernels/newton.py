"""Newton's method on the dual of one instance."""

from __future__ import annotations

import math

from torchcmdp.kernels.cpu import compiled
from torchcmdp.kernels.limits import (
    ACCEPTABLE_RESIDUAL,
    HARDLY_ANY,
    LONGEST_MOVE,
    MOST_POLISHED,
    POLISHED,
    RELATIVE_TOLERANCE,
    SETTLED_RELATIVE,
    UNIT_ROUNDING,
    WITHOUT_CURVATURE,
)
from torchcmdp.kernels.linalg import assemble_border, prepare, schur, solve
from torchcmdp.kernels.pairs import FREE, Problem, evaluate, flows, weigh
from torchcmdp.kernels.quadratic import quadratic
from torchcmdp.kernels.sums import inner

# An iteration rebalances flows at most this often, and halves its step at most this often.
MOST_REBALANCED, MOST_HALVED = 8, 35
# The first steps are not doubled: few instances need it, and those need many steps.
EARLY_STEPS = 8
# Stages of a cooling schedule: enough for targets of 1e20.
MOST_STAGES = 40


@compiled
def spend(problem, response, used):
    """used_i <- <costs_i, s>, minus the gradient of the dual in the multipliers."""
    for i in range(used.shape[0]):
        used[i] = inner(problem.costs, i, response.s)


@compiled
def full(lam, cap):
    """Whether the multipliers use up the cap."""
    total = 0.0
    for i in range(lam.shape[0]):
        total += lam[i]
    return total >= cap * (1.0 - 1e-12)


@compiled
def kkt_residual(response, used, lam, cap):
    """The largest flow residual (absolute), the same relative to the throughput of a state, and the safety residual.

    A state counts relatively where something flows into it: what leaves another one shrinks by a factor of e a step, and would take
    hundreds of them to vanish. At the cap, the constraints with a multiplier share the largest violation.
    """
    inflow, outflow = response.inflow, response.outflow
    flow = 0.0
    relative = 0.0
    for j in range(inflow.shape[0] - 1):
        difference = abs(inflow[j] - outflow[j])
        flow = max(flow, difference)
        if inflow[j] > 1e-250:
            relative = max(relative, difference / (inflow[j] + outflow[j]))
    level = 0.0
    if full(lam, cap):
        for i in range(lam.shape[0]):
            level += lam[i] * used[i] / cap
    safety = max(-level, 0.0)
    for i in range(lam.shape[0]):
        safety = max(safety, used[i] - level)
        if lam[i] > 0.0:
            safety = max(safety, level - used[i])
    return flow, relative, safety


@compiled
def copy(source, destination):
    """destination <- source."""
    for c in range(source.shape[0]):
        destination[c] = source[c]


@compiled
def propose_balance(v, trial_v, response):
    """Propose v(x) -= ln(inflow/outflow) / 2 where the two are far apart, and say whether they were anywhere."""
    inflow, outflow = response.inflow, response.outflow
    far = False
    for j in range(v.shape[0]):
        trial_v[j] = v[j]
        if 0 < j < v.shape[0] - 1 and inflow[j] > 0.0 and outflow[j] > 0.0:
            ratio = inflow[j] / outflow[j]
            if not 0.05 < ratio < 20.0:
                imbalance = math.log(inflow[j]) - math.log(outflow[j])
                if abs(imbalance) > 3.0:
                    trial_v[j] -= 0.5 * imbalance
                    far = True
    return far


@compiled
def rebalance(geometry, problem, value, slack, work):
    """Even out states whose inflow and outflow are far apart, while it does not raise the dual; returns its value, and if it moved.

    There the dual is an exponential in v(x), along which Newton's method moves by one a step however far it has to go. A few times
    in a row, but not for ever: states with next to no mass can trade imbalances in a circle.
    """
    response, v, trial_v, lam = work.response, work.v, work.trial_v, work.lam
    moved = False
    for _ in range(MOST_REBALANCED):
        if not propose_balance(v, trial_v, response):
            break
        moved = True
        trial_value = evaluate(geometry, problem, response, trial_v, lam)
        if not trial_value <= value + slack:
            value = evaluate(geometry, problem, response, v, lam)
            break
        copy(trial_v, v)
        value = trial_value
    return value, moved


@compiled
def newton_step(geometry, problem, cap, work):
    """The Newton step (dv, dlam) within {multipliers >= 0, sum <= cap}; returns the dual's slope along it and its longest move."""
    response, system, small = work.response, work.system, work.small
    inflow, outflow, border, solved = response.inflow, response.outflow, system.border, system.solved
    dv, dlam, lam, used = work.dv, work.dlam, work.lam, work.used
    n, m = dv.shape[0] - 1, lam.shape[0]
    prepare(geometry, response, system)
    for j in range(n):
        dv[j] = outflow[j] - inflow[j]
    solve(geometry, response, system, dv)
    if m > 0:
        assemble_border(geometry, problem.costs, response, system)
        # no multiplier is positive and none would grow: the step in the potentials is all
        idle = True
        room = cap
        for i in range(m):
            small.linear[i] = -used[i]
            for j in range(n):
                small.linear[i] += border[i, j] * dv[j]
            small.low[i] = -lam[i]
            room -= lam[i]
            dlam[i] = 0.0
            idle = idle and lam[i] == 0.0 and small.linear[i] >= 0.0
        if not idle:
            schur(geometry, response, system)
            quadratic(system.corner, max(room, 0.0), small, dlam)
            for i in range(m):
                for j in range(n):
                    dv[j] -= solved[i, j] * dlam[i]
    slope = 0.0
    longest = 0.0
    for j in range(n):
        if inflow[j] + outflow[j] < HARDLY_ANY:
            dv[j] = min(max(dv[j], -LONGEST_MOVE), LONGEST_MOVE)
        slope += (inflow[j] - outflow[j]) * dv[j]
        longest = max(longest, abs(dv[j]))
    for i in range(m):
        slope -= used[i] * dlam[i]
    return slope, longest


@compiled
def move(work, scale, cap):
    """trial <- current + scale * step, kept in the set against rounding."""
    v, dv, trial_v = work.v, work.dv, work.trial_v
    lam, dlam, trial_lam = work.lam, work.dlam, work.trial_lam
    for j in range(v.shape[0]):
        trial_v[j] = v[j] + scale * dv[j]
    total = 0.0
    for i in range(lam.shape[0]):
        trial_lam[i] = max(lam[i] + scale * dlam[i], 0.0)
        total += trial_lam[i]
    if total > cap:
        for i in range(lam.shape[0]):
            trial_lam[i] *= cap / total


@compiled
def extend(geometry, problem, cap, value, slope, trial_value, slack, work):
    """Double a whole step that was taken while the dual falls with at least this part of its first slope; returns its value."""
    scale = 1.0
    for _ in range(MOST_HALVED):
        if not trial_value < value + WITHOUT_CURVATURE * scale * slope - slack:
            break
        move(work, 2.0 * scale, cap)
        further = evaluate(geometry, problem, work.response, work.trial_v, work.trial_lam)
        if not further < trial_value:
            move(work, scale, cap)
            return evaluate(geometry, problem, work.response, work.trial_v, work.trial_lam)
        scale *= 2.0
        trial_value = further
    return trial_value


@compiled
def search(geometry, problem, cap, value, slope, longest, reach, late, slack, work):
    """Go along the step as far as the dual decreases, moving no potential further than `reach`.

    `late` in the iteration, a step on which the dual falls as if it had no curvature is doubled while that lasts: where an
    exponential of the multipliers is gone, Newton's method moves by one in its exponent a step however far it has to go.

    Returns the dual's value, or infinity where it does not decrease, and how far the next step may go: twice as far where this one
    was cut and did well.
    """
    cut = longest > reach
    scale = reach / longest if cut else 1.0
    for halved in range(MOST_HALVED):
        move(work, scale, cap)
        trial_value = evaluate(geometry, problem, work.response, work.trial_v, work.trial_lam)
        if trial_value <= value + 1e-4 * scale * slope + slack:
            if late and halved == 0 and not cut and longest > 1.0:
                trial_value = extend(geometry, problem, cap, value, slope, trial_value, slack, work)
            copy(work.trial_v, work.v)
            copy(work.trial_lam, work.lam)
            return trial_value, 2.0 * reach if cut and halved == 0 else reach
        scale *= 0.5
    evaluate(geometry, problem, work.response, work.v, work.lam)
    return math.inf, reach


@compiled
def rounding(v, lam):
    """What rounding leaves open of the exponents of a pair's occupancy, which are sums of potentials and multipliers."""
    largest = 0.0
    for j in range(v.shape[0]):
        largest = max(largest, abs(v[j]))
    for i in range(lam.shape[0]):
        largest += lam[i]
    return UNIT_ROUNDING * largest


@compiled
def newton(geometry, problem, cap, tolerance, max_iterations, work):
    """Minimise the dual from (work.v, work.lam), which are overwritten; returns the iterations spent and whether it converged."""
    response, v, lam, used = work.response, work.v, work.lam, work.used
    work.dv[v.shape[0] - 1] = 0.0
    value = evaluate(geometry, problem, response, v, lam)
    best = math.inf
    previous = math.inf
    stalled = 0
    reach = LONGEST_MOVE
    # a violation costs `cap` in the duality gap
    weight = max(1.0, cap / 500.0)
    for iteration in range(max_iterations + 1):
        spend(problem, response, used)
        flow, relative, safety = kkt_residual(response, used, lam, cap)
        worst = max(flow, weight * safety)
        if worst <= tolerance and relative <= max(RELATIVE_TOLERANCE, tolerance):
            return iteration, True
        # the dual value cannot resolve the last steps, hence the slack
        noise = rounding(v, lam)
        slack = 1e-12 * (1.0 + abs(value)) + noise
        stalled = 0 if worst < 0.5 * best or previous - value > slack else stalled + 1
        best = min(best, worst)
        previous = value
        # rounding can keep huge potentials from settling any further; the certificate judges what was reached
        acceptable = max(ACCEPTABLE_RESIDUAL, weight * noise)
        settled = stalled >= 4 and worst <= acceptable and relative <= SETTLED_RELATIVE
        if iteration == max_iterations or settled:
            return iteration, settled
        value, moved = rebalance(geometry, problem, value, slack, work)
        if moved:
            spend(problem, response, used)
        # far from the solution a rough step will do
        work.system.iterates.enough[0] = min(max(1e-2 * worst, 1e-12), 1e-4)
        slope, longest = newton_step(geometry, problem, cap, work)
        value, reach = search(geometry, problem, cap, value, slope, longest, reach, iteration >= EARLY_STEPS, slack, work)
        if value == math.inf:
            return iteration + 1, worst <= acceptable and relative <= SETTLED_RELATIVE
    return max_iterations, False


@compiled
def follow(geometry, problem, work):
    """Take the step in p and s themselves, keeping the bounds that are met; says if it was small and crossed no other one."""
    row, successor, actions, first = geometry.row, geometry.successor, geometry.actions, geometry.first
    response, dv, dlam = work.response, work.dv, work.dlam
    p, s, t, clipped, code = response.p, response.s, response.t, response.clipped, response.code
    small = True
    for pair in range(s.shape[0]):
        start, stop = row[pair], row[pair + 1]
        if start == stop:
            continue
        change = -dv[pair // actions]
        for i in range(dlam.shape[0]):
            change -= dlam[i] * problem.costs[i, pair]
        top = -math.inf
        for e in range(start, stop):
            if clipped[pair] and code[e] != FREE:
                change += p[e] * dv[successor[e]]
            elif p[e] > 0.0:
                top = max(top, dv[successor[e]])
        if top > -math.inf:
            free = 0.0
            grown = 0.0
            for e in range(start, stop):
                if p[e] > 0.0 and not (clipped[pair] and code[e] != FREE):
                    free += p[e]
                    grown += p[e] * math.exp(dv[successor[e]] - top)
            rise = top + math.log(grown / free)
            change += free * rise
            t[pair] -= rise
            for e in range(start, stop):
                if p[e] > 0.0 and not (clipped[pair] and code[e] != FREE):
                    p[e] *= math.exp(dv[successor[e]] - rise)
                    small = small and problem.lower[e] - POLISHED <= p[e] <= problem.upper[e] + POLISHED
        if s[pair] > 0.0:
            small = small and change <= 1.0
            s[pair] *= math.exp(change)
    for k in range(first.shape[0] - 1):
        total = 0.0
        for pair in range(first[k] * actions, first[k + 1] * actions):
            total += s[pair]
        for pair in range(first[k] * actions, first[k + 1] * actions):
            s[pair] /= total
    flows(geometry, response)
    return small


@compiled
def polish(geometry, problem, cap, work):
    """Take out of the response what rounding of huge potentials and multipliers has left in it.

    They cannot take up the last steps of Newton's method, which are below their rounding; p and s can.
    """
    response, v, lam, used = work.response, work.v, work.lam, work.used
    for _ in range(MOST_POLISHED):
        spend(problem, response, used)
        flow, _, safety = kkt_residual(response, used, lam, cap)
        if max(flow, safety) <= POLISHED:
            break
        newton_step(geometry, problem, cap, work)
        if not follow(geometry, problem, work):
            evaluate(geometry, problem, response, v, lam)
            break
        move(work, 1.0, cap)
        copy(work.trial_v, v)
        copy(work.trial_lam, lam)


@compiled
def spread(target, upper):
    """The range of the target over transitions that may carry mass: how sharp the problem is."""
    largest = -math.inf
    smallest = math.inf
    for e in range(target.shape[0]):
        if upper[e] > 0.0 and target[e] > -math.inf:
            largest = max(largest, target[e])
            smallest = min(smallest, target[e])
    return max(largest - smallest, 0.0)


@compiled
def cooled_newton(geometry, problem, cap, tolerance, max_iterations, work):
    """Newton's method on target / temperature, from a temperature at which the problem is mild down to one.

    Potentials and multipliers scale with the temperature up to a bounded remainder, so each stage starts near its solution.
    """
    v, lam, target, upper = work.v, work.lam, problem.target, problem.upper
    temperature = max(1.0, (spread(target, upper) + cap) / 8.0)
    for j in range(v.shape[0]):
        v[j] = 0.0
    for i in range(lam.shape[0]):
        lam[i] = 0.0
    scaled = Problem(work.scaled, problem.lower, upper, problem.costs, problem.weight, problem.base)
    used = 0
    for stage in range(MOST_STAGES):
        last = temperature <= 1.0 or stage == MOST_STAGES - 1
        temperature = 1.0 if last else temperature
        for e in range(target.shape[0]):
            work.scaled[e] = target[e] / temperature
        weigh(geometry, work.scaled, upper, problem.weight, problem.base, work.response)
        stage_tolerance, stage_limit = (tolerance, max_iterations - used) if last else (1e-3, min(30, max_iterations - used))
        spent, converged = newton(geometry, scaled, cap / temperature, stage_tolerance, stage_limit, work)
        used += spent
        if last:
            return used, converged
        cooler = max(1.0, temperature / 4.0)
        for j in range(v.shape[0]):
            v[j] *= temperature / cooler
        for i in range(lam.shape[0]):
            lam[i] *= temperature / cooler
        temperature = cooler
    return used, False
