"""Sets of plausible transition kernels of one run, and the exact optimistic expectations and occupancies over them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.geometry import ABREAST, Geometry
from torchcmdp.kernels.options import formula, kernel

# the kinds, numbered as in `torchcmdp.confidence.CONFIDENCE_KINDS`
ENTRYWISE, L1, BERNSTEIN, EFRONI, LUO = range(5)
# ... and boxes that hold nothing but their lower ends, of learners that take averages as exact
EXACT = 5


class KernelSet(NamedTuple):
    """The plausible kernels: a box for every pair, or, where the kind is "l1", a ball around a center with that box around it.

    Attributes:
        kind: One of the six.
        center, lower, upper: `(E,)`.
        radius: Of the ball, `(P,)`.
        left: What the lower ends leave of each pair's probability, `(P,)` and some more.
        low, spare: Lower ends, and how far it is from them to the upper ends, by lanes of the geometry.
        least, most: The smallest and the largest probability that a distribution in the box can have, by lanes as well.
    """

    kind: int
    center: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    radius: np.ndarray
    left: np.ndarray
    low: np.ndarray
    spare: np.ndarray
    least: np.ndarray
    most: np.ndarray


class Room(NamedTuple):
    """What sweeps write on: values of states and orders of the layers' states, `(n + 1,)` each, and of pairs, `(P,)` and more."""

    values: np.ndarray
    order: np.ndarray
    ahead: np.ndarray


def empty_room(geometry: Geometry) -> Room:
    """Room for the states of a geometry."""
    states, pairs = len(geometry.state_at) + 1, len(geometry.pair_at)
    return Room(np.zeros(states), np.zeros(states, np.int64), np.zeros(pairs + ABREAST))


def kernel_set(kind: int, geometry: Geometry) -> KernelSet:
    """Room for a set."""
    entries, pairs = len(geometry.successor), len(geometry.pair_at)
    lanes = int((np.diff(geometry.row) * geometry.stride).max(initial=0) + geometry.lane.max(initial=0)) + ABREAST
    return KernelSet(kind, *(np.zeros(size) for size in (entries, entries, entries, pairs, pairs + ABREAST, *[lanes] * 4)))


@formula
def half_width(kind, center, visits, successors, iota, radius_scale):
    """How far the probability of a successor may lie from its center; one where the pair was never visited."""
    samples = max(visits, 1.0)
    if visits <= 0.0:
        return 1.0
    if kind == ENTRYWISE:
        width = math.sqrt((2.0 * iota) * successors / samples)
    elif kind == BERNSTEIN:
        samples = max(visits - 1.0, 1.0)
        width = 2.0 * math.sqrt(center * (iota / samples)) + (14.0 * iota / 3.0) / samples
    elif kind == EFRONI:
        iota += math.log(6.0)
        width = 2.0 * math.sqrt(center * (1.0 - center) * (iota / samples)) + (14.0 * iota / 3.0) / samples
    else:
        width = 4.0 * math.sqrt(center * (iota / samples)) + (28.0 * iota / 3.0) / samples
    return radius_scale * width


@formula
def ball_radius(visits, successors, iota, radius_scale):
    """Radius of the L1 ball; two, which admits every kernel, where the pair was never visited."""
    return radius_scale * math.sqrt((2.0 * iota) * successors / max(visits, 1.0)) if visits > 0.0 else 2.0


@formula
def empirical_row(geometry, p, visits, transition_visits, center):
    """center <- M / N of pair p, and uniform where it was never visited."""
    begin, end = geometry.row[p], geometry.row[p + 1]
    for e in range(begin, end):
        center[e] = transition_visits[e] / visits[p] if visits[p] > 0.0 else 1.0 / (end - begin)


@kernel
def confidence_row(geometry, p, visits, transition_visits, iota, radius_scale, kernels):
    """The set's row of pair p, from the visits so far."""
    begin, end = geometry.row[p], geometry.row[p + 1]
    empirical_row(geometry, p, visits, transition_visits, kernels.center)
    if kernels.kind == L1:
        kernels.radius[p] = ball_radius(visits[p], float(end - begin), iota, radius_scale)
    for e in range(begin, end):
        center = kernels.center[e]
        if kernels.kind == L1:
            half = 0.5 * kernels.radius[p]
        else:
            half = half_width(kernels.kind, center, visits[p], float(end - begin), iota, radius_scale)
        kernels.lower[e] = max(center - half, 0.0)
        kernels.upper[e] = min(center + half, 1.0)
    line_up(geometry, p, kernels)


@formula
def line_up(geometry, p, kernels):
    """Keep the box of pair p in the form in which sweeps take it."""
    begin, end, lane, stride = geometry.row[p], geometry.row[p + 1], geometry.lane[p], geometry.stride[p]
    left = 1.0
    for e in range(begin, end):
        left -= kernels.lower[e]
        if stride > 0:
            kernels.low[lane + (e - begin) * stride] = kernels.lower[e]
            kernels.spare[lane + (e - begin) * stride] = kernels.upper[e] - kernels.lower[e]
    kernels.left[p] = left


@formula
def find_extremes(geometry, p, kernels):
    """The smallest and the largest probability of each successor in the box of pair p, for those who step into a single state."""
    begin, end, lane, stride = geometry.row[p], geometry.row[p + 1], geometry.lane[p], geometry.stride[p]
    if stride > 0:
        rest = kernels.left[p]  # once all successors have all that there is room for: below zero
        for e in range(begin, end):
            rest -= kernels.upper[e] - kernels.lower[e]
        for e in range(begin, end):
            at = lane + (e - begin) * stride
            kernels.least[at] = kernels.low[at] + gift(rest + kernels.spare[at], kernels.spare[at])
            kernels.most[at] = kernels.low[at] + gift(kernels.left[p], kernels.spare[at])


@formula
def sort_down(values, base, count, order):
    """order[base + .] <- 0 .. count-1 by values[base + .], largest first: by counting, which has no branch to mispredict."""
    for j in range(count):
        order[base + j] = j  # so that a NaN, which has no place, leaves no other number behind
    for j in range(count):
        place, own = 0, values[base + j]
        for other in range(j):
            place += values[base + other] >= own
        for other in range(j + 1, count):
            place += values[base + other] > own
        order[base + place] = j


@formula
def sort_down_again(values, base, count, order):
    """`sort_down` where most orders are those of the last time: by insertion, whose branches then are no surprise."""
    for j in range(count):
        place = j
        while place > 0 and values[base + order[base + place - 1]] < values[base + j]:
            order[base + place] = order[base + place - 1]
            place -= 1
        order[base + place] = j


@formula
def sort_row_down(values, successor, begin, end, base, order):
    """order[base + .] <- 0 .. by the values of the successors of the entries begin .. end-1, largest first."""
    for j in range(end - begin):
        place = j
        while place > 0 and values[successor[begin + order[base + place - 1]]] < values[successor[begin + j]]:
            order[base + place] = order[base + place - 1]
            place -= 1
        order[base + place] = j


@formula
def gift(left, spare):
    """What of the probability that is left the next best successor gets: all that there is room for.

    Where nothing is left nothing moves: to stop there would be a branch that nobody can predict, and take longer than the rest.
    """
    return min(max(left, 0.0), spare)


@formula
def give(left, best, spare, value):
    """What is left when the next best successor got its gift, and the expectation."""
    moved = gift(left, spare)
    return left - moved, best + moved * value


@formula
def best_in_box(successor, lower, upper, left, begin, end, values, order, base):
    """max <p, f> over lower <= p <= upper, sum p = 1: what the lower ends leave goes to the best successors first.

    In what order they come stands in `order`, from `base` on.
    """
    best = 0.0
    for e in range(begin, end):
        best += lower[e] * values[successor[e]]
    for j in range(end - begin):
        e = begin + order[base + j]
        left, best = give(left, best, upper[e] - lower[e], values[successor[e]])
    return best


@kernel
def best_abreast(low, spare, left, p, lane, stride, width, values, base, order, given, ahead):
    """`best_in_box` of pair p and the three after it, whose successors are the states from `base` on and have one order.

    The first `given` of them get what is left.

    The four are written out, since a loop over them would go through memory and take twice as long.
    """
    best0 = best1 = best2 = best3 = 0.0
    left0, left1, left2, left3 = left[p], left[p + 1], left[p + 2], left[p + 3]
    for y in range(width):
        j, value = lane + y * stride, values[base + y]
        best0 += low[j] * value
        best1 += low[j + 1] * value
        best2 += low[j + 2] * value
        best3 += low[j + 3] * value
    for place in range(given):
        y = order[base + place]
        j, value = lane + y * stride, values[base + y]
        left0, best0 = give(left0, best0, spare[j], value)
        left1, best1 = give(left1, best1, spare[j + 1], value)
        left2, best2 = give(left2, best2, spare[j + 2], value)
        left3, best3 = give(left3, best3, spare[j + 3], value)
    ahead[p], ahead[p + 1], ahead[p + 2], ahead[p + 3] = best0, best1, best2, best3


@formula
def best_in_ball(successor, center, radius, begin, end, values, order, base):
    """max <p, f> over |p - center|_1 <= radius: half the radius moves from the worst successors to the best one."""
    left, best = 0.5 * radius, 0.0
    for e in range(begin, end):
        best += center[e] * values[successor[e]]
    highest = values[successor[begin + order[base]]]
    for j in range(end - begin - 1, 0, -1):
        e = begin + order[base + j]
        moved = min(left, center[e])
        best += moved * (highest - values[successor[e]])
        left -= moved
    return best


@kernel
def optimistic(kind, successor, center, lower, upper, radius, left, begin, end, values, order, base):
    """The exact max over the set of sum_y p(y) f(y) for the pair with entries begin .. end-1.

    `values` has f, and `order` from `base` on its successors from the best to the worst. Arrays come one by one: every array that
    is taken out of a record costs as much as a row.
    """
    if kind == L1:
        return best_in_ball(successor, center, radius, begin, end, values, order, base)
    return best_in_box(successor, lower, upper, left, begin, end, values, order, base)


@kernel
def expect(geometry, kernels, k, room, ahead):
    """ahead <- the exact max over the set of sum_y p(y) f(y), for every pair of layer k; `room` has f at the states after it."""
    if geometry.dense[k] == 1:
        sort_down(room.values, geometry.first[k + 1], geometry.first[k + 2] - geometry.first[k + 1], room.order)
    expect_in_order(geometry, kernels, k, room, ahead)


@kernel
def expect_in_order(geometry, kernels, k, room, ahead):
    """`expect` where the states after a dense layer are in order already."""
    first, row, successor, actions = geometry.first, geometry.row, geometry.successor, geometry.actions
    kind, center, lower, upper, radius, left = (
        kernels.kind,
        kernels.center,
        kernels.lower,
        kernels.upper,
        kernels.radius,
        kernels.left,
    )
    values, order = room.values, room.order
    dense, base, width, stride = (
        geometry.dense[k] == 1,
        first[k + 1],
        first[k + 2] - first[k + 1],
        geometry.stride[first[k] * actions],
    )
    if stride > 0 and kind != L1:
        low, spare, lane, given = kernels.low, kernels.spare, geometry.lane, 0 if kind == EXACT else width
        for p in range(first[k] * actions, first[k + 1] * actions, ABREAST):
            best_abreast(low, spare, left, p, lane[p], stride, width, values, base, order, given, ahead)
        return
    for p in range(first[k] * actions, first[k + 1] * actions):
        begin, end = row[p], row[p + 1]
        if end - begin == 1:
            ahead[p] = values[successor[begin]]
        elif end == begin:
            ahead[p] = 0.0
        elif dense:
            ahead[p] = optimistic(kind, successor, center, lower, upper, radius[p], left[p], begin, end, values, order, base)
        else:
            anything = False
            for e in range(begin, end):
                anything |= values[successor[e]] != 0.0
            ahead[p] = 0.0
            if anything:  # few pairs lead to where one target can be reached from
                sort_row_down(values, successor, begin, end, base, order)
                ahead[p] = optimistic(kind, successor, center, lower, upper, radius[p], left[p], begin, end, values, order, base)


@kernel
def mean_over_actions(geometry, policy, k, ahead, values):
    """values <- sum_a pi(a|x) ahead(x,a) at the states of layer k."""
    first, actions = geometry.first, geometry.actions
    for x in range(first[k], first[k + 1]):
        value = 0.0
        for p in range(x * actions, (x + 1) * actions):
            value += policy[p] * ahead[p]
        values[x] = value


@kernel
def step_into(geometry, kernels, k, target, sign, ahead):
    """`expect` of sign times the indicator of one state after layer k: its largest probability, or minus its smallest."""
    begin, end = geometry.first[k] * geometry.actions, geometry.first[k + 1] * geometry.actions
    at = geometry.lane[begin] + (target - geometry.first[k + 1]) * geometry.stride[begin] - begin
    for p in range(begin, end):
        ahead[p] = kernels.most[at + p] if sign > 0.0 else -kernels.least[at + p]


@kernel
def reach(geometry, kernels, policy, target, layer, sign, room):
    """The best probability of reaching state `target` of `layer` from x_0 with sign 1, minus the worst with sign -1."""
    first, actions, values, ahead = geometry.first, geometry.actions, room.values, room.ahead
    if layer == 0:
        return sign
    for k in range(layer - 1, -1, -1):
        if k < layer - 1:
            expect(geometry, kernels, k, room, ahead)
        elif geometry.stride[first[k] * actions] > 0 and kernels.kind != L1:
            step_into(geometry, kernels, k, target, sign, ahead)
        else:
            for x in range(first[layer], first[layer + 1]):
                values[x] = sign if x == target else 0.0
            expect(geometry, kernels, k, room, ahead)
        mean_over_actions(geometry, policy, k, ahead, values)
    return values[0]


@kernel
def upper_occupancy_visited(geometry, kernels, policy, pairs, room, upper):
    """upper <- u_t, the upper occupancy of the pairs that one episode visited (line 4)."""
    for k in range(pairs.shape[0]):
        upper[k] = policy[pairs[k]] * reach(geometry, kernels, policy, pairs[k] // geometry.actions, k, 1.0, room)


@kernel
def all_pairs(geometry, kernels, policy, sign, room, occupancy):
    """occupancy <- the largest q^{P,pi}(x,a) over the set for every pair with sign 1, the smallest with sign -1."""
    first, actions = geometry.first, geometry.actions
    for k in range(first.shape[0] - 1):
        for x in range(first[k], first[k + 1]):
            reached = sign * reach(geometry, kernels, policy, x, k, sign, room)
            for p in range(x * actions, (x + 1) * actions):
                occupancy[p] = policy[p] * reached
