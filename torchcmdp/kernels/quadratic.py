"""The quadratic of the multipliers' step over {low <= d, sum d <= room}: m is small, and the answer has to be exact."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.cpu import compiled


class Small(NamedTuple):
    """Work space of size m, and of size m x m."""

    linear: np.ndarray
    low: np.ndarray
    slope: np.ndarray
    step: np.ndarray
    free: np.ndarray
    factor: np.ndarray


@compiled
def coupling(matrix, i, j, pivot):
    """Entry (i, j) of the matrix, or of its restriction to steps in which entry `pivot` takes back what the others add."""
    if pivot < 0:
        return matrix[i, j]
    return matrix[i, j] - matrix[i, pivot] - matrix[pivot, j] + matrix[pivot, pivot]


@compiled
def solve_face(matrix, free, pivot, factor, rhs):
    """rhs <- the restricted matrix^-1 rhs on the free entries but `pivot`, zero on the others, by Cholesky."""
    m = rhs.shape[0]
    for i in range(m):
        if not free[i] or i == pivot:
            rhs[i] = 0.0
            continue
        # a pivot that is noise is kept away from zero
        noise = 1e-14 * (matrix[i, i] + (matrix[pivot, pivot] if pivot >= 0 else 0.0))
        rest = coupling(matrix, i, i, pivot)
        for j in range(i):
            if free[j] and j != pivot:
                total = coupling(matrix, i, j, pivot)
                for c in range(j):
                    if free[c] and c != pivot:
                        total -= factor[i, c] * factor[j, c]
                factor[i, j] = total / factor[j, j]
                rest -= factor[i, j] * factor[i, j]
                rhs[i] -= factor[i, j] * rhs[j]
        factor[i, i] = math.sqrt(max(rest, noise))
        rhs[i] /= factor[i, i]
    for i in range(m - 1, -1, -1):
        if free[i] and i != pivot:
            rhs[i] /= factor[i, i]
            for c in range(i):
                if free[c] and c != pivot:
                    rhs[c] -= factor[i, c] * rhs[i]


@compiled
def sweep(matrix, low, room, d, slope):
    """Minimise over each coordinate in turn; `slope` stays matrix d + linear. Returns the room left and the largest move."""
    largest = 0.0
    for i in range(d.shape[0]):
        new = min(max(d[i] - slope[i] / matrix[i, i], low[i]), d[i] + room)
        move = new - d[i]
        if move != 0.0:
            d[i] = new
            room = max(room - move, 0.0)
            largest = max(largest, abs(move))
            for j in range(d.shape[0]):
                slope[j] += matrix[i, j] * move
    return room, largest


@compiled
def face_step(matrix, small, full):
    """step <- the way to the minimum over the free entries, with a sum of zero where `full`; returns the price of the sum there."""
    slope, step, free = small.slope, small.step, small.free
    m = step.shape[0]
    pivot = -1
    if full:
        for i in range(m):
            if free[i] and (pivot < 0 or matrix[i, i] < matrix[pivot, pivot]):
                pivot = i
    for i in range(m):
        step[i] = -slope[i] + (slope[pivot] if pivot >= 0 else 0.0)
    solve_face(matrix, free, pivot, small.factor, step)
    if pivot < 0:
        return 0.0
    back = 0.0
    mu = -slope[pivot]
    for i in range(m):
        back -= step[i]
    step[pivot] = back
    for i in range(m):
        mu -= matrix[pivot, i] * step[i]
    return mu


@compiled
def quadratic(matrix, room, small, d):
    """d <- argmin 1/2 d'Md + linear'd over low <= d, sum d <= room (with low <= 0 <= room), by a primal active-set method.

    Clipping the unconstrained step instead would give ascent directions: this has to be exact. Two sweeps over the coordinates
    guess the face; then a step to the minimum of the face is cut at the first bound in its way, or the bound with the worst sign
    is released.
    """
    linear, low, slope, step, free = small.linear, small.low, small.slope, small.step, small.free
    m = d.shape[0]
    for i in range(m):
        d[i] = 0.0
        slope[i] = linear[i]
    left = room
    for _ in range(2):
        left, move = sweep(matrix, low, left, d, slope)
        # a zero move is a minimum unless the room is used up, where two entries could still trade places
        if m == 1 or (move == 0.0 and left > 0.0):
            return
    full = left <= 1e-15 * room
    for i in range(m):
        free[i] = d[i] > low[i]
    for _ in range(50 + 10 * m):
        mu = face_step(matrix, small, full)
        scale, blocking = longest_step(small, d, room, full)
        for i in range(m):
            if free[i]:
                d[i] = max(d[i] + scale * step[i], low[i])
        if blocking == m:
            full = True
        elif blocking >= 0:
            d[blocking] = low[blocking]
            free[blocking] = False
        for i in range(m):
            slope[i] = linear[i]
            for j in range(m):
                slope[i] += matrix[i, j] * d[j]
        if blocking >= 0:
            continue
        release = -1
        worst = 0.0
        noise = 0.0
        for i in range(m):
            noise = max(noise, 1e-13 * abs(linear[i]))
        for i in range(m):
            wrong = -slope[i] - mu
            if not free[i] and wrong > max(worst, noise):
                worst = wrong
                release = i
        if full and -mu > max(worst, noise):
            full = False
        elif release >= 0:
            free[release] = True
        else:
            return


@compiled
def longest_step(small, d, room, full):
    """How much of `step` fits into the set, at most all, and which bound is in the way: an entry, m for the sum, or -1 for none."""
    low, step, free = small.low, small.step, small.free
    m = d.shape[0]
    scale = 1.0
    blocking = -1
    used = 0.0
    grown = 0.0
    for i in range(m):
        used += d[i]
        if free[i]:
            grown += step[i]
            if d[i] + scale * step[i] < low[i]:
                scale = (low[i] - d[i]) / step[i]
                blocking = i
    if not full and used + scale * grown > room:
        scale = max(room - used, 0.0) / grown
        blocking = m
    return scale, blocking
