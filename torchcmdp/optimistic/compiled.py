"""Column generation for the optimistic linear program, one instance after the other.

The plausible kernels are a product over pairs, so for given multipliers the best occupancy is a backward recursion. The program
over mixtures of such occupancies has only m + 1 rows; it is solved by the simplex method, which asks the recursion for its columns.
A basis holds occupancies, slacks of constraints and, until a safe mixture is found, one column for the common violation s.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from torchcmdp.kernels.cpu import FASTMATH
from torchcmdp.optimistic.problem import FEASIBILITY, IMPROVEMENT, RELAXATION, ROUNDING, SMALLEST_PIVOT
from torchcmdp.status import INFEASIBLE, INVALID, MAX_ITERATIONS, SOLVED

# What a column of the basis is, if it is not the slack of constraint i >= 0.
OCCUPANCY, COMMON = -1, -2


OPTIONS = {"cache": True, "nogil": True, "fastmath": FASTMATH}


@njit(**OPTIONS)
def is_valid(widths, rewards, lower, upper, costs):
    """No NaN, nothing infinite, and intervals that hold a distribution."""
    for k in range(rewards.shape[0]):
        for x in range(widths[k]):
            for a in range(rewards.shape[2]):
                low = 0.0
                high = 0.0
                for y in range(widths[k + 1]):
                    if not 0.0 <= lower[k, x, a, y] <= upper[k, x, a, y]:
                        return False
                    low += lower[k, x, a, y]
                    high += upper[k, x, a, y]
                if not (low <= 1.0 + 1e-9 and high >= 1.0 - 1e-9 and math.isfinite(rewards[k, x, a])):
                    return False
                for i in range(costs.shape[0]):
                    if not math.isfinite(costs[i, k, x, a]):
                        return False
    return True


@njit(**OPTIONS)
def sort_descending(values, n, order):
    """order[:n] <- the indices of values[:n] from the largest down; equal ones keep their order."""
    for j in range(n):
        i = j
        while i > 0 and values[order[i - 1]] < values[j]:
            order[i] = order[i - 1]
            i -= 1
        order[i] = j


@njit(**OPTIONS)
def best_occupancy(widths, lower, upper, pair_reward, values, order, best, chosen, reach, occupancy):
    """The occupancy of the plausible kernel and deterministic policy with the largest total reward; ties: the lowest action."""
    layers, states, actions = pair_reward.shape
    values[:] = 0.0
    row = np.empty(states)
    new = np.empty(states)
    for k in range(layers - 1, -1, -1):
        n = widths[k + 1]
        sort_descending(values, n, order)
        for x in range(widths[k]):
            top = -math.inf
            for a in range(actions):
                rest = 1.0
                for y in range(n):
                    rest -= lower[k, x, a, y]
                total = pair_reward[k, x, a]
                for j in range(n):
                    y = order[j]
                    take = min(upper[k, x, a, y] - lower[k, x, a, y], max(rest, 0.0))
                    rest -= take
                    row[y] = lower[k, x, a, y] + take
                    total += row[y] * values[y]
                if total > top:
                    top = total
                    best[k, x] = a
                    for y in range(n):
                        chosen[k, x, y] = row[y]
            new[x] = top
        for x in range(widths[k]):
            values[x] = new[x]
    occupancy[:, :, :, :] = 0.0
    reach[:, :] = 0.0
    reach[0, 0] = 1.0
    for k in range(layers):
        for x in range(widths[k]):
            for y in range(widths[k + 1]):
                mass = reach[k, x] * chosen[k, x, y]
                occupancy[k, x, best[k, x], y] = mass
                reach[k + 1, y] += mass


@njit(**OPTIONS)
def price(widths, values, reach, best):
    """<values, q> of the deterministic policy `best` that reaches its states with probability `reach`."""
    total = 0.0
    for k in range(values.shape[0]):
        for x in range(widths[k]):
            total += reach[k, x] * values[k, x, best[k, x]]
    return total


@njit(**OPTIONS)
def invert(matrix, inverse):
    """inverse <- matrix^-1 by Gauss-Jordan elimination with row pivoting; `matrix` is overwritten."""
    n = matrix.shape[0]
    inverse[:, :] = 0.0
    for i in range(n):
        inverse[i, i] = 1.0
    for c in range(n):
        pivot = c
        for i in range(c + 1, n):
            if abs(matrix[i, c]) > abs(matrix[pivot, c]):
                pivot = i
        if pivot != c:
            for j in range(n):
                matrix[c, j], matrix[pivot, j] = matrix[pivot, j], matrix[c, j]
                inverse[c, j], inverse[pivot, j] = inverse[pivot, j], inverse[c, j]
        head = matrix[c, c]
        for j in range(n):
            matrix[c, j] /= head
            inverse[c, j] /= head
        for i in range(n):
            factor = matrix[i, c]
            if i != c and factor != 0.0:
                for j in range(n):
                    matrix[i, j] -= factor * matrix[c, j]
                    inverse[i, j] -= factor * inverse[c, j]


@njit(**OPTIONS)
def leaving_row(point, direction, kinds):
    """The first basic variable to reach zero along -direction, the common violation first among equals; -1 if none does.

    The first pass finds the longest step that leaves every variable above minus a hair, the second takes the largest pivot among
    those that block it: small pivots would ruin the basis.
    """
    hair = 1e-12
    longest = math.inf
    for j in range(point.shape[0]):
        if direction[j] > SMALLEST_PIVOT:
            longest = min(longest, (max(point[j], 0.0) + hair) / direction[j])
    leaving = -1
    for j in range(point.shape[0]):
        if direction[j] > SMALLEST_PIVOT and max(point[j], 0.0) <= longest * direction[j]:
            if kinds[j] == COMMON:
                return j
            if leaving < 0 or direction[j] > direction[leaving]:
                leaving = j
    return leaving


@njit(**OPTIONS)
def basic_solution(basis, limits, work, inverse, point):
    """inverse <- basis^-1 and point <- the values of the basic variables."""
    n = limits.shape[0]
    work[:, :] = basis
    invert(work, inverse)
    for j in range(n):
        point[j] = 0.0
        for i in range(n):
            point[j] += inverse[j, i] * limits[i]


@njit(**OPTIONS)
def find_duals(inverse, kinds, gain, first_phase, duals):
    """The duals of the objective: minus the common violation in the first phase, the reward in the second."""
    n = duals.shape[0]
    duals[:] = 0.0
    for j in range(n):
        worth = gain[j]
        if first_phase:
            worth = -1.0 if kinds[j] == COMMON else 0.0
        for i in range(n):
            duals[i] += worth * inverse[j, i]


@njit(**OPTIONS)
def lagrangian(widths, rewards, costs, duals, first_phase, pair_reward):
    """pair_reward <- rewards - sum_i duals_i costs_i, without the rewards in the first phase."""
    for k in range(rewards.shape[0]):
        for x in range(widths[k]):
            for a in range(rewards.shape[2]):
                total = 0.0 if first_phase else rewards[k, x, a]
                for i in range(costs.shape[0]):
                    total -= duals[i] * costs[i, k, x, a]
                pair_reward[k, x, a] = total


@njit(**OPTIONS)
def start_basis(widths, costs, reach, best, basis, kinds):
    """The slacks and one occupancy; where it is unsafe, the most violated constraint hands its place to the common violation.

    Returns whether the occupancy is safe.
    """
    m = costs.shape[0]
    kinds[m] = OCCUPANCY
    basis[m, m] = 1.0
    worst = -1
    for i in range(m):
        kinds[i] = i
        basis[i, i] = 1.0
        basis[i, m] = price(widths, costs[i], reach, best)
        if basis[i, m] > 0.0 and (worst < 0 or basis[i, m] > basis[worst, m]):
            worst = i
    if worst >= 0:
        kinds[worst] = COMMON
        for i in range(m):
            basis[i, worst] = -1.0
    return worst < 0


@njit(**OPTIONS)
def end_first_phase(violation, row, basis, kinds, limits, answer):
    """Fix the violation that cannot be avoided: its column turns into a slack that all constraints share. Returns the status."""
    m = limits.shape[0] - 1
    excess = max(violation, 0.0)
    infeasible = excess > FEASIBILITY
    if infeasible:
        answer[1] = excess
    for i in range(m):
        limits[i] = excess + RELAXATION if infeasible else excess
        basis[i, row] = 1.0
    kinds[row] = m  # a slack, but of no constraint in particular
    return INFEASIBLE if infeasible else SOLVED


@njit(**OPTIONS)
def mix(point, kinds, gain, columns, occupancy, answer):
    """occupancy <- the mixture of the basic occupancies, answer[0] <- its value."""
    total = 0.0
    for j in range(point.shape[0]):
        if kinds[j] == OCCUPANCY:
            total += max(point[j], 0.0)
    for j in range(point.shape[0]):
        if kinds[j] == OCCUPANCY and point[j] > 0.0:
            weight = point[j] / total
            answer[0] += weight * gain[j]
            occupancy += weight * columns[j]


@njit(**OPTIONS)
def solve_one(widths, rewards, lower, upper, costs, max_iterations, occupancy, multipliers, answer):
    """One instance: fills in the occupancy, the multipliers and (value, excess, residual); returns status and iterations."""
    layers, states, actions = rewards.shape
    m = costs.shape[0]
    n = m + 1  # rows: the m constraints, then the weights that sum to one
    scratch = (np.zeros(states), np.zeros(states, np.int64))
    best, chosen = np.zeros((layers, states), np.int64), np.zeros((layers, states, states))
    reach, pair_reward = np.zeros((layers + 1, states)), rewards.copy()
    columns, trial = np.zeros((n, layers, states, actions, states)), np.zeros((layers, states, actions, states))
    kinds, gain, limits, entering = np.zeros(n, np.int64), np.zeros(n), np.zeros(n), np.zeros(n)
    basis, work, inverse = np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n))
    point, direction, duals = np.zeros(n), np.zeros(n), np.zeros(n)

    best_occupancy(widths, lower, upper, pair_reward, *scratch, best, chosen, reach, columns[m])
    gain[m] = price(widths, rewards, reach, best)
    limits[m] = 1.0
    if start_basis(widths, costs, reach, best, basis, kinds):
        occupancy[:, :, :, :] = columns[m]
        answer[0] = gain[m]
        return SOLVED, 1

    status, first_phase, iteration = SOLVED, True, 1
    while True:
        iteration += 1
        basic_solution(basis, limits, work, inverse, point)
        common = -1
        for j in range(n):
            if kinds[j] == COMMON:
                common = j
        first_phase = first_phase and common >= 0
        find_duals(inverse, kinds, gain, first_phase, duals)
        lagrangian(widths, rewards, costs, duals, first_phase, pair_reward)
        best_occupancy(widths, lower, upper, pair_reward, *scratch, best, chosen, reach, trial)
        promise = price(widths, pair_reward, reach, best) - duals[m]
        tolerance = IMPROVEMENT + ROUNDING * np.abs(duals[:m]).max()
        slack = int(np.argmin(duals[:m]))
        by_slack = -duals[slack] > max(promise, tolerance)
        if promise <= tolerance and not by_slack:
            if not first_phase:
                break
            status = end_first_phase(point[common], common, basis, kinds, limits, answer)
            first_phase = False
            continue
        entering[:] = 0.0
        if by_slack:
            entering[slack] = 1.0
        else:
            entering[m] = 1.0
            for i in range(m):
                entering[i] = price(widths, costs[i], reach, best)
        for j in range(n):
            direction[j] = 0.0
            for i in range(n):
                direction[j] += inverse[j, i] * entering[i]
        row = leaving_row(point, direction, kinds)
        if row < 0 or iteration >= max_iterations:  # the first is impossible in exact arithmetic: the program is bounded
            status = MAX_ITERATIONS
            break
        basis[:, row] = entering
        kinds[row] = slack if by_slack else OCCUPANCY
        gain[row] = 0.0 if by_slack else price(widths, rewards, reach, best)
        if not by_slack:
            columns[row] = trial
    answer[2] = max(promise, 0.0)
    mix(point, kinds, gain, columns, occupancy, answer)
    for i in range(m):
        multipliers[i] = max(duals[i], 0.0)
    return status, iteration


@njit(**OPTIONS)
def solve_range(
    start, stop, widths, rewards, lower, upper, costs, max_iterations, occupancy, multipliers, answers, status, iterations
):
    """Solve the instances from start to stop."""
    for b in range(start, stop):
        if not is_valid(widths, rewards[b], lower[b], upper[b], costs[b]):
            status[b] = INVALID
            continue
        status[b], iterations[b] = solve_one(
            widths, rewards[b], lower[b], upper[b], costs[b], max_iterations, occupancy[b], multipliers[b], answers[b]
        )
