"""The simplex method over mixtures of occupancies: a basis of m + 1 columns, the constraints' rows first, then their weights'.

A basis holds occupancies, slacks of constraints and, until a safe mixture is found, one column for the common violation s.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.limits import FEASIBILITY, HAIR, RELAXATION, SMALLEST_PIVOT
from torchcmdp.kernels.options import kernel

# What a column of the basis is, if it is not the slack of constraint i >= 0.
OCCUPANCY, COMMON = -1, -2


class Simplex(NamedTuple):
    """A basis of n = m + 1 columns and what follows from it.

    Attributes:
        basis, inverse, copy: `(n x n)`.
        kinds: What the columns are, `(n,)` int64.
        gain: Their rewards; limits: the right-hand side; point: the basic variables; duals, entering, direction: `(n,)` each.
    """

    basis: np.ndarray
    inverse: np.ndarray
    copy: np.ndarray
    kinds: np.ndarray
    gain: np.ndarray
    limits: np.ndarray
    point: np.ndarray
    duals: np.ndarray
    entering: np.ndarray
    direction: np.ndarray


def empty_simplex(constraints: int) -> Simplex:
    """Room for a basis."""
    n = constraints + 1
    square = [np.zeros((n, n)) for _ in range(3)]
    return Simplex(*square, np.zeros(n, np.int64), *(np.zeros(n) for _ in range(6)))


@kernel
def invert(matrix, inverse):
    """inverse <- matrix^-1 by Gauss-Jordan elimination with row pivoting; `matrix` is overwritten."""
    n = matrix.shape[0]
    for i in range(n):
        for j in range(n):
            inverse[i, j] = 1.0 if i == j else 0.0
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


@kernel
def start(simplex):
    """The slacks and one occupancy, whose costs stand in the last column; if it is unsafe, its worst slack gives way to s.

    Returns whether it is safe.
    """
    basis, kinds = simplex.basis, simplex.kinds
    m = kinds.shape[0] - 1
    worst = -1
    for i in range(m):
        kinds[i] = i
        simplex.gain[i] = 0.0
        simplex.limits[i] = 0.0
        for j in range(m):
            basis[i, j] = 1.0 if i == j else 0.0
        basis[m, i] = 0.0
        if basis[i, m] > 0.0 and (worst < 0 or basis[i, m] > basis[worst, m]):
            worst = i
    kinds[m] = OCCUPANCY
    basis[m, m] = 1.0
    simplex.limits[m] = 1.0
    if worst >= 0:
        kinds[worst] = COMMON
        for i in range(m):
            basis[i, worst] = -1.0
    return worst < 0


@kernel
def basic_solution(simplex):
    """inverse <- basis^-1 and point <- the values of the basic variables; returns where s is among them, -1 if it is not."""
    inverse, point = simplex.inverse, simplex.point
    n = point.shape[0]
    for i in range(n):
        for j in range(n):
            simplex.copy[i, j] = simplex.basis[i, j]
    invert(simplex.copy, inverse)
    common = -1
    for j in range(n):
        point[j] = 0.0
        for i in range(n):
            point[j] += inverse[j, i] * simplex.limits[i]
        if simplex.kinds[j] == COMMON:
            common = j
    return common


@kernel
def find_duals(simplex, first_phase):
    """The duals of the objective: minus the common violation in the first phase, the reward in the second.

    Where the basis is almost singular its inverse is rough, and what the basic columns still promise is rounding: taking that off
    once more leaves promises that mean something.
    """
    duals = simplex.duals
    n = duals.shape[0]
    for i in range(n):
        duals[i] = 0.0
    for _ in range(2):
        for j in range(n):
            worth = simplex.gain[j]
            if first_phase:
                worth = -1.0 if simplex.kinds[j] == COMMON else 0.0
            for i in range(n):
                worth -= duals[i] * simplex.basis[i, j]
            simplex.direction[j] = worth
        for j in range(n):
            for i in range(n):
                duals[i] += simplex.direction[j] * simplex.inverse[j, i]


@kernel
def leaving_row(simplex):
    """The first basic variable to reach zero when `entering` comes in, s first among equals; -1 if none does.

    The first pass finds the longest step that leaves every variable above minus a hair, the second takes the largest pivot among
    those that block it: small pivots would ruin the basis.
    """
    point, direction = simplex.point, simplex.direction
    n = point.shape[0]
    longest = math.inf
    for j in range(n):
        direction[j] = 0.0
        for i in range(n):
            direction[j] += simplex.inverse[j, i] * simplex.entering[i]
        if direction[j] > SMALLEST_PIVOT:
            longest = min(longest, (max(point[j], 0.0) + HAIR) / direction[j])
    leaving = -1
    for j in range(n):
        if direction[j] > SMALLEST_PIVOT and max(point[j], 0.0) <= longest * direction[j]:
            if simplex.kinds[j] == COMMON:
                return j
            if leaving < 0 or direction[j] > direction[leaving]:
                leaving = j
    return leaving


@kernel
def replace(simplex, row, kind, gain):
    """The entering column in the place of `row`."""
    for i in range(simplex.entering.shape[0]):
        simplex.basis[i, row] = simplex.entering[i]
    simplex.kinds[row] = kind
    simplex.gain[row] = gain


@kernel
def end_first_phase(simplex, common):
    """Fix the violation that cannot be avoided: its column turns into a slack that all constraints share.

    Returns the violation, zero where it is rounding.
    """
    m = simplex.point.shape[0] - 1
    excess = max(simplex.point[common], 0.0)
    infeasible = excess > FEASIBILITY
    for i in range(m):
        simplex.limits[i] = excess + RELAXATION if infeasible else excess
        simplex.basis[i, common] = 1.0
    simplex.kinds[common] = m  # a slack, but of no constraint in particular
    return excess if infeasible else 0.0
