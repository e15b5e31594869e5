"""Stand-in for the projection of one instance."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.options import kernel
from torchcmdp.projection.compiled.pairs import empty_response
from torchcmdp.projection.compiled.solve import PLAIN_ITERATIONS, cooled_newton, newton, recover


class Limits(NamedTuple):
    multiplier_cap: float
    tolerance: float
    max_iterations: int


class Workspace(NamedTuple):
    widths: np.ndarray
    target: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    costs: np.ndarray
    occupancy: np.ndarray
    log_occupancy: np.ndarray
    scaled: np.ndarray
    response: tuple
    system: tuple
    vectors: tuple
    mass: np.ndarray
    next_mass: np.ndarray


def workspace(geometry, m):
    first = geometry.first
    L, A = len(first) - 1, geometry.actions
    widths = np.append(np.diff(first), 1)
    S = int(widths.max())
    n = int(first[-1])
    shape = (L, S, A, S)
    system = (np.empty((n, n)), np.empty((n, m)), np.empty((m, m)), np.empty(m), np.empty(m), np.empty(m), np.empty(m),
              np.empty(m, np.bool_), np.empty(m), np.empty((m, m)))
    vectors = (np.empty(n), np.empty(n), np.empty(n), np.empty(n), np.empty(n), np.empty(m), np.empty(m), np.empty(m))
    z = lambda: np.zeros(shape)
    return Workspace(widths, z(), z(), z(), np.zeros((m, L, S, A)), z(), z(), z(), empty_response(L, S, A), system, vectors,
                     np.zeros(S), np.zeros(S))


@kernel
def project_one(geometry, target, lower, upper, costs, limits, work, occupancy, log_occupancy, potentials, multipliers):
    first, A = geometry.first, geometry.actions
    m = costs.shape[0]
    e = 0
    for k in range(first.shape[0] - 1):
        for x in range(first[k + 1] - first[k]):
            for a in range(A):
                for i in range(m):
                    work.costs[i, k, x, a] = costs[i, (first[k] + x) * A + a]
                for y in range(work.widths[k + 1]):
                    work.target[k, x, a, y] = target[e]
                    work.lower[k, x, a, y] = lower[e]
                    work.upper[k, x, a, y] = upper[e]
                    e += 1
    for j in range(potentials.shape[0]):
        potentials[j] = 0.0
    for i in range(m):
        multipliers[i] = 0.0
    v, lam, cap = potentials, multipliers, limits.multiplier_cap
    plain = min(PLAIN_ITERATIONS, limits.max_iterations)
    used, converged = newton(work.widths, first, work.target, work.lower, work.upper, work.costs, cap, limits.tolerance, plain,
                             work.response, work.system, work.vectors, v, lam)
    if not converged:
        spent, converged = cooled_newton(work.widths, first, work.target, work.lower, work.upper, work.costs, cap, limits.tolerance,
                                         limits.max_iterations - plain, work.response, work.system, work.vectors, v, lam, work.scaled)
        used += spent
    for k in range(first.shape[0] - 1):
        for x in range(first[k + 1] - first[k]):
            for a in range(A):
                for y in range(work.widths[k + 1]):
                    work.log_occupancy[k, x, a, y] = -math.inf
    gap, violation, unpriced = recover(work.widths, work.target, work.costs, work.response[1], work.response[5], lam, v, cap,
                                       work.occupancy, work.log_occupancy, work.mass, work.next_mass)
    e = 0
    for k in range(first.shape[0] - 1):
        for x in range(first[k + 1] - first[k]):
            for a in range(A):
                for y in range(work.widths[k + 1]):
                    log_occupancy[e] = work.log_occupancy[k, x, a, y]
                    occupancy[e] = work.occupancy[k, x, a, y]
                    e += 1
    return (1 if violation > 1e-9 else 0), used, unpriced, gap
