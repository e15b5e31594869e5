"""The Newton system by conjugate gradients: where layers are wide and pairs have few successors, blocks would be dense and huge."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.cpu import compiled
from torchcmdp.kernels.pairs import FREE

# Steps after which a solution has to do.
STEPS = 3000


class Iterates(NamedTuple):
    """Work space `(n + 1)`: inverse diagonal (zero at states that cannot be resolved), residual, direction, its image, solution.

    `enough` `(1)` is the part of the right-hand side at which a solution will do.
    """

    inverse: np.ndarray
    residual: np.ndarray
    direction: np.ndarray
    image: np.ndarray
    solution: np.ndarray
    enough: np.ndarray


@compiled
def apply(geometry, response, x, image):
    """image <- H x, pair by pair; x and image have n + 1 entries, of which the terminal one is zero."""
    actions, row, successor = geometry.actions, geometry.row, geometry.successor
    p, s, code, clipped = response.p, response.s, response.code, response.clipped
    n = x.shape[0] - 1
    for j in range(n + 1):
        image[j] = 0.0
    for j in range(n):
        own = 0.0
        for pair in range(j * actions, (j + 1) * actions):
            mass = s[pair]
            start, stop = row[pair], row[pair + 1]
            if stop - start == 1:
                along = mass * (x[j] - x[successor[start]])
                own += along
                image[successor[start]] -= along
                continue
            mean = 0.0
            for e in range(start, stop):
                mean += p[e] * x[successor[e]]
            free_mean = 0.0
            free_mass = 1.0
            if clipped[pair]:
                free_mass = 0.0
                for e in range(start, stop):
                    if code[e] == FREE:
                        free_mass += p[e]
                        free_mean += p[e] * x[successor[e]]
            else:
                free_mean = mean
            along = mass * (x[j] - mean)
            own += along
            centre = free_mean / free_mass if free_mass > 0.0 else 0.0
            for e in range(start, stop):
                y = successor[e]
                bent = mass * (x[y] - centre) if not clipped[pair] or code[e] == FREE else 0.0
                image[y] += p[e] * (bent - along)
        image[j] += own
    image[n] = 0.0


@compiled
def invert_diagonal(geometry, response, negligible, inverse):
    """inverse <- 1 / diagonal of H, zero where the throughput is negligible."""
    row, successor = geometry.row, geometry.successor
    p, s, code, clipped = response.p, response.s, response.code, response.clipped
    n = inverse.shape[0] - 1
    for j in range(n + 1):
        inverse[j] = response.outflow[j] if j < n else 0.0
    for pair in range(s.shape[0]):
        start, stop = row[pair], row[pair + 1]
        free_mass = 0.0
        if clipped[pair]:
            for e in range(start, stop):
                if code[e] == FREE:
                    free_mass += p[e]
        for e in range(start, stop):
            if not clipped[pair]:
                part = p[e]
            elif code[e] == FREE and p[e] > 0.0:
                part = p[e] + p[e] * p[e] * (1.0 - 1.0 / free_mass)
            else:
                part = p[e] * p[e]
            inverse[successor[e]] += s[pair] * part
    for j in range(n):
        inverse[j] = 1.0 / inverse[j] if inverse[j] > negligible else 0.0
    inverse[n] = 0.0


@compiled
def iterate(geometry, response, iterates, rhs):
    """rhs <- H^-1 rhs by conjugate gradients with the diagonal as preconditioner; zero at states that cannot be resolved."""
    inverse, residual, direction = iterates.inverse, iterates.residual, iterates.direction
    image, solution = iterates.image, iterates.solution
    n = inverse.shape[0] - 1
    size = 0.0
    for j in range(n):
        residual[j] = rhs[j] if inverse[j] > 0.0 else 0.0
        direction[j] = residual[j] * inverse[j]
        solution[j] = 0.0
        size += residual[j] * direction[j]
    direction[n] = 0.0
    goal = iterates.enough[0] ** 2 * size
    for _ in range(STEPS):
        if not size > goal:
            break
        apply(geometry, response, direction, image)
        curvature = 0.0
        for j in range(n):
            curvature += direction[j] * image[j]
        if not curvature > 0.0:
            break
        length = size / curvature
        new_size = 0.0
        for j in range(n):
            solution[j] += length * direction[j]
            if inverse[j] > 0.0:
                residual[j] -= length * image[j]
            new_size += residual[j] * residual[j] * inverse[j]
        again = new_size / size
        size = new_size
        for j in range(n):
            direction[j] = residual[j] * inverse[j] + again * direction[j]
    for j in range(n):
        rhs[j] = solution[j]
