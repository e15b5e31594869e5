"""The KL projection of one instance onto its safe set, with a certificate; and of a batch, over threads."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.cpu import compiled, entry
from torchcmdp.kernels.emptiness import least_violation
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.limits import (
    ACCEPTABLE_GAP,
    ACCEPTABLE_RESIDUAL,
    CERTAIN,
    HIGHEST_CAP,
    LARGEST_GAP,
    PLAIN_ITERATIONS,
    WARM_ITERATIONS,
)
from torchcmdp.kernels.newton import cooled_newton, copy, full, newton, polish
from torchcmdp.kernels.pairs import FREE, Problem, weigh
from torchcmdp.kernels.threads import over_batch
from torchcmdp.kernels.work import carve, room
from torchcmdp.status import Status

SOLVED, ELASTIC, MAX_ITERATIONS, INVALID = (
    int(status) for status in (Status.SOLVED, Status.ELASTIC, Status.MAX_ITERATIONS, Status.INVALID)
)

ROOT_HALF = math.sqrt(0.5)


class Limits(NamedTuple):
    """When to stop: see `Newton`."""

    multiplier_cap: float
    tolerance: float
    max_iterations: int


@compiled
def is_valid(geometry, target, lower, upper, costs):
    """No NaN, no infinite cost, and intervals that hold a distribution."""
    row = geometry.row
    for pair in range(row.shape[0] - 1):
        if row[pair] == row[pair + 1]:
            continue
        low = 0.0
        high = 0.0
        for e in range(row[pair], row[pair + 1]):
            if not (target[e] < math.inf and 0.0 <= lower[e] <= upper[e]):
                return False
            low += lower[e]
            high += upper[e]
        if not (low <= 1.0 + 1e-9 and high >= 1.0 - 1e-9):
            return False
    for i in range(costs.shape[0]):
        for pair in range(costs.shape[1]):
            if not abs(costs[i, pair]) < math.inf:
                return False
    return True


@compiled
def normalise(costs, scaled, scale):
    """scaled <- each constraint in units of its largest cost, rounded to a power of two.

    Tolerances and penalties then mean the same whatever unit the costs came in, and a power of two is constant near almost all
    costs: derivatives need not know of it.
    """
    for i in range(costs.shape[0]):
        largest = 0.0
        for pair in range(costs.shape[1]):
            largest = max(largest, abs(costs[i, pair]))
        mantissa, exponent = math.frexp(largest)
        scale[i] = math.ldexp(1.0, exponent if mantissa > ROOT_HALF else exponent - 1) if largest > 0.0 else 1.0
        for pair in range(costs.shape[1]):
            scaled[i, pair] = costs[i, pair] / scale[i]


@compiled
def recover(geometry, problem, response, v, used, occupancy, log_occupancy):
    """The occupancy of the dual's policy and kernel, by the forward recursion: flow and intervals then hold to rounding.

    `used` becomes what it spends of each constraint. Returns the objective sum q (ln q - target) plus the dual value v(x_0).
    """
    actions, row, successor = geometry.actions, geometry.row, geometry.successor
    p, s, mass, target, costs = response.p, response.s, response.inflow, problem.target, problem.costs
    n = mass.shape[0] - 1
    for i in range(used.shape[0]):
        used[i] = 0.0
    for j in range(n + 1):
        mass[j] = 0.0
    mass[0] = 1.0
    surplus = v[0]
    for j in range(n):
        # outflow and s are a state's policy up to a factor
        out = response.outflow[j]
        own = 0
        for pair in range(j * actions, (j + 1) * actions):
            own += row[pair + 1] > row[pair]
        for pair in range(j * actions, (j + 1) * actions):
            start, stop = row[pair], row[pair + 1]
            if start == stop:
                continue
            occupied = mass[j] * (s[pair] / out if out > 0.0 else 1.0 / own)
            for i in range(used.shape[0]):
                used[i] += occupied * costs[i, pair]
            heaviest = start
            for e in range(start, stop):
                q = occupied * p[e]
                occupancy[e] = q
                mass[successor[e]] += q
                if q > occupancy[heaviest]:
                    heaviest = e
            # ln q - ln z is the same number for all free entries of a pair: one logarithm is enough
            free = -math.inf
            log_occupied = -math.inf
            if response.clipped[pair] and occupied > 0.0:
                log_occupied = math.log(occupied)
                free = log_occupied + response.t[pair]
            elif occupancy[heaviest] > 0.0:
                free = math.log(occupancy[heaviest]) - target[heaviest] - v[successor[heaviest]]
            for e in range(start, stop):
                q = occupancy[e]
                log_q = -math.inf
                if q > 0.0:
                    if response.clipped[pair] and response.code[e] != FREE:
                        log_q = log_occupied + response.log_p[e]
                    else:
                        log_q = free + target[e] + v[successor[e]]
                    surplus += q * (log_q - target[e])
                log_occupancy[e] = log_q
    return surplus


@compiled
def certify(surplus, used, lam, cap):
    """The duality gap, the largest violation, and what of it the multipliers do not price, from `recover`.

    The gap is that of the problem with penalty sum(lam) * largest violation, which has the same solution for every cap above.
    """
    violation = 0.0
    total = 0.0
    level = 0.0
    for i in range(lam.shape[0]):
        violation = max(violation, used[i])
        total += lam[i]
        level += lam[i] * used[i] / cap
    unpriced = violation - max(level, 0.0) if full(lam, cap) else violation
    return surplus + total * violation, violation, unpriced


@compiled
def solve(geometry, problem, cap, limits, warm, work, occupancy, log_occupancy):
    """Solve with this cap, from zero if not `warm`; returns iterations, gap, violation and its unpriced part."""
    v, lam = work.v, work.lam
    plain = min(WARM_ITERATIONS if warm else PLAIN_ITERATIONS, limits.max_iterations)
    iterations, spent, converged, first = 0, 0, False, math.inf
    gap, violation, unpriced = math.inf, math.inf, math.inf
    for attempt in range(3):
        if attempt == 1:
            spent, converged = cooled_newton(geometry, problem, cap, limits.tolerance, limits.max_iterations - iterations, work)
        else:
            if not warm:
                for j in range(v.shape[0]):
                    v[j] = 0.0
                for i in range(lam.shape[0]):
                    lam[i] = 0.0
            weigh(geometry, problem.target, problem.upper, problem.weight, problem.base, work.response)
            spent, converged = newton(geometry, problem, cap, limits.tolerance, plain, work)
        iterations += spent if attempt < 2 else 0  # the last attempt is the first one again
        value = v[0]
        if cap > limits.multiplier_cap:
            polish(geometry, problem, cap, work)
        surplus = recover(geometry, problem, work.response, v, work.used, occupancy, log_occupancy)
        gap, violation, unpriced = certify(surplus, work.used, lam, cap)
        # what rounding lets pass for converged may still be far from safe
        if (converged and unpriced <= ACCEPTABLE_RESIDUAL) or plain >= limits.max_iterations:
            break
        if attempt == 1 and (warm or value <= first + 1e-12 * (1.0 + abs(first))):  # else cooling has led astray
            break
        first = value
    return iterations, gap, violation, unpriced


@compiled
def is_empty(geometry, problem, before, work):
    """Whether the multipliers prove that the safe set is empty, or what has come to them since `before`.

    As the cap rises they tend to a line whose direction is the best proof there is; where it starts is forgotten slowly.
    """
    for i in range(before.shape[0]):
        work.trial_lam[i] = max(work.lam[i] - before[i], 0.0)
    best = max(
        least_violation(geometry, problem, work.response, work.lam),
        least_violation(geometry, problem, work.response, work.trial_lam),
    )
    return best > CERTAIN


@compiled
def project_one(geometry, target, lower, upper, costs, limits, work, occupancy, log_occupancy, potentials, multipliers):
    """The projection of exp(target) in KL divergence; where the safe set is empty, with the penalty cap * largest violation.

    A violation counts in units of its constraint (see `normalise`), and so does the cap.

    Args:
        target, lower, upper: `(E)`.
        costs: `(m x P)`.
        limits: `Limits`; its budget of iterations is that of one solve, and of another one for every time the cap is raised.
        work: `workspace(geometry, m)`.
        occupancy, log_occupancy, potentials, multipliers: outputs, `(E)`, `(E)`, `(n)`, `(m)`.

    Returns:
        status, iterations, residual, gap.
    """
    lam, cap = work.lam, limits.multiplier_cap
    if not is_valid(geometry, target, lower, upper, costs):
        return INVALID, 0, 0.0, 0.0
    normalise(costs, work.costs, work.scale)
    problem = Problem(target, lower, upper, work.costs, work.weight, work.base)
    iterations, gap, violation, unpriced = solve(geometry, problem, cap, limits, False, work, occupancy, log_occupancy)
    empty = False
    if violation > ACCEPTABLE_RESIDUAL and full(lam, cap):
        # a multiplier at the cap may mean an empty set or a cap that is too low: raise it until one of the two is certain
        empty = least_violation(geometry, problem, work.response, lam) > CERTAIN
        while not empty and violation > ACCEPTABLE_RESIDUAL and full(lam, cap) and cap < HIGHEST_CAP:
            cap *= 10.0
            copy(lam, multipliers)
            spent, gap, violation, unpriced = solve(geometry, problem, cap, limits, True, work, occupancy, log_occupancy)
            iterations += spent
            empty = violation > ACCEPTABLE_RESIDUAL and is_empty(geometry, problem, multipliers, work)
        if empty and cap > limits.multiplier_cap:
            cap = limits.multiplier_cap
            spent, gap, violation, unpriced = solve(geometry, problem, cap, limits, False, work, occupancy, log_occupancy)
            iterations += spent
    for j in range(potentials.shape[0]):
        potentials[j] = work.v[j]
    for i in range(lam.shape[0]):
        multipliers[i] = lam[i] / work.scale[i]
    # at the cap the gap is a difference of numbers as large as the dual value, and it grows with the multipliers
    allowed = ACCEPTABLE_GAP * (1.0 + abs(work.v[0])) if empty else min(LARGEST_GAP, ACCEPTABLE_GAP * cap / limits.multiplier_cap)
    status = MAX_ITERATIONS
    if gap <= allowed and unpriced <= ACCEPTABLE_RESIDUAL and (empty or violation <= ACCEPTABLE_RESIDUAL):
        status = ELASTIC if empty else SOLVED
    return status, iterations, unpriced, gap


@compiled
def gather(geometry, target, lower, upper, costs, instance):
    """The inputs of one instance without their padding."""
    entry_at, pair_at = geometry.entry_at, geometry.pair_at
    for e in range(entry_at.shape[0]):
        at = entry_at[e]
        instance.target[e] = target[at]
        instance.lower[e] = lower[at]
        instance.upper[e] = upper[at]
    for i in range(costs.shape[0]):
        for pair in range(pair_at.shape[0]):
            instance.costs[i, pair] = costs[i, pair_at[pair]]


@entry
def project_range(
    start, stop, geometry, target, lower, upper, costs, limits, reals, codes,
    occupancy, log_occupancy, potentials, multipliers, status, residual, gap, iterations,
):  # fmt: skip
    """Solve instances start..stop-1 of a batch of flattened padded tensors, filling in the outputs; padding is left alone."""
    entry_at, state_at = geometry.entry_at, geometry.state_at
    work, instance = carve(geometry, costs.shape[1], reals, codes)
    for b in range(start, stop):
        gather(geometry, target[b], lower[b], upper[b], costs[b], instance)
        status[b], iterations[b], residual[b], gap[b] = project_one(
            geometry, instance.target, instance.lower, instance.upper, instance.costs, limits, work,
            instance.occupancy, instance.log_occupancy, instance.potentials, instance.multipliers,
        )  # fmt: skip
        if status[b] == INVALID:
            continue
        for e in range(entry_at.shape[0]):
            occupancy[b, entry_at[e]] = instance.occupancy[e]
            log_occupancy[b, entry_at[e]] = instance.log_occupancy[e]
        for j in range(state_at.shape[0]):
            potentials[b, state_at[j]] = instance.potentials[j]
        for i in range(costs.shape[1]):
            multipliers[b, i] = instance.multipliers[i]


class Batch(NamedTuple):
    """The outputs of `project_batch`, over flattened padded tensors, in the order of `ProjectionResult`."""

    occupancy: np.ndarray
    log_occupancy: np.ndarray
    potentials: np.ndarray
    multipliers: np.ndarray
    status: np.ndarray
    residual: np.ndarray
    gap: np.ndarray
    iterations: np.ndarray


def project_batch(
    geometry: Geometry, target: np.ndarray, lower: np.ndarray, upper: np.ndarray, costs: np.ndarray, *, states: int, limits: Limits
) -> Batch:
    """Project a batch of padded instances.

    Args:
        target, lower, upper: `(B x (L*S*A*K))`, C-contiguous float64.
        costs: `(B x m x (L*S*A))`.
        states: L * S, the size of the padded potentials.
    """
    batch, m = costs.shape[:2]
    log_occupancy = np.empty(target.shape)
    log_occupancy.fill(-np.inf)  # `np.full` takes twice as long
    outputs = Batch(
        np.zeros(target.shape), log_occupancy, np.zeros((batch, states)), np.zeros((batch, m)),
        np.zeros(batch, np.int8), np.zeros(batch), np.zeros(batch), np.zeros(batch, np.int64),
    )  # fmt: skip

    def kernel(start: int, stop: int) -> None:
        project_range(start, stop, geometry, target, lower, upper, costs, limits, *room(geometry, m), *outputs)

    over_batch(kernel, batch, len(geometry.entry_at))
    return outputs
