"""The inner problem of a state-action pair in closed form, and one evaluation of the dual with it."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

FREE, AT_LOWER, AT_UPPER = 0, 1, 2

# No "nnan"/"ninf": -inf is a legal logarithm here.
OPTIONS = {"cache": True, "nogil": True, "fastmath": {"contract", "reassoc", "nsz"}}


@njit(**OPTIONS)
def empty_response(layers, states, actions):
    """Room for what `evaluate` computes: z, p, code, t, exponents, s."""
    pairs, transitions = (layers, states, actions), (layers, states, actions, states)
    codes = np.zeros(transitions, np.int8)
    return np.empty(states), np.zeros(transitions), codes, np.zeros(pairs), np.zeros(pairs), np.zeros(pairs)


@njit(**OPTIONS)
def respond(z, lower, upper, n, p, code):
    """p <- argmin_{lower <= p <= upper, sum p = 1} sum_y p (ln p - z), with its value psi as exp(-psi) = weight * exp(exponent).

    The unclipped softmax is tried first, since most pairs stay inside their intervals, and needs no logarithm in this form. Where p
    is clipped, the scalar t with p = clip(exp(t + z)) is returned as well.

    Returns:
        exponent, weight, t.
    """
    if n == 1:
        p[0] = 1.0
        code[0] = FREE
        return z[0], 1.0, 0.0
    largest = z[0]
    for y in range(1, n):
        largest = max(largest, z[y])
    total = 0.0
    for y in range(n):
        p[y] = math.exp(z[y] - largest)
        total += p[y]
    clipped = False
    for y in range(n):
        p[y] /= total
        code[y] = FREE
        if p[y] < lower[y] or p[y] > upper[y]:
            clipped = True
    if not clipped:
        return largest, total, 0.0
    psi, t = respond_clipped(z, lower, upper, n, p, code)
    return -psi, 1.0, t


@njit(**OPTIONS)
def respond_clipped(z, lower, upper, n, p, code):
    """p, psi and t of `respond` by variable fixing: each pass puts entries that must be at a bound there for good.

    If clipping the free softmax makes the sum exceed one, the true t is smaller, so entries below their lower bound stay there;
    if it falls short, entries above their upper bound stay there.
    """
    mass = 1.0
    t = 0.0
    n_free = n
    while n_free > 0:
        if mass <= 0.0:
            for y in range(n):
                if code[y] == FREE:
                    p[y] = lower[y]
                    code[y] = AT_LOWER
            n_free = 0
            break
        largest = -math.inf
        for y in range(n):
            if code[y] == FREE:
                largest = max(largest, z[y])
        total = 0.0
        for y in range(n):
            if code[y] == FREE:
                p[y] = math.exp(z[y] - largest)
                total += p[y]
        scale = mass / total
        t = math.log(scale) - largest
        short = 0.0
        over = 0.0
        for y in range(n):
            if code[y] == FREE:
                p[y] *= scale
                if p[y] < lower[y]:
                    short += lower[y] - p[y]
                elif p[y] > upper[y]:
                    over += p[y] - upper[y]
        if short == 0.0 and over == 0.0:
            break
        for y in range(n):
            if code[y] == FREE:
                if short >= over and p[y] < lower[y]:
                    p[y] = lower[y]
                    code[y] = AT_LOWER
                elif over >= short and p[y] > upper[y]:
                    p[y] = upper[y]
                    code[y] = AT_UPPER
                else:
                    continue
                mass -= p[y]
                n_free -= 1
    psi = 0.0
    for y in range(n):
        if code[y] == FREE:
            psi += p[y] * t
        elif p[y] > 0.0:
            psi += p[y] * (math.log(p[y]) - z[y])
    if n_free == 0:
        t = psi
    return psi, t


@njit(**OPTIONS)
def evaluate(widths, offsets, target, lower, upper, costs, v, multipliers, z, p, code, t, exponents, s):
    """Evaluate the dual at (v, multipliers), shift the potentials so that every layer has mass one, and return the dual value.

    With shifted potentials the dual F = sum s + v(x_0) is L + v(x_0); its partial minimum over the shifts is closed form.
    """
    layers, actions = target.shape[0], target.shape[2]
    shift = 0.0
    for k in range(layers - 1, -1, -1):
        # v of the next layer is already shifted by `shift` in total; doing the layers backwards makes this consistent
        n_next = widths[k + 1]
        largest = -math.inf
        for x in range(widths[k]):
            for a in range(actions):
                penalty = 0.0
                for i in range(multipliers.shape[0]):
                    penalty += multipliers[i] * costs[i, k, x, a]
                for y in range(n_next):
                    z[y] = target[k, x, a, y]
                if k < layers - 1:
                    for y in range(n_next):
                        z[y] += v[offsets[k + 1] + y]
                exponent, s[k, x, a], t[k, x, a] = respond(z, lower[k, x, a], upper[k, x, a], n_next, p[k, x, a], code[k, x, a])
                exponent -= v[offsets[k] + x] + shift + penalty
                exponents[k, x, a] = exponent
                largest = max(largest, exponent)
        total = 0.0
        for x in range(widths[k]):
            for a in range(actions):
                s[k, x, a] *= math.exp(exponents[k, x, a] - largest)
                total += s[k, x, a]
        log_mass = largest + math.log(total)
        for x in range(widths[k]):
            for a in range(actions):
                s[k, x, a] /= total
        shift += log_mass
        for x in range(widths[k]):
            v[offsets[k] + x] += shift
    return v[0]


@njit(**OPTIONS)
def gradient(widths, offsets, costs, p, s, grad_v, inflow, outflow, grad_m):
    """Gradient of the dual: the flow residual inflow - outflow of every state, and -<costs_i, q>."""
    layers, actions = s.shape[0], s.shape[2]
    inflow[:] = 0.0
    outflow[:] = 0.0
    grad_m[:] = 0.0
    inflow[0] = 1.0
    for k in range(layers):
        for x in range(widths[k]):
            j = offsets[k] + x
            for a in range(actions):
                mass = s[k, x, a]
                outflow[j] += mass
                for i in range(costs.shape[0]):
                    grad_m[i] -= mass * costs[i, k, x, a]
                if k < layers - 1:
                    for y in range(widths[k + 1]):
                        inflow[offsets[k + 1] + y] += mass * p[k, x, a, y]
    for j in range(grad_v.shape[0]):
        grad_v[j] = inflow[j] - outflow[j]


def offsets_of(widths: np.ndarray) -> np.ndarray:
    """Where each layer's states start in the flat vector of potentials; the last entry is their number."""
    return np.concatenate([[0], np.cumsum(widths[:-1])]).astype(np.int64)
