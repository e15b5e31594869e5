"""Column generation for the optimistic linear program of one instance.

The plausible kernels are a product over pairs, so for given multipliers the best occupancy is a backward recursion. The program
over mixtures of such occupancies has only m + 1 rows; it is solved by the simplex method, which asks the recursion for its columns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.confidence import (
    EXACT,
    KernelSet,
    Room,
    empty_room,
    expect_in_order,
    gift,
    sort_down_again,
    sort_row_down,
)
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.limits import IMPROVEMENT, ROUNDING
from torchcmdp.kernels.options import formula, kernel
from torchcmdp.kernels.simplex import (
    OCCUPANCY,
    Simplex,
    basic_solution,
    empty_simplex,
    end_first_phase,
    find_duals,
    leaving_row,
    replace,
    start,
)
from torchcmdp.status import INFEASIBLE, MAX_ITERATIONS, SOLVED


class Work(NamedTuple):
    """Work space of one program: nothing in it survives from one call to the next.

    Attributes:
        place: Which of the following belongs to each column of the basis, and last which to the recursion, `(m + 2,)` int64.
        best: The pair chosen in each state, `((m + 2) x n)` int64.
        rows: Where these pairs lead, `((m + 2) x E)`, and nothing at others.
        mass: How much reaches the states, `((m + 2) x (n + 1))`.
        pair_reward: What the last recursion maximised, `(P,)`.
    """

    simplex: Simplex
    room: Room
    place: np.ndarray
    best: np.ndarray
    rows: np.ndarray
    mass: np.ndarray
    pair_reward: np.ndarray


class Program(NamedTuple):
    """max <rewards, q> over occupancies of the kernels with <costs_i, q> <= 0: `(P,)`, a set of boxes, `(m x P)`."""

    rewards: np.ndarray
    kernels: KernelSet
    costs: np.ndarray


def workspace(geometry: Geometry, constraints: int) -> Work:
    """Room for programs of this geometry with so many constraints, one after the other."""
    states, pairs, entries, slots = len(geometry.state_at), len(geometry.pair_at), len(geometry.successor), constraints + 2
    place, best = np.zeros(slots, np.int64), np.zeros((slots, states), np.int64)
    sizes = ((slots, entries), (slots, states + 1), pairs)
    return Work(empty_simplex(constraints), empty_room(geometry), place, best, *(np.zeros(size) for size in sizes))


@kernel
def is_sound(geometry, p, rewards, lower, upper, costs):
    """No NaN, nothing infinite, and intervals that hold a distribution, at pair p."""
    if geometry.row[p] == geometry.row[p + 1]:
        return True
    low, high = 0.0, 0.0
    for e in range(geometry.row[p], geometry.row[p + 1]):
        if not 0.0 <= lower[e] <= upper[e]:
            return False
        low += lower[e]
        high += upper[e]
    sound = low <= 1.0 + 1e-9 and high >= 1.0 - 1e-9 and abs(rewards[p]) < math.inf
    for i in range(costs.shape[0]):
        sound = sound and abs(costs[i, p]) < math.inf
    return sound


@kernel
def best_policy(geometry, kernels, reward, work):
    """The plausible kernel and the deterministic policy with the largest total reward; ties go to the lowest action.

    Returns that reward; the kernel follows from the values of the states, and is made by `flow`.
    """
    first, row, actions, space = geometry.first, geometry.row, geometry.actions, work.room
    values, ahead, best = space.values, space.ahead, work.best[work.place[-1]]
    layers = first.shape[0] - 1
    for k in range(layers - 1, -1, -1):
        last = k == layers - 1
        if not last:
            if geometry.dense[k] == 1 and kernels.kind != EXACT:
                sort_down_again(values, first[k + 1], first[k + 2] - first[k + 1], space.order)
            expect_in_order(geometry, kernels, k, space, ahead)
        for x in range(first[k], first[k + 1]):
            top, chosen = -math.inf, best[x]
            for p in range(x * actions, (x + 1) * actions):
                total = reward[p] if last else reward[p] + ahead[p]
                better = row[p] < row[p + 1] and total > top
                top, chosen = total if better else top, p if better else chosen
            best[x] = chosen
            values[x] = top
    return values[0]


@kernel
def flow(geometry, kernels, work):
    """How much of the occupancy of `best_policy` reaches every state: only for those that come into the basis."""
    first, row, successor, space, last = geometry.first, geometry.row, geometry.successor, work.room, work.place[-1]
    values, order, lower, upper = space.values, space.order, kernels.lower, kernels.upper
    best, rows, mass = work.best[last], work.rows[last], work.mass[last]
    for x in range(mass.shape[0]):
        mass[x] = 0.0
    mass[0] = 1.0
    for k in range(first.shape[0] - 1):
        base = first[k + 1]
        for x in range(first[k], base):
            begin, end, left = row[best[x]], row[best[x] + 1], kernels.left[best[x]]
            if end - begin == 1:
                rows[begin] = 1.0
                mass[successor[begin]] += mass[x]
                continue
            if kernels.kind == EXACT:
                for e in range(begin, end):
                    rows[e] = lower[e]
                    mass[successor[e]] += mass[x] * lower[e]
                continue
            if geometry.dense[k] == 0:
                sort_row_down(values, successor, begin, end, base, order)
            for j in range(end - begin):  # the p of `best_in_box`
                e = begin + order[base + j]
                moved = gift(left, upper[e] - lower[e])
                left -= moved
                rows[e] = lower[e] + moved
                mass[successor[e]] += mass[x] * rows[e]


@kernel
def keep(work, column):
    """The occupancy of the last recursion becomes a column, and the next recursion goes where that was."""
    place = work.place
    place[column], place[-1] = place[-1], place[column]


@kernel
def total(values, work):
    """<values, q> of the last recursion's occupancy."""
    found, best, mass = 0.0, work.best[work.place[-1]], work.mass[work.place[-1]]
    for x in range(best.shape[0]):
        found += mass[x] * values[best[x]]
    return found


@formula
def take_off(share, values, factor, costs, i, out):
    """out <- share values - factor costs_i; four at a time, which is written out because loops are not put into vectors."""
    fours = out.shape[0] // 4 * 4
    for p in range(0, fours, 4):
        first, second = share * values[p] - factor * costs[i, p], share * values[p + 1] - factor * costs[i, p + 1]
        third, fourth = share * values[p + 2] - factor * costs[i, p + 2], share * values[p + 3] - factor * costs[i, p + 3]
        out[p], out[p + 1], out[p + 2], out[p + 3] = first, second, third, fourth
    for p in range(fours, out.shape[0]):
        out[p] = share * values[p] - factor * costs[i, p]


@kernel
def price(geometry, program, first_phase, work):
    """The best column at the duals in force, by rewards - sum_i duals_i costs_i, without the rewards in the first phase.

    Returns what it promises.
    """
    costs, duals, pair_reward = program.costs, work.simplex.duals, work.pair_reward
    m, share = costs.shape[0], 0.0 if first_phase else 1.0
    take_off(share, program.rewards, duals[0], costs, 0, pair_reward)
    for i in range(1, m):
        take_off(1.0, pair_reward, duals[i], costs, i, pair_reward)
    return best_policy(geometry, program.kernels, pair_reward, work) - duals[m]


@kernel
def first_column(geometry, program, work):
    """The basis of the best occupancy of all; returns whether that is safe."""
    simplex, m = work.simplex, program.costs.shape[0]
    for j in range(m + 2):
        work.place[j] = j
    best_policy(geometry, program.kernels, program.rewards, work)
    flow(geometry, program.kernels, work)
    for i in range(m):
        simplex.basis[i, m] = total(program.costs[i], work)
    simplex.gain[m] = total(program.rewards, work)
    keep(work, m)
    return start(simplex)


@kernel
def enter(program, slack, work):
    """entering <- the slack of a constraint, or if it is none the costs of the last recursion's occupancy."""
    entering, m = work.simplex.entering, program.costs.shape[0]
    for i in range(m):
        if slack >= 0:
            entering[i] = 1.0 if i == slack else 0.0
        else:
            entering[i] = total(program.costs[i], work)
    entering[m] = 0.0 if slack >= 0 else 1.0


@kernel
def improve(geometry, program, max_iterations, work):
    """Pivot until nothing promises to improve; returns status, iterations, what is left open, and the least violation."""
    simplex, m = work.simplex, program.costs.shape[0]
    excess, first_phase, iteration = 0.0, True, 1
    while True:
        iteration += 1
        common = basic_solution(simplex)
        first_phase = first_phase and common >= 0
        find_duals(simplex, first_phase)
        promise = price(geometry, program, first_phase, work)
        if not abs(promise) < math.inf:  # rounding has made the basis singular
            return MAX_ITERATIONS, iteration, 0.0, excess
        slack, largest = 0, 0.0
        for i in range(m):
            largest = max(largest, abs(simplex.duals[i]))
            if simplex.duals[i] < simplex.duals[slack]:
                slack = i
        tolerance = IMPROVEMENT + ROUNDING * largest
        if promise > tolerance:
            # with the rounding of the columns: what is in the basis already promises nothing, and must not enter again
            flow(geometry, program.kernels, work)
            promise = total(work.pair_reward, work) - simplex.duals[m]
        by_slack = -simplex.duals[slack] > max(promise, tolerance)
        if promise <= tolerance and not by_slack:
            if not first_phase:
                return INFEASIBLE if excess > 0.0 else SOLVED, iteration, max(promise, 0.0), excess
            excess = end_first_phase(simplex, common)
            first_phase = False
            continue
        enter(program, slack if by_slack else -1, work)
        leaving = leaving_row(simplex)
        if leaving < 0 or iteration >= max_iterations:  # the first is impossible in exact arithmetic: the program is bounded
            return MAX_ITERATIONS, iteration, max(promise, 0.0), excess
        if by_slack:
            replace(simplex, leaving, slack, 0.0)
        else:
            replace(simplex, leaving, OCCUPANCY, total(program.rewards, work))
            keep(work, leaving)


@kernel
def weigh(simplex):
    """point <- the weights of the basic occupancies in the mixture, zero for other columns; returns its value."""
    point, whole, value = simplex.point, 0.0, 0.0
    for j in range(point.shape[0]):
        point[j] = max(point[j], 0.0) if simplex.kinds[j] == OCCUPANCY else 0.0
        whole += point[j]
    for j in range(point.shape[0]):
        point[j] /= whole
        value += point[j] * simplex.gain[j]
    return value


@kernel
def mix_pairs(work, masses):
    """masses <- the mixture that was found last, by pairs."""
    for p in range(masses.shape[0]):
        masses[p] = 0.0
    for j in range(work.simplex.point.shape[0]):
        weight, best, mass = work.simplex.point[j], work.best[work.place[j]], work.mass[work.place[j]]
        if weight > 0.0:
            for x in range(best.shape[0]):
                masses[best[x]] += weight * mass[x]


@kernel
def mix_entries(geometry, work, occupancy):
    """occupancy <- the mixture that was found last."""
    row = geometry.row
    for e in range(occupancy.shape[0]):
        occupancy[e] = 0.0
    for j in range(work.simplex.point.shape[0]):
        weight, slot = work.simplex.point[j], work.place[j]
        if weight > 0.0:
            for x in range(work.best.shape[1]):
                p = work.best[slot, x]
                for e in range(row[p], row[p + 1]):
                    occupancy[e] += weight * work.mass[slot, x] * work.rows[slot, e]


@kernel
def optimise_one(geometry, rewards, kernels, costs, max_iterations, work, multipliers):
    """The best safe occupancy over all plausible kernels; where none is safe, the best of the least violation.

    Args:
        rewards, costs: `(P)`, `(m x P)`, sound at every pair.
        kernels: A set whose kind is `ENTRYWISE` or `EXACT`.
        work: `workspace(geometry, m)`, in which the occupancy is left for `mix_pairs` and `mix_entries`.
        multipliers: output, `(m)`.

    Returns:
        status, iterations, value, excess, residual.
    """
    m, simplex = costs.shape[0], work.simplex
    program = Program(rewards, kernels, costs)
    if first_column(geometry, program, work):
        for i in range(m):
            multipliers[i], simplex.point[i] = 0.0, 0.0
        simplex.point[m] = 1.0
        return SOLVED, 1, simplex.gain[m], 0.0, 0.0
    status, iterations, residual, excess = improve(geometry, program, max_iterations, work)
    for i in range(m):
        multipliers[i] = max(simplex.duals[i], 0.0)
    return status, iterations, weigh(simplex), excess, residual
