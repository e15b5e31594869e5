"""Derivatives of the projection by the implicit function theorem, in both directions, with the Hessian of the solver.

Around the solution q = phi(w) pair by pair, with w = -target + v(x) - v(y) + multipliers . costs, and dq = -D dw where
D = s (p p^T + diag(p_f) - p_f p_f^T / sum p_f) and p_f is the unclipped part of p. With K q = (outflow - inflow, <costs, q>)
the Hessian of the dual is K D K^T, over all potentials and the multipliers strictly between their bounds.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from torchcmdp.projection.compiled.linalg import assemble, factor, schur, solve_free, solve_lower, solve_upper
from torchcmdp.projection.compiled.pairs import AT_LOWER, FREE, OPTIONS, empty_response, evaluate


@njit(**OPTIONS)
def pair_curvature(p, code, s, n, vector, out):
    """out <- D vector for one pair; returns p . vector and the mean of vector over the part of p that can give way."""
    along = 0.0
    free_along = 0.0
    free_mass = 0.0
    for y in range(n):
        along += p[y] * vector[y]
        if code[y] == FREE:
            free_along += p[y] * vector[y]
            free_mass += p[y]
    # a pair with every entry at a bound has no part that gives way: a moved bound is then read as taking from all entries alike
    mean = free_along / free_mass if free_mass > 0.0 else along
    for y in range(n):
        out[y] = s * p[y] * along
        if code[y] == FREE:
            out[y] += s * p[y] * (vector[y] - mean)
    return along, mean


@njit(**OPTIONS)
def constrain(widths, offsets, costs, free, flow, rhs_v, rhs_m):
    """rhs <- K flow, over the free multipliers."""
    layers, actions = flow.shape[0], flow.shape[2]
    rhs_v[:] = 0.0
    rhs_m[:] = 0.0
    for k in range(layers):
        for x in range(widths[k]):
            for a in range(actions):
                total = 0.0
                for y in range(widths[k + 1]):
                    total += flow[k, x, a, y]
                    if k < layers - 1:
                        rhs_v[offsets[k + 1] + y] -= flow[k, x, a, y]
                rhs_v[offsets[k] + x] += total
                for i in range(costs.shape[0]):
                    if free[i]:
                        rhs_m[i] += costs[i, k, x, a] * total


@njit(**OPTIONS)
def solve_system(widths, offsets, hessian, border, corner, free, work, rhs_v, rhs_m):
    """(rhs_v, rhs_m) <- Hessian^-1 (rhs_v, rhs_m) with the factor, the reduced border and the Schur complement at hand."""
    n, m = rhs_v.shape[0], rhs_m.shape[0]
    solve_lower(widths, offsets, hessian, rhs_v)
    for i in range(m):
        for j in range(n):
            rhs_m[i] -= border[j, i] * rhs_v[j]
    solve_free(corner, free, rhs_m, work)
    for i in range(m):
        for j in range(n):
            rhs_v[j] -= border[j, i] * rhs_m[i]
    solve_upper(widths, offsets, hessian, rhs_v)


@njit(**OPTIONS)
def spread_back(widths, offsets, costs, k, x, a, a_v, a_m, out):
    """out(y) += (K^T a)(x, a, y) = a(x) - a(y) + sum_i a_i costs_i(x, a) for one pair."""
    shift = a_v[offsets[k] + x]
    for i in range(costs.shape[0]):
        shift += a_m[i] * costs[i, k, x, a]
    for y in range(widths[k + 1]):
        out[y] += shift
        if offsets[k + 1] < a_v.shape[0]:
            out[y] -= a_v[offsets[k + 1] + y]


@njit(**OPTIONS)
def linearise(widths, offsets, target, lower, upper, costs, cap, potentials, multipliers, response, system, v, free):
    """Recompute the pairs' responses at the solution and factor its Hessian."""
    z, p, code, t, exponents, s = response
    hessian, border, corner = system
    layers = target.shape[0]
    for k in range(layers):
        for x in range(widths[k]):
            v[offsets[k] + x] = potentials[k, x]
    for i in range(multipliers.shape[0]):
        free[i] = 0.0 < multipliers[i] < cap
    evaluate(widths, offsets, target, lower, upper, costs, v, multipliers, z, p, code, t, exponents, s)
    assemble(widths, offsets, costs, p, code, s, hessian, border, corner)
    factor(widths, offsets, hessian)
    schur(widths, offsets, hessian, border, corner)


@njit(**OPTIONS)
def price_of_bound(target, v_next, t, p):
    """ln p - z - t: what the pair's value changes by when the bound that holds p moves."""
    return (math.log(p) if p > 0.0 else 0.0) - target - v_next - t


@njit(**OPTIONS)
def vjp_range(
    start, stop, widths, offsets, target, lower, upper, costs, cap, potentials, multipliers, grad_q,
    grad_target, grad_lower, grad_upper, grad_costs,
):  # fmt: skip
    """Pull the cotangent grad_q of the occupancy back to target, lower, upper and costs, for instances start..stop-1."""
    layers, states, actions = target.shape[1], target.shape[2], target.shape[3]
    n, m = offsets[layers], costs.shape[1]
    response = empty_response(layers, states, actions)
    system = (np.empty((n, n)), np.empty((n, m)), np.empty((m, m)))
    v, a_v, a_m, free, work = np.empty(n), np.empty(n), np.empty(m), np.empty(m, np.bool_), np.empty((m, m))
    flow, pulled = np.zeros((layers, states, actions, states)), np.empty(states)
    z, p, code, t, exponents, s = response
    for b in range(start, stop):
        linearise(
            widths, offsets, target[b], lower[b], upper[b], costs[b], cap, potentials[b], multipliers[b], response, system, v, free
        )
        for k in range(layers):
            for x in range(widths[k]):
                for a in range(actions):
                    pair_curvature(p[k, x, a], code[k, x, a], s[k, x, a], widths[k + 1], grad_q[b, k, x, a], flow[k, x, a])
        constrain(widths, offsets, costs[b], free, flow, a_v, a_m)
        solve_system(widths, offsets, system[0], system[1], system[2], free, work, a_v, a_m)
        for j in range(n):
            a_v[j] = -a_v[j]
        for i in range(m):
            a_m[i] = -a_m[i]
        for k in range(layers):
            for x in range(widths[k]):
                for a in range(actions):
                    n_next = widths[k + 1]
                    for y in range(n_next):
                        pulled[y] = grad_q[b, k, x, a, y]
                    spread_back(widths, offsets, costs[b], k, x, a, a_v, a_m, pulled)
                    mass = s[k, x, a]
                    along, mean = pair_curvature(p[k, x, a], code[k, x, a], mass, n_next, pulled, grad_target[b, k, x, a])
                    total = 0.0
                    for y in range(n_next):
                        total += grad_target[b, k, x, a, y]
                        if code[k, x, a, y] != FREE:
                            v_next = v[offsets[k + 1] + y] if k < layers - 1 else 0.0
                            price = price_of_bound(target[b, k, x, a, y], v_next, t[k, x, a], p[k, x, a, y])
                            slope = mass * (pulled[y] - mean - price * along)
                            if code[k, x, a, y] == AT_LOWER:
                                grad_lower[b, k, x, a, y] = slope
                            else:
                                grad_upper[b, k, x, a, y] = slope
                    for i in range(m):
                        grad_costs[b, i, k, x, a] = a_m[i] * mass - multipliers[b, i] * total


@njit(**OPTIONS)
def jvp_range(
    start, stop, widths, offsets, target, lower, upper, costs, cap, potentials, multipliers,
    d_target, d_lower, d_upper, d_costs, d_q,
):  # fmt: skip
    """Push tangents of target, lower, upper and costs forward to the occupancy, for instances start..stop-1."""
    layers, states, actions = target.shape[1], target.shape[2], target.shape[3]
    n, m = offsets[layers], costs.shape[1]
    response = empty_response(layers, states, actions)
    system = (np.empty((n, n)), np.empty((n, m)), np.empty((m, m)))
    v, x_v, x_m, free, work = np.empty(n), np.empty(n), np.empty(m), np.empty(m, np.bool_), np.empty((m, m))
    moved, bent = np.empty(states), np.empty(states)
    z, p, code, t, exponents, s = response
    for b in range(start, stop):
        linearise(
            widths, offsets, target[b], lower[b], upper[b], costs[b], cap, potentials[b], multipliers[b], response, system, v, free
        )
        for k in range(layers):
            for x in range(widths[k]):
                for a in range(actions):
                    n_next = widths[k + 1]
                    mass = s[k, x, a]
                    shift = 0.0
                    for i in range(m):
                        shift += multipliers[b, i] * d_costs[b, i, k, x, a]
                    for y in range(n_next):
                        moved[y] = d_target[b, k, x, a, y] - shift
                    pair_curvature(p[k, x, a], code[k, x, a], mass, n_next, moved, d_q[b, k, x, a])
                    add_bound_moves(
                        p[k, x, a], code[k, x, a], mass, n_next, target[b, k, x, a], v, offsets[k + 1], t[k, x, a],
                        d_lower[b, k, x, a], d_upper[b, k, x, a], d_q[b, k, x, a],
                    )  # fmt: skip
        constrain(widths, offsets, costs[b], free, d_q[b], x_v, x_m)
        for i in range(m):
            if free[i]:
                for k in range(layers):
                    for x in range(widths[k]):
                        for a in range(actions):
                            x_m[i] += d_costs[b, i, k, x, a] * s[k, x, a]
        solve_system(widths, offsets, system[0], system[1], system[2], free, work, x_v, x_m)
        for k in range(layers):
            for x in range(widths[k]):
                for a in range(actions):
                    moved[:] = 0.0
                    spread_back(widths, offsets, costs[b], k, x, a, x_v, x_m, moved)
                    pair_curvature(p[k, x, a], code[k, x, a], s[k, x, a], widths[k + 1], moved, bent)
                    for y in range(widths[k + 1]):
                        d_q[b, k, x, a, y] -= bent[y]


@njit(**OPTIONS)
def add_bound_moves(p, code, s, n, target, v, base, t, d_lower, d_upper, d_q):
    """Add to d_q what moving the active bounds of one pair does at fixed potentials and multipliers."""
    free_mass = 0.0
    for y in range(n):
        if code[y] == FREE:
            free_mass += p[y]
    for y in range(n):
        if code[y] == FREE:
            continue
        move = d_lower[y] if code[y] == AT_LOWER else d_upper[y]
        v_next = v[base + y] if base < v.shape[0] else 0.0
        price = price_of_bound(target[y], v_next, t, p[y])
        d_q[y] += s * move
        for w in range(n):
            d_q[w] -= s * move * price * p[w]
            if free_mass == 0.0:
                d_q[w] -= s * move * p[w]
            elif code[w] == FREE:
                d_q[w] -= s * move * p[w] / free_mass
