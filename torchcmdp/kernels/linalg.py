"""The Newton system: a block-tridiagonal Hessian over the layers, bordered by the safety constraints."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.conjugate import Iterates, empty_iterates, invert_diagonal, iterate
from torchcmdp.kernels.cpu import compiled
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.pairs import FREE

# A pivot below this part of its diagonal entry is noise: the variable is left where it is.
PIVOT_TOLERANCE = 1e-14
# A state with less throughput than this cannot be resolved in float64 and is left where it is.
NEGLIGIBLE = 1e-280


class System(NamedTuple):
    """Lower triangles of the diagonal blocks and the blocks below them, flat; border `(m x n)`, its solution, corner `(m x m)`."""

    diagonal: np.ndarray
    below: np.ndarray
    border: np.ndarray
    solved: np.ndarray
    corner: np.ndarray
    flow: np.ndarray
    iterates: Iterates


def empty_system(geometry: Geometry, m: int) -> System:
    """Room for `assemble` and `factor`."""
    n = len(geometry.state_at)
    widest = int(np.diff(geometry.first).max())
    blocks = (0, 0) if geometry.iterative else (int(geometry.diagonal[-1]), int(geometry.below[-1]))
    sizes = (*blocks, (m, n + 1), (m, n + 1), (m, m), widest)
    return System(*(np.zeros(size) for size in sizes), empty_iterates(geometry))


@compiled
def assemble(geometry, response, system):
    """Hessian of the dual: over pairs, s u u^T + s (diag(p_f) - p_f p_f^T / sum p_f), u = (e_x - p, costs), p_f the unclipped p."""
    first, actions, row, successor = geometry.first, geometry.actions, geometry.row, geometry.successor
    p, s, clipped, outflow = response.p, response.s, response.clipped, response.outflow
    diagonal, below, flow = system.diagonal, system.below, system.flow
    layers = first.shape[0] - 1
    for c in range(diagonal.shape[0]):
        diagonal[c] = 0.0
    for k in range(layers):
        width = first[k + 1] - first[k]
        for x in range(width):
            diagonal[geometry.diagonal[k] + x * width + x] += outflow[first[k] + x]
        if k == layers - 1:
            continue
        after = first[k + 1]
        n_next = first[k + 2] - after
        own = geometry.diagonal[k + 1]
        for x in range(width):
            for y in range(n_next):
                flow[y] = 0.0
            for pair in range((first[k] + x) * actions, (first[k] + x + 1) * actions):
                mass = s[pair]
                start, stop = row[pair], row[pair + 1]
                if geometry.dense[k]:
                    for y in range(n_next):
                        flow[y] += mass * p[start + y]
                else:
                    for e in range(start, stop):
                        flow[successor[e] - after] += mass * p[e]
                if clipped[pair]:
                    bend(start, stop, mass, after, own, n_next, successor, response, diagonal)
            for y in range(n_next):
                below[geometry.below[k + 1] + y * width + x] = -flow[y]
                diagonal[own + y * n_next + y] += flow[y]


@compiled
def bend(start, stop, mass, after, own, n_next, successor, response, diagonal):
    """What a clipped pair adds to the next layer's block beyond diag(p)."""
    p, code = response.p, response.code
    free_mass = 0.0
    for e in range(start, stop):
        if code[e] == FREE:
            free_mass += p[e]
    for e in range(start, stop):
        y = own + (successor[e] - after) * n_next
        if code[e] != FREE:
            diagonal[y + successor[e] - after] -= mass * p[e]
        for other in range(start, e + 1):
            both = mass * p[e] * p[other]
            if code[e] == FREE and code[other] == FREE and both > 0.0:
                both -= both / free_mass
            diagonal[y + successor[other] - after] += both


@compiled
def assemble_border(geometry, costs, response, system):
    """border = sum s costs_i u and corner = sum s costs_i costs_j over pairs."""
    first, actions, row, successor = geometry.first, geometry.actions, geometry.row, geometry.successor
    p, s, border, corner = response.p, response.s, system.border, system.corner
    layers = first.shape[0] - 1
    for i in range(costs.shape[0]):
        for j in range(border.shape[1]):
            border[i, j] = 0.0
        for other in range(i + 1):
            total = 0.0
            for pair in range(s.shape[0]):
                total += s[pair] * costs[i, pair] * costs[other, pair]
            corner[i, other] = total
            corner[other, i] = total
        for k in range(layers):
            after = first[k + 1]
            for j in range(first[k], after):
                for pair in range(j * actions, (j + 1) * actions):
                    weighted = s[pair] * costs[i, pair]
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
def factor(geometry, system):
    """Block Cholesky in place: B_k <- B_k L_{k-1}^-T, D_k <- chol(D_k - B_k B_k^T), with the diagonals inverted.

    A variable that cannot be resolved has a zero there.
    """
    first = geometry.first
    diagonal, below = system.diagonal, system.below
    for k in range(first.shape[0] - 1):
        width = first[k + 1] - first[k]
        before = first[k] - first[k - 1] if k > 0 else 0
        left = geometry.diagonal[k - 1] if k > 0 else 0
        for i in range(width):
            b = geometry.below[k] + i * before
            for j in range(before):
                d = left + j * before
                total = below[b + j]
                for c in range(j):
                    total -= below[b + c] * diagonal[d + c]
                below[b + j] = total * diagonal[d + j]
            row = geometry.diagonal[k] + i * width
            full = diagonal[row + i]
            pivot = full
            for j in range(i):
                other = geometry.below[k] + j * before
                total = diagonal[row + j]
                for c in range(before):
                    total -= below[b + c] * below[other + c]
                d = geometry.diagonal[k] + j * width
                for c in range(j):
                    total -= diagonal[row + c] * diagonal[d + c]
                total *= diagonal[d + j]
                diagonal[row + j] = total
                pivot -= total * total
            for c in range(before):
                pivot -= below[b + c] * below[b + c]
            if full < NEGLIGIBLE or pivot <= PIVOT_TOLERANCE * full:
                for c in range(before):
                    below[b + c] = 0.0
                for c in range(i):
                    diagonal[row + c] = 0.0
                diagonal[row + i] = 0.0
            else:
                diagonal[row + i] = 1.0 / math.sqrt(pivot)


@compiled
def substitute(geometry, system, rhs):
    """rhs <- H^-1 rhs by the factor; zero where a variable cannot be resolved."""
    first = geometry.first
    diagonal, below = system.diagonal, system.below
    layers = first.shape[0] - 1
    for k in range(layers):
        width = first[k + 1] - first[k]
        before = first[k] - first[k - 1] if k > 0 else 0
        for i in range(width):
            total = rhs[first[k] + i]
            b = geometry.below[k] + i * before
            for c in range(before):
                total -= below[b + c] * rhs[first[k] - before + c]
            row = geometry.diagonal[k] + i * width
            for c in range(i):
                total -= diagonal[row + c] * rhs[first[k] + c]
            rhs[first[k] + i] = total * diagonal[row + i]
    for k in range(layers - 1, -1, -1):
        width = first[k + 1] - first[k]
        before = first[k] - first[k - 1] if k > 0 else 0
        for i in range(width - 1, -1, -1):
            row = geometry.diagonal[k] + i * width
            value = rhs[first[k] + i] * diagonal[row + i]
            rhs[first[k] + i] = value
            for c in range(i):
                rhs[first[k] + c] -= diagonal[row + c] * value
            b = geometry.below[k] + i * before
            for c in range(before):
                rhs[first[k] - before + c] -= below[b + c] * value


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
