"""What derivatives need of the solver at its solution: the pairs' responses, and solves with the Hessian of the potentials."""

from __future__ import annotations

import numpy as np
from numba import njit

from torchcmdp.projection.compiled.linalg import assemble, factor, solve_lower, solve_upper
from torchcmdp.projection.compiled.pairs import OPTIONS, evaluate


@njit(**OPTIONS)
def respond_range(start, stop, widths, offsets, target, lower, upper, costs, potentials, multipliers, p, code, t, s):
    """Fill in the responses of instances start..stop-1: p and code `(B x L x S x A x S)`, t and s `(B x L x S x A)`."""
    layers, states, actions = s.shape[1], s.shape[2], s.shape[3]
    v, z, exponents = np.empty(offsets[layers]), np.empty(states), np.empty((layers, states, actions))
    for b in range(start, stop):
        for k in range(layers):
            for x in range(widths[k]):
                v[offsets[k] + x] = potentials[b, k, x]
        evaluate(
            widths, offsets, target[b], lower[b], upper[b], costs[b], v, multipliers[b], z, p[b], code[b], t[b], exponents, s[b]
        )  # fmt: skip


@njit(**OPTIONS)
def solve_potentials_range(start, stop, widths, offsets, p, code, s, columns):
    """columns `(B x C x L x S)` <- Hessian^-1 columns for instances start..stop-1, with the potentials' block of the Hessian."""
    layers, n = s.shape[1], offsets[s.shape[1]]
    hessian, border, corner, rhs = np.empty((n, n)), np.empty((n, 0)), np.empty((0, 0)), np.empty(n)
    costs = np.empty((0, layers, s.shape[2], s.shape[3]))
    for b in range(start, stop):
        assemble(widths, offsets, costs, p[b], code[b], s[b], hessian, border, corner)
        factor(widths, offsets, hessian)
        for c in range(columns.shape[1]):
            for k in range(layers):
                for x in range(widths[k]):
                    rhs[offsets[k] + x] = columns[b, c, k, x]
            solve_lower(widths, offsets, hessian, rhs)
            solve_upper(widths, offsets, hessian, rhs)
            for k in range(layers):
                for x in range(widths[k]):
                    columns[b, c, k, x] = rhs[offsets[k] + x]
