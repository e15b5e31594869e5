"""The Newton system: a block-tridiagonal Hessian over the layers, bordered by the safety constraints."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.conjugate import Iterates, invert_diagonal, iterate
from torchcmdp.kernels.cpu import compiled
from torchcmdp.kernels.pairs import FREE
from torchcmdp.kernels.sums import inner

# A pivot below this part of its diagonal entry is noise: the variable is left where it is.
PIVOT_TOLERANCE = 1e-14
# A state with less throughput than this cannot be resolved in float64 and is left where it is.
NEGLIGIBLE = 1e-280


class System(NamedTuple):
    """The Newton system of one instance.

    Attributes:
        diagonal: The blocks D_k of the layers, row by row, of which only the upper triangles are used.
        above: The blocks above them, n_{k-1} x n_k, row by row.
        border, solved: `(m x n + 1)`, and what `solve` makes of it. corner: `(m x m)`.
        flow, free: Work space as wide as the widest layer.
        iterates: Work space of conjugate gradients.
    """

    diagonal: np.ndarray
    above: np.ndarray
    border: np.ndarray
    solved: np.ndarray
    corner: np.ndarray
    flow: np.ndarray
    free: np.ndarray
    iterates: Iterates


@compiled
def assemble(geometry, response, system):
    """Hessian of the dual: over pairs, s u u^T + s (diag(p_f) - p_f p_f^T / sum p_f), u = e_x - p, p_f the unclipped p."""
    first, actions, row, successor = geometry.first, geometry.actions, geometry.row, geometry.successor
    p, s, clipped, outflow = response.p, response.s, response.clipped, response.outflow
    diagonal, above, flow = system.diagonal, system.above, system.flow
    layers = first.shape[0] - 1
    for c in range(diagonal.shape[0]):
        diagonal[c] = 0.0
    for k in range(layers):
        width, after = first[k + 1] - first[k], first[k + 1]
        for x in range(width):
            diagonal[geometry.diagonal[k] + x * (width + 1)] += outflow[first[k] + x]
        if k == layers - 1:
            break
        n_next, own, dense = first[k + 2] - after, geometry.diagonal[k + 1], geometry.dense[k] != 0
        for x in range(width):
            for y in range(n_next):
                flow[y] = 0.0
            pairs = (first[k] + x) * actions
            for pair in range(pairs, pairs + actions):
                if not clipped[pair]:
                    add_flow(row[pair], row[pair + 1], s[pair], after, dense, successor, p, flow, 0)
            block = geometry.above[k + 1] + x * n_next
            for y in range(n_next):
                above[block + y] = -flow[y]
                diagonal[own + y * (n_next + 1)] += flow[y]
            for pair in range(pairs, pairs + actions):
                if clipped[pair]:
                    add_flow(row[pair], row[pair + 1], -s[pair], after, dense, successor, p, above, block)
                    bend(row[pair], row[pair + 1], s[pair], after, dense, own, n_next, successor, response, system)


@compiled
def add_flow(start, stop, mass, after, dense, successor, p, flow, at):
    """flow[at + y] += mass * p(y)."""
    if dense:
        for y in range(stop - start):
            flow[at + y] += mass * p[start + y]
    else:
        for e in range(start, stop):
            flow[at + successor[e] - after] += mass * p[e]


@compiled
def bend(start, stop, mass, after, dense, own, n_next, successor, response, system):
    """Add mass (p p^T + diag(p_f) - p_f p_f^T / sum p_f) of a clipped pair to the next layer's block."""
    p, code, diagonal, free = response.p, response.code, system.diagonal, system.free
    free_mass = 0.0
    for e in range(start, stop):
        free[e - start] = p[e] if code[e] == FREE else 0.0
        free_mass += free[e - start]
    for e in range(start, stop):
        both = mass * p[e]
        taken = mass * free[e - start] / free_mass if free_mass > 0.0 else 0.0
        y = own + (successor[e] - after) * n_next
        diagonal[y + successor[e] - after] += mass * free[e - start]
        if dense:
            for c in range(e - start, n_next):
                diagonal[y + c] += both * p[start + c] - taken * free[c]
        else:
            for other in range(e, stop):
                diagonal[y + successor[other] - after] += both * p[other] - taken * free[other - start]


@compiled
def assemble_border(geometry, costs, response, system):
    """border = sum s costs_i u and corner = sum s costs_i costs_j over pairs."""
    first, actions, row, successor = geometry.first, geometry.actions, geometry.row, geometry.successor
    p, s, spent, border, corner = response.p, response.s, response.exponent, system.border, system.corner
    layers = first.shape[0] - 1
    for i in range(costs.shape[0]):
        for j in range(border.shape[1]):
            border[i, j] = 0.0
        for pair in range(s.shape[0]):
            spent[pair] = s[pair] * costs[i, pair]
        for other in range(i + 1):
            corner[i, other] = inner(costs, other, spent)
            corner[other, i] = corner[i, other]
        for k in range(layers):
            after = first[k + 1]
            for j in range(first[k], after):
                for pair in range(j * actions, (j + 1) * actions):
                    weighted = spent[pair]
                    border[i, j] += weighted
                    if weighted == 0.0 or k == layers - 1:
                        continue
                    start, stop = row[pair], row[pair + 1]
                    if geometry.dense[k]:
                        for e in range(stop - start):
                            border[i, after + e] -= weighted * p[start + e]
                    else:
                        for e in range(start, stop):
                            border[i, successor[e]] -= weighted * p[e]


@compiled
def subtract_rows(target, at, length, weights, first_weight, stride, rows, first_row, width, count):
    """target[at ...] -= sum_c weights[c] rows[c] over `count` rows, four at a time: the inner loop of every step below."""
    c = 0
    while c + 3 < count:
        w = first_weight + c * stride
        r = first_row + c * width
        a0, a1, a2, a3 = weights[w], weights[w + stride], weights[w + 2 * stride], weights[w + 3 * stride]
        for y in range(length):
            target[at + y] -= (
                a0 * rows[r + y] + a1 * rows[r + width + y] + a2 * rows[r + 2 * width + y] + a3 * rows[r + 3 * width + y]
            )
        c += 4
    while c < count:
        a0 = weights[first_weight + c * stride]
        r = first_row + c * width
        for y in range(length):
            target[at + y] -= a0 * rows[r + y]
        c += 1


@compiled
def factor(geometry, system):
    """Block Cholesky H = U^T U in place: A_k <- U_{k-1}^-T A_k, U_k <- chol(D_k - A_k^T A_k), with the diagonals inverted.

    A variable that cannot be resolved has a zero there.
    """
    first, diagonal, above = geometry.first, system.diagonal, system.above
    for k in range(first.shape[0] - 1):
        width = first[k + 1] - first[k]
        before = first[k] - first[k - 1] if k > 0 else 0
        own, block, left = geometry.diagonal[k], geometry.above[k], geometry.diagonal[k - 1] if k > 0 else 0
        for j in range(before):
            at = block + j * width
            subtract_rows(above, at, width, diagonal, left + j, before, above, block, width, j)
            inverse = diagonal[left + j * (before + 1)]
            for y in range(width):
                above[at + y] *= inverse
        for i in range(width):
            at = own + i * (width + 1)
            full = diagonal[at]
            subtract_rows(diagonal, at, width - i, above, block + i, width, above, block + i, width, before)
            subtract_rows(diagonal, at, width - i, diagonal, own + i, width, diagonal, own + i, width, i)
            if full < NEGLIGIBLE or diagonal[at] <= PIVOT_TOLERANCE * full:
                drop(i, width, before, own, block, diagonal, above)
            else:
                inverse = 1.0 / math.sqrt(diagonal[at])
                for y in range(1, width - i):
                    diagonal[at + y] *= inverse
                diagonal[at] = inverse


@compiled
def drop(i, width, before, own, block, diagonal, above):
    """Take variable i of a layer out of the factorisation."""
    for c in range(before):
        above[block + c * width + i] = 0.0
    for c in range(i):
        diagonal[own + c * width + i] = 0.0
    for y in range(i, width):
        diagonal[own + i * width + y] = 0.0


@compiled
def substitute(geometry, system, rhs):
    """rhs <- H^-1 rhs by the factor; zero where a variable cannot be resolved."""
    first, diagonal, above = geometry.first, system.diagonal, system.above
    layers = first.shape[0] - 1
    for k in range(layers):
        width, here = first[k + 1] - first[k], first[k]
        before = first[k] - first[k - 1] if k > 0 else 0
        subtract_rows(rhs, here, width, rhs, here - before, 1, above, geometry.above[k], width, before)
        for i in range(width):
            at = geometry.diagonal[k] + i * (width + 1)
            value = rhs[here + i] * diagonal[at]
            rhs[here + i] = value
            for y in range(1, width - i):
                rhs[here + i + y] -= value * diagonal[at + y]
    for k in range(layers - 1, -1, -1):
        width, here = first[k + 1] - first[k], first[k]
        if k < layers - 1:
            n_next = first[k + 2] - first[k + 1]
            for x in range(width):
                block = geometry.above[k + 1] + x * n_next
                total = rhs[here + x]
                for y in range(n_next):
                    total -= above[block + y] * rhs[here + width + y]
                rhs[here + x] = total
        for i in range(width - 1, -1, -1):
            at = geometry.diagonal[k] + i * (width + 1)
            total = rhs[here + i]
            for y in range(1, width - i):
                total -= diagonal[at + y] * rhs[here + i + y]
            rhs[here + i] = total * diagonal[at]


@compiled
def prepare(geometry, response, system):
    """Make the Hessian at `response` ready for `solve`."""
    if geometry.iterative:
        invert_diagonal(geometry, response, NEGLIGIBLE, system.iterates.inverse)
    else:
        assemble(geometry, response, system)
        factor(geometry, system)


@compiled
def solve(geometry, response, system, rhs):
    """rhs <- H^-1 rhs after `prepare`; zero where a variable cannot be resolved. The last of its n + 1 entries is unused."""
    if geometry.iterative:
        iterate(geometry, response, system.iterates, rhs)
    else:
        substitute(geometry, system, rhs)


@compiled
def schur(geometry, response, system):
    """solved <- H^-1 border and corner <- corner - border^T solved, with a ridge that keeps duplicate constraints solvable."""
    border, solved, corner = system.border, system.solved, system.corner
    m, n = border.shape[0], border.shape[1] - 1
    for i in range(m):
        for j in range(n):
            solved[i, j] = border[i, j]
        solve(geometry, response, system, solved[i])
        for other in range(i + 1):
            total = 0.0
            for c in range(n):
                total += border[other, c] * solved[i, c]
            reduced = corner[i, other] - total
            if other == i:
                reduced = max(reduced, 0.0) + 1e-13 * corner[i, i] + 1e-250
            corner[i, other] = reduced
            corner[other, i] = reduced
