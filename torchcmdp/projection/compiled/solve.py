"""Newton's method on the dual, one instance after the other."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from torchcmdp.projection.compiled.linalg import assemble, box_quadratic, factor, schur, solve_lower, solve_upper
from torchcmdp.projection.compiled.pairs import OPTIONS, empty_response, evaluate, gradient
from torchcmdp.projection.limits import (
    ACCEPTABLE_GAP,
    ACCEPTABLE_RESIDUAL,
    LONGEST_MOVE,
    PLAIN_ITERATIONS,
    RELATIVE_TOLERANCE,
    SETTLED_RELATIVE,
)
from torchcmdp.status import ELASTIC, INVALID, MAX_ITERATIONS, SOLVED


@njit(**OPTIONS)
def kkt_residual(grad_v, inflow, outflow, grad_m, multipliers, cap):
    """The largest flow residual (absolute), the same relative to each state's throughput, and the safety residual."""
    flow = 0.0
    relative = 0.0
    for j in range(grad_v.shape[0]):
        flow = max(flow, abs(grad_v[j]))
        if inflow[j] + outflow[j] > 1e-250:
            relative = max(relative, abs(grad_v[j]) / (inflow[j] + outflow[j]))
    safety = 0.0
    for i in range(grad_m.shape[0]):
        cost = -grad_m[i]
        if multipliers[i] <= 0.0:
            safety = max(safety, cost)
        elif multipliers[i] >= cap:
            safety = max(safety, -cost)
        else:
            safety = max(safety, abs(cost))
    return flow, relative, safety


@njit(**OPTIONS)
def rebalance(v, trial_v, inflow, outflow):
    """Propose v(x) -= ln(inflow/outflow) / 2 where the two are far apart, and say whether they were anywhere.

    There the dual is an exponential in v(x), along which Newton's method moves by one a step however far it has to go.
    """
    far = False
    for j in range(v.shape[0]):
        trial_v[j] = v[j]
        if j > 0 and inflow[j] > 0.0 and outflow[j] > 0.0:
            imbalance = math.log(inflow[j]) - math.log(outflow[j])
            if abs(imbalance) > 3.0:
                trial_v[j] -= 0.5 * imbalance
                far = True
    return far


@njit(**OPTIONS)
def is_valid(widths, target, lower, upper, costs):
    """No NaN, no infinite cost, and intervals that hold a distribution."""
    for k in range(target.shape[0]):
        for x in range(widths[k]):
            for a in range(target.shape[2]):
                low = 0.0
                high = 0.0
                for y in range(widths[k + 1]):
                    if not (target[k, x, a, y] < math.inf and 0.0 <= lower[k, x, a, y] <= upper[k, x, a, y]):
                        return False
                    low += lower[k, x, a, y]
                    high += upper[k, x, a, y]
                if not (low <= 1.0 + 1e-9 and high >= 1.0 - 1e-9):
                    return False
                for i in range(costs.shape[0]):
                    if not abs(costs[i, k, x, a]) < math.inf:
                        return False
    return True


@njit(**OPTIONS)
def recover(widths, target, costs, p, s, multipliers, v, cap, occupancy, log_occupancy, mass, next_mass):
    """The occupancy of the dual's policy and kernel, by the forward recursion: flow and intervals then hold to rounding.

    Returns the duality gap of the elastic problem, the largest safety violation, and the violation at multipliers under the cap.
    """
    layers, actions = s.shape[0], s.shape[2]
    m = costs.shape[0]
    gap = v[0]
    used = np.zeros(m)
    mass[0] = 1.0
    for k in range(layers):
        next_mass[:] = 0.0
        for x in range(widths[k]):
            total = 0.0
            for a in range(actions):
                total += s[k, x, a]
            for a in range(actions):
                policy = s[k, x, a] / total if total > 0.0 else 1.0 / actions
                pair = mass[x] * policy
                for i in range(m):
                    used[i] += pair * costs[i, k, x, a]
                for y in range(widths[k + 1]):
                    q = pair * p[k, x, a, y]
                    occupancy[k, x, a, y] = q
                    next_mass[y] += q
                    if q > 0.0:
                        log_occupancy[k, x, a, y] = math.log(q)
                        gap += q * (log_occupancy[k, x, a, y] - target[k, x, a, y])
        mass[:] = next_mass
    violation = 0.0
    unpriced = 0.0
    for i in range(m):
        gap += cap * max(used[i], 0.0)
        violation = max(violation, used[i])
        if multipliers[i] < cap:
            unpriced = max(unpriced, used[i])
    return gap, violation, unpriced


@njit(**OPTIONS)
def newton_step(widths, offsets, costs, cap, response, system, v, lam, dv, dlam, grad_v, grad_m):
    """The Newton step (dv, dlam) of the dual within 0 <= multipliers <= cap; returns the slope along it and its longest move."""
    _, p, code, _, _, s = response
    hessian, border, corner, linear, low, high, m_work, free, m_step, m_matrix = system
    n, m = v.shape[0], lam.shape[0]
    assemble(widths, offsets, costs, p, code, s, hessian, border, corner)
    factor(widths, offsets, hessian)
    schur(widths, offsets, hessian, border, corner)
    for j in range(n):
        dv[j] = -grad_v[j]
    solve_lower(widths, offsets, hessian, dv)
    for i in range(m):
        linear[i] = grad_m[i]
        for j in range(n):
            linear[i] += border[j, i] * dv[j]
        low[i] = -lam[i]
        high[i] = cap - lam[i]
    box_quadratic(corner, linear, low, high, dlam, m_work, free, m_step, m_matrix)
    for i in range(m):
        for j in range(n):
            dv[j] -= border[j, i] * dlam[i]
    solve_upper(widths, offsets, hessian, dv)
    slope = 0.0
    longest = 0.0
    for j in range(n):
        slope += grad_v[j] * dv[j]
        longest = max(longest, abs(dv[j]))
    for i in range(m):
        slope += grad_m[i] * dlam[i]
    return slope, longest


@njit(**OPTIONS)
def newton(widths, offsets, target, lower, upper, costs, cap, tolerance, max_iterations, response, system, vectors, v, lam):
    """Minimise the dual from (v, lam), which are overwritten; returns the iterations spent and whether the tolerance was met."""
    z, p, code, t, exponents, s = response
    trial_v, dv, grad_v, inflow, outflow, trial_lam, dlam, grad_m = vectors
    value = evaluate(widths, offsets, target, lower, upper, costs, v, lam, z, p, code, t, exponents, s)
    best = math.inf
    stalled = 0
    rebalanced = 0
    # every violated constraint costs `cap` in the duality gap
    price = max(1.0, cap * lam.shape[0] / 500.0)
    for iteration in range(max_iterations + 1):
        gradient(widths, offsets, costs, p, s, grad_v, inflow, outflow, grad_m)
        flow, relative, safety = kkt_residual(grad_v, inflow, outflow, grad_m, lam, cap)
        worst = max(flow, price * safety)
        if worst <= tolerance and relative <= max(RELATIVE_TOLERANCE, tolerance):
            return iteration, True
        stalled = 0 if worst < 0.5 * best else stalled + 1
        best = min(best, worst)
        # rounding can keep huge potentials from settling any further; the certificate judges what was reached
        settled = stalled >= 4 and best <= ACCEPTABLE_RESIDUAL and relative <= SETTLED_RELATIVE
        if iteration == max_iterations or settled:
            return iteration, settled
        # the dual value cannot resolve the last steps, hence the slack
        slack = 1e-12 * (1.0 + abs(value))
        if rebalance(v, trial_v, inflow, outflow):
            trial_value = evaluate(widths, offsets, target, lower, upper, costs, trial_v, lam, z, p, code, t, exponents, s)
            if trial_value <= value + slack:
                v[:] = trial_v
                value = trial_value
                # a few in a row, but not for ever: states with next to no mass can trade imbalances in a circle
                rebalanced += 1
                if rebalanced % 8:
                    continue
                gradient(widths, offsets, costs, p, s, grad_v, inflow, outflow, grad_m)
            else:
                value = evaluate(widths, offsets, target, lower, upper, costs, v, lam, z, p, code, t, exponents, s)
        slope, longest = newton_step(widths, offsets, costs, cap, response, system, v, lam, dv, dlam, grad_v, grad_m)
        scale = min(1.0, LONGEST_MOVE / longest) if longest > 0.0 else 1.0
        while True:
            for j in range(v.shape[0]):
                trial_v[j] = v[j] + scale * dv[j]
            for i in range(lam.shape[0]):
                trial_lam[i] = min(max(lam[i] + scale * dlam[i], 0.0), cap)
            trial_value = evaluate(widths, offsets, target, lower, upper, costs, trial_v, trial_lam, z, p, code, t, exponents, s)
            if trial_value <= value + 1e-4 * scale * slope + slack or scale < 1e-10:
                break
            scale *= 0.5
        v[:] = trial_v
        lam[:] = trial_lam
        value = trial_value
    return max_iterations, False


@njit(**OPTIONS)
def spread(widths, target, upper):
    """The range of the target over transitions that may carry mass: how sharp the problem is."""
    largest = -math.inf
    smallest = math.inf
    for k in range(target.shape[0]):
        for x in range(widths[k]):
            for a in range(target.shape[2]):
                for y in range(widths[k + 1]):
                    if upper[k, x, a, y] > 0.0:
                        largest = max(largest, target[k, x, a, y])
                        smallest = min(smallest, target[k, x, a, y])
    return largest - smallest


@njit(**OPTIONS)
def cooled_newton(
    widths, offsets, target, lower, upper, costs, cap, tolerance, max_iterations, response, system, vectors, v, lam, scaled
):
    """Newton's method on target / temperature, from a temperature at which the problem is mild down to one.

    Potentials and multipliers scale with the temperature up to a bounded remainder, so each stage starts near its solution.
    """
    temperature = max(1.0, (spread(widths, target, upper) + cap) / 8.0)
    v[:] = 0.0
    lam[:] = 0.0
    used = 0
    while True:
        last = temperature <= 1.0
        scaled[:] = target / temperature
        stage_tolerance, stage_limit = (tolerance, max_iterations - used) if last else (1e-3, min(30, max_iterations - used))
        spent, converged = newton(
            widths,
            offsets,
            scaled,
            lower,
            upper,
            costs,
            cap / temperature,
            stage_tolerance,
            stage_limit,
            response,
            system,
            vectors,
            v,
            lam,
        )
        used += spent
        if last:
            return used, converged
        cooler = max(1.0, temperature / 4.0)
        v *= temperature / cooler
        for i in range(lam.shape[0]):
            lam[i] = min(lam[i] * (temperature / cooler), cap / cooler)
        temperature = cooler


@njit(**OPTIONS)
def solve_range(
    start, stop, widths, offsets, target, lower, upper, costs, cap, tolerance, max_iterations,
    occupancy, log_occupancy, potentials, multipliers, status, residual, gap, iterations,
):  # fmt: skip
    """Solve instances start..stop-1 of a batch, filling in the outputs. Instances share nothing but the work space."""
    layers, states, actions = target.shape[1], target.shape[2], target.shape[3]
    n, m = offsets[layers], costs.shape[1]
    mass, next_mass, scaled = np.zeros(states), np.zeros(states), np.empty((layers, states, actions, states))
    response = empty_response(layers, states, actions)
    system = (
        np.empty((n, n)), np.empty((n, m)), np.empty((m, m)), np.empty(m), np.empty(m), np.empty(m), np.empty(m),
        np.empty(m, np.bool_), np.empty(m), np.empty((m, m)),
    )  # fmt: skip
    vectors = (np.empty(n), np.empty(n), np.empty(n), np.empty(n), np.empty(n), np.empty(m), np.empty(m), np.empty(m))
    v, lam = np.empty(n), np.empty(m)
    for b in range(start, stop):
        if not is_valid(widths, target[b], lower[b], upper[b], costs[b]):
            status[b] = INVALID
            continue
        v[:] = 0.0
        lam[:] = 0.0
        plain = min(PLAIN_ITERATIONS, max_iterations)
        used, converged = newton(
            widths, offsets, target[b], lower[b], upper[b], costs[b], cap, tolerance, plain, response, system, vectors, v, lam
        )
        if not converged and plain < max_iterations:
            spent, converged = cooled_newton(
                widths, offsets, target[b], lower[b], upper[b], costs[b], cap, tolerance, max_iterations - plain,
                response, system, vectors, v, lam, scaled,
            )  # fmt: skip
            used += spent
        certificate, violation, unpriced = recover(
            widths, target[b], costs[b], response[1], response[5], lam, v, cap, occupancy[b], log_occupancy[b], mass, next_mass
        )
        for k in range(layers):
            for x in range(widths[k]):
                potentials[b, k, x] = v[offsets[k] + x]
        multipliers[b, :] = lam
        gap[b] = certificate
        residual[b] = unpriced
        iterations[b] = used
        elastic = violation > ACCEPTABLE_RESIDUAL
        # at the cap the gap is a difference of numbers as large as the dual value
        allowed = ACCEPTABLE_GAP * (1.0 + abs(v[0])) if elastic else ACCEPTABLE_GAP
        if unpriced <= ACCEPTABLE_RESIDUAL and certificate <= allowed:
            status[b] = ELASTIC if elastic else SOLVED
        else:
            status[b] = MAX_ITERATIONS
