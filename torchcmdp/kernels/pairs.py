"""The inner problem of a state-action pair in closed form, and one evaluation of the dual with it.

In multiplicative form: of an unclipped pair p(y) is proportional to weight * growth(y), with weight = exp(target) formed once an
instance and growth = exp(potential) once a state, each relative to the largest of its pair or layer. Logarithms enter where they
must: a pair whose sum underflows in this form, and the clipped entries of a pair.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.cpu import compiled
from torchcmdp.kernels.exponentials import exponentials
from torchcmdp.kernels.limits import NEVER
from torchcmdp.kernels.sums import scale_each

FREE, AT_LOWER, AT_UPPER = 0, 1, 2

# Below this sum of weight * growth a pair is answered in logarithms: products could have underflowed that still matter.
FAINT = 1e-30
# The same of shares that sum to one: others than these may be at their bounds already.
FAINTEST = 1e-120
# Newton's method on the scale of a clipped pair settles within this, or in this many passes gives up.
ROUNDING, MOST_PASSES = 4e-16, 8


class Problem(NamedTuple):
    """One instance: target, lower, upper `(E)`, costs `(m x P)`, and weight `(E)` = exp(target - base) with base `(P)`."""

    target: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    costs: np.ndarray
    weight: np.ndarray
    base: np.ndarray


class Response(NamedTuple):
    """What `evaluate` leaves behind.

    Attributes:
        p: `(E)`, the kernel of the dual; code: `(E)`, FREE, AT_LOWER or AT_UPPER, of clipped pairs only.
        clipped: `(P)`, whether a pair meets a bound.
        s: `(P)`, occupancy of the pairs, one in sum over every layer.
        exponent, penalty: `(P)`, work space.
        t: `(P)`, ln p - z of the free entries of a clipped pair, psi if there are none.
        scale: `(P)`, what the free answer of a clipped pair was multiplied by when it was last clipped.
        log_p: `(E)`, ln p of its other entries, for the code in `known` `(E)`.
        growth: `(n + 1)`, exp(potential - largest of the layer), one at the terminal state.
        inflow, outflow: `(n + 1)`.
    """

    p: np.ndarray
    code: np.ndarray
    clipped: np.ndarray
    s: np.ndarray
    exponent: np.ndarray
    penalty: np.ndarray
    t: np.ndarray
    scale: np.ndarray
    log_p: np.ndarray
    known: np.ndarray
    growth: np.ndarray
    inflow: np.ndarray
    outflow: np.ndarray


@compiled
def weigh(geometry, target, upper, weight, base, response):
    """Fill in `weight` and `base` of a `Problem`. Where nothing may go the weight is zero: no pair is clipped for that alone.

    The target becomes finite, so that intervals may force mass to where the reference has none.

    Of a new instance nothing is known.
    """
    known, scale = response.known, response.scale
    row = geometry.row
    for e in range(known.shape[0]):
        known[e] = FREE
    for pair in range(base.shape[0]):
        scale[pair] = 1.0
        largest = -math.inf
        for e in range(row[pair], row[pair + 1]):
            if target[e] < 0.1 * NEVER:
                target[e] = 0.1 * NEVER
            if upper[e] > 0.0:
                largest = max(largest, target[e])
        if largest == -math.inf:
            largest = 0.0
        base[pair] = largest
        for e in range(row[pair], row[pair + 1]):
            weight[e] = target[e] - largest if upper[e] > 0.0 else -math.inf
    exponentials(weight, 0, weight.shape[0], 0.0, weight)


@compiled
def clip(start, stop, lower, upper, scale, p, code):
    """Move shares that sum to one into their intervals: scaled by one number and clipped, they sum to one again.

    Newton's method on the scale, from a guess: the sum is piecewise linear in it, so a scale that reproduces itself is exact.

    Returns:
        The scale; zero where all entries are at a bound; -1, with p as it was, where it does not settle.
    """
    free = 0.0
    for _ in range(MOST_PASSES):
        free = 0.0
        fixed = 0.0
        for e in range(start, stop):
            share = scale * p[e]
            inside = (share >= lower[e]) & (share <= upper[e])
            free += p[e] if inside else 0.0
            fixed += 0.0 if inside else min(max(share, lower[e]), upper[e])
        if free == 0.0 and abs(1.0 - fixed) <= 10.0 * ROUNDING:
            break
        if free < FAINTEST:
            return -1.0
        last = scale
        scale = (1.0 - fixed) / free
        if abs(scale - last) <= ROUNDING * scale:
            break
        if not scale > FAINT:
            return -1.0
    else:
        return -1.0
    for e in range(start, stop):
        share = scale * p[e]
        p[e] = min(max(share, lower[e]), upper[e])
        code[e] = AT_LOWER if share < lower[e] else (AT_UPPER if share > upper[e] else FREE)
    return scale if free > 0.0 else 0.0


@compiled
def fix_all(start, stop, problem, v, successor, steep, p, code):
    """Move shares that sum to one into their intervals by variable fixing, which always settles.

    If clipping the scaled shares makes the sum exceed one, the true scale is smaller, so entries below their lower bound stay
    there for good; if it falls short, entries above their upper bound stay there.

    Args:
        steep: Whether shares are formed anew in every pass, in logarithms, for targets and potentials of any size.

    Returns:
        The scale, -1 where the shares are too faint and not `steep`, and the logarithm of what `steep` ones are relative to.
    """
    target, lower, upper = problem.target, problem.lower, problem.upper
    mass = 1.0
    scale = 1.0
    largest = 0.0
    n_free = stop - start
    for e in range(start, stop):
        code[e] = FREE
    for _ in range(stop - start):
        if n_free == 0 or not mass > 0.0:
            break
        if steep:
            scale = 1.0
            largest = -math.inf
            for e in range(start, stop):
                if code[e] == FREE:
                    largest = max(largest, target[e] + v[successor[e]])
            for e in range(start, stop):
                if code[e] == FREE:
                    p[e] = math.exp(target[e] + v[successor[e]] - largest)
        total = 0.0
        for e in range(start, stop):
            total += p[e] if code[e] == FREE else 0.0
        if total < FAINTEST * scale:
            return -1.0, 0.0
        change = mass / total
        scale *= change
        short = 0.0
        over = 0.0
        for e in range(start, stop):
            if code[e] == FREE:
                p[e] *= change
                short += max(lower[e] - p[e], 0.0)
                over += max(p[e] - upper[e], 0.0)
        if short == 0.0 and over == 0.0:
            return scale, largest
        fixed, count = fix(start, stop, lower, upper, short >= over, over >= short, p, code)
        mass -= fixed
        n_free -= count
    for e in range(start, stop):
        if code[e] == FREE:
            p[e] = lower[e]
            code[e] = AT_LOWER
    return scale, largest


@compiled
def fix(start, stop, lower, upper, to_lower, to_upper, p, code):
    """Put free entries outside their interval at its end, on the sides asked for; returns their mass and number."""
    mass = 0.0
    count = 0
    for e in range(start, stop):
        if code[e] == FREE:
            if to_lower and p[e] < lower[e]:
                p[e] = lower[e]
                code[e] = AT_LOWER
            elif to_upper and p[e] > upper[e]:
                p[e] = upper[e]
                code[e] = AT_UPPER
            else:
                continue
            mass += p[e]
            count += 1
    return mass, count


@compiled
def clipped_value(start, stop, problem, v, successor, t, response):
    """psi = sum p (ln p - z), where ln p - z = t for free entries, and their mass. Logarithms of the bounds are kept."""
    target, p, code, known, log_p = problem.target, response.p, response.code, response.known, response.log_p
    psi = 0.0
    free = 0.0
    for e in range(start, stop):
        if code[e] == FREE:
            free += p[e]
        elif p[e] > 0.0:
            if known[e] != code[e]:
                known[e] = code[e]
                log_p[e] = math.log(p[e])
            psi += p[e] * (log_p[e] - target[e] - v[successor[e]])
    return psi + free * t, free


@compiled
def respond(pair, start, stop, shift, problem, top, v, successor, response):
    """p <- argmin_{lower <= p <= upper, sum p = 1} sum_y p (ln p - z), z = target + v(y), with its value psi.

    The unclipped softmax is tried first, since most pairs stay inside their intervals, and needs no logarithm in this form.

    Args:
        shift: The first successor where the successors are a whole layer, else -1.
        top: Logarithm of what growth is relative to.

    Returns:
        exponent and factor with exp(-psi) = factor * exp(exponent).
    """
    weight, lower, upper, growth, p = problem.weight, problem.lower, problem.upper, response.growth, response.p
    total = 0.0
    if shift >= 0:
        for e in range(start, stop):
            share = weight[e] * growth[shift + e - start]
            p[e] = share
            total += share
    else:
        for e in range(start, stop):
            share = weight[e] * growth[successor[e]]
            p[e] = share
            total += share
    log_base = problem.base[pair] + top
    t = 0.0
    scale = -1.0
    if total >= FAINT:
        inverse = 1.0 / total
        outside = 0
        for e in range(start, stop):
            share = p[e] * inverse
            p[e] = share
            outside += (share < lower[e]) | (share > upper[e])
        if outside == 0:
            response.clipped[pair] = False
            return log_base, total
        scale = clip(start, stop, lower, upper, response.scale[pair], p, response.code)
        if scale < 0.0:
            scale, _ = fix_all(start, stop, problem, v, successor, False, p, response.code)
    if scale > 0.0:
        t = math.log(scale / total) - log_base
        response.scale[pair] = scale
    elif scale < 0.0:
        scale, largest = fix_all(start, stop, problem, v, successor, True, p, response.code)
        t = math.log(scale) - largest
    psi, free = clipped_value(start, stop, problem, v, successor, t, response)
    response.clipped[pair] = True
    response.t[pair] = t if free > 0.0 else psi
    return -psi, 1.0


@compiled
def price(costs, multipliers, penalty):
    """penalty <- sum_i multipliers_i costs_i."""
    for pair in range(penalty.shape[0]):
        penalty[pair] = 0.0
    for i in range(multipliers.shape[0]):
        if multipliers[i] != 0.0:
            for pair in range(penalty.shape[0]):
                penalty[pair] += multipliers[i] * costs[i, pair]


@compiled
def grow(geometry, v, growth, tops):
    """growth <- exp(v - top) with the largest potential of each layer, which is left in tops at the layer's first state."""
    first = geometry.first
    layers = first.shape[0] - 1
    for k in range(layers):
        top = v[first[k]]
        for j in range(first[k] + 1, first[k + 1]):
            top = max(top, v[j])
        for j in range(first[k], first[k + 1]):
            growth[j] = v[j] - top
        tops[first[k]] = top
    growth[first[layers]] = 0.0
    tops[first[layers]] = v[first[layers]]
    exponentials(growth, 0, growth.shape[0], 0.0, growth)


@compiled
def evaluate(geometry, problem, response, v, multipliers):
    """Evaluate the dual at (v, multipliers), shift the potentials so that every layer has mass one, and return the dual value.

    With shifted potentials the dual F = sum s + v(x_0) is L + v(x_0); its partial minimum over the shifts is closed form.
    `v` has n + 1 entries, the last of which, the terminal state's, is zero.
    """
    first, actions, row, successor = geometry.first, geometry.actions, geometry.row, geometry.successor
    p, clipped, s = response.p, response.clipped, response.s
    exponents, penalty, growth = response.exponent, response.penalty, response.growth
    tops, largests = response.inflow, response.outflow  # until `flows`
    layers = first.shape[0] - 1
    price(problem.costs, multipliers, penalty)
    grow(geometry, v, growth, tops)
    for k in range(layers):
        after = first[k + 1]
        dense = after if geometry.dense[k] else -1
        largest = -math.inf
        for j in range(first[k], after):
            for pair in range(j * actions, (j + 1) * actions):
                start, stop = row[pair], row[pair + 1]
                if stop - start == 1:
                    p[start] = 1.0
                    exponent, s[pair], clipped[pair] = problem.target[start] + v[successor[start]], 1.0, False
                elif stop == start:
                    exponent, s[pair], clipped[pair] = -math.inf, 0.0, False
                else:
                    exponent, s[pair] = respond(pair, start, stop, dense, problem, tops[after], v, successor, response)
                exponent -= v[j] + penalty[pair]
                exponents[pair] = exponent
                largest = max(largest, exponent)
        for pair in range(first[k] * actions, after * actions):
            exponents[pair] -= largest
        largests[first[k]] = largest
    exponentials(exponents, 0, exponents.shape[0], 0.0, exponents)
    # a shift of the next layer moves its states and the pairs that lead there alike, so only now it matters
    shift = 0.0
    for k in range(layers - 1, -1, -1):
        total = scale_each(s, exponents, first[k] * actions, first[k + 1] * actions)
        for pair in range(first[k] * actions, first[k + 1] * actions):
            s[pair] /= total
            if clipped[pair]:
                response.t[pair] -= shift
        shift += largests[first[k]] + math.log(total)
        for j in range(first[k], first[k + 1]):
            v[j] += shift
    flows(geometry, response)
    return v[0]


@compiled
def flows(geometry, response):
    """What arrives at every state and what leaves it."""
    first, actions, row, successor = geometry.first, geometry.actions, geometry.row, geometry.successor
    p, s, inflow, outflow = response.p, response.s, response.inflow, response.outflow
    layers = first.shape[0] - 1
    for j in range(inflow.shape[0]):
        inflow[j] = 0.0
    inflow[0] = 1.0
    for k in range(layers):
        after = first[k + 1]
        for j in range(first[k], after):
            total = 0.0
            for pair in range(j * actions, (j + 1) * actions):
                mass = s[pair]
                total += mass
                if k == layers - 1:
                    continue
                start, stop = row[pair], row[pair + 1]
                if geometry.dense[k]:
                    for e in range(stop - start):
                        inflow[after + e] += mass * p[start + e]
                else:
                    for e in range(start, stop):
                        inflow[successor[e]] += mass * p[e]
            outflow[j] = total
