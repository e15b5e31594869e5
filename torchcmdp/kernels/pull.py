"""The projection's derivative in reverse mode: `projection.implicit.pull` of one instance, and of a batch over threads."""

from __future__ import annotations

import math

import numpy as np

from torchcmdp.kernels.cpu import compiled, entry
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.limits import ACCEPTABLE_RESIDUAL, DEPENDENT, LEFT_BY_ROUNDING
from torchcmdp.kernels.linalg import assemble_border, prepare, solve
from torchcmdp.kernels.newton import spend
from torchcmdp.kernels.pairs import AT_LOWER, FREE, Problem, clipped_value, evaluate, weigh
from torchcmdp.kernels.projection import gather, normalise
from torchcmdp.kernels.threads import over_batch
from torchcmdp.kernels.work import carve, room

# Sweeps over all pairs of axes after which a small symmetric matrix is diagonal; it takes five or so.
MOST_SWEEPS = 30


@compiled
def close_corners(geometry, problem, response, v):
    """Where bounds leave nothing but rounding to the free entries of a pair, these are at their lower ends too."""
    row, successor, p, code = geometry.row, geometry.successor, response.p, response.code
    for pair in range(response.s.shape[0]):
        if not response.clipped[pair]:
            continue
        left = 0.0
        for e in range(row[pair], row[pair + 1]):
            left += p[e] if code[e] == FREE else 0.0
        if not 0.0 < left <= LEFT_BY_ROUNDING:
            continue
        for e in range(row[pair], row[pair + 1]):
            if code[e] == FREE:
                p[e] = problem.lower[e]
                code[e] = AT_LOWER
        psi, _ = clipped_value(row[pair], row[pair + 1], problem, v, successor, 0.0, response)
        response.t[pair] = psi


@compiled
def moves_back(geometry, problem, response, v, grad, target, bound, exponent):
    """target, bound `(E)`, exponent `(P)` <- the transpose of how ln q moves with them at fixed active bounds, on `grad` `(E)`."""
    row, successor, p = geometry.row, geometry.successor, response.p
    for pair in range(exponent.shape[0]):
        clipped = response.clipped[pair]
        all_of_it = 0.0
        giving = 0.0
        free = 0.0
        for e in range(row[pair], row[pair + 1]):
            if p[e] > 0.0:
                all_of_it += grad[e]
                if not clipped or response.code[e] == FREE:
                    giving += grad[e]
                    free += p[e]
        given = giving / free if free > 0.0 else all_of_it
        exponent[pair] = all_of_it
        for e in range(row[pair], row[pair + 1]):
            target[e] = p[e] * all_of_it
            bound[e] = 0.0
            if not clipped or response.code[e] == FREE:
                target[e] += grad[e] - p[e] * given if p[e] > 0.0 else 0.0
            elif p[e] > 0.0:
                price = response.log_p[e] - problem.target[e] - v[successor[e]] - response.t[pair]
                bound[e] = grad[e] / p[e] - given - price * all_of_it


@compiled
def constrain(geometry, costs, flow, net, used):
    """net, used <- outflow - inflow of every state, and the costs, of a flow `(E)`."""
    actions, row, successor = geometry.actions, geometry.row, geometry.successor
    for j in range(net.shape[0]):
        net[j] = 0.0
    for i in range(used.shape[0]):
        used[i] = 0.0
    for pair in range(costs.shape[1]):
        total = 0.0
        for e in range(row[pair], row[pair + 1]):
            total += flow[e]
            net[successor[e]] -= flow[e]
        net[pair // actions] += total
        for i in range(used.shape[0]):
            used[i] += costs[i, pair] * total


@compiled
def diagonalise(matrix, vectors):
    """A small symmetric matrix becomes diagonal and `vectors` its eigenvectors, in columns, by Jacobi's rotations."""
    m = matrix.shape[0]
    for i in range(m):
        for j in range(m):
            vectors[i, j] = 1.0 if i == j else 0.0
    for _ in range(MOST_SWEEPS):
        largest = 0.0
        for i in range(m):
            for j in range(i):
                largest = max(largest, abs(matrix[i, j]))
        if largest <= 1e-17:
            return
        for i in range(m):
            for j in range(i):
                if matrix[i, j] != 0.0:
                    rotate(matrix, vectors, i, j)


@compiled
def rotate(matrix, vectors, i, j):
    """Turn axes i and j until the entry between them is zero."""
    slant = (matrix[j, j] - matrix[i, i]) / (2.0 * matrix[i, j])
    tangent = (1.0 if slant >= 0.0 else -1.0) / (abs(slant) + math.sqrt(slant * slant + 1.0))
    cosine = 1.0 / math.sqrt(tangent * tangent + 1.0)
    sine = tangent * cosine
    for c in range(matrix.shape[0]):
        a, b = matrix[c, i], matrix[c, j]
        matrix[c, i], matrix[c, j] = cosine * a - sine * b, sine * a + cosine * b
    for c in range(matrix.shape[0]):
        a, b = matrix[i, c], matrix[j, c]
        matrix[i, c], matrix[j, c] = cosine * a - sine * b, sine * a + cosine * b
        a, b = vectors[c, i], vectors[c, j]
        vectors[c, i], vectors[c, j] = cosine * a - sine * b, sine * a + cosine * b


@compiled
def reduce_multipliers(geometry, problem, work):
    """Eigenvalues (on the diagonal of `corner`) and vectors (`factor`) of the Hessian of the multipliers that can move.

    In units `linear` in which its diagonal would be one without the potentials, zero for those that cannot move.
    """
    system, small, lam, costs = work.system, work.small, work.lam, problem.costs
    border, solved, corner, root, normal, image = system.border, system.solved, system.corner, small.linear, small.low, small.slope
    m, n = border.shape[0], border.shape[1] - 1
    spend(problem, work.response, work.used)
    violated = False
    for i in range(m):
        violated = violated or work.used[i] > ACCEPTABLE_RESIDUAL * work.scale[i]
    assemble_border(geometry, costs, work.response, system)
    length = 0.0
    for i in range(m):
        for j in range(n):
            solved[i, j] = border[i, j]
        solve(geometry, work.response, system, solved[i])
        own = corner[i, i]
        root[i] = 1.0 / math.sqrt(own) if lam[i] > 0.0 and own > 1e-250 else 0.0
        # where the largest violation is positive the cap is used up, and what one multiplier gains another one loses
        normal[i] = root[i] * work.scale[i] if violated else 0.0
        length += normal[i] * normal[i]
    for i in range(m):
        normal[i] /= max(math.sqrt(length), 1e-12)
        for other in range(i + 1):
            taken = 0.0
            for j in range(n):
                taken += border[i, j] * solved[other, j] + border[other, j] * solved[i, j]
            corner[i, other] = root[i] * (corner[i, other] - 0.5 * taken) * root[other]
            corner[other, i] = corner[i, other]
    along = 0.0
    for i in range(m):
        image[i] = 0.0
        for j in range(m):
            image[i] += corner[i, j] * normal[j]
        along += normal[i] * image[i]
    for i in range(m):
        for j in range(m):
            corner[i, j] -= normal[i] * image[j] + image[i] * normal[j] - normal[i] * normal[j] * along
    diagonalise(corner, small.factor)


@compiled
def solve_duals(geometry, problem, net, used, work):
    """(net, used) <- Hessian^-1 (net, used) over the potentials and the multipliers that can move."""
    system, small = work.system, work.small
    border, solved, root, vectors, left = system.border, system.solved, small.linear, small.factor, small.step
    m, n = border.shape[0], border.shape[1] - 1
    solve(geometry, work.response, system, net)
    for i in range(m):
        total = used[i]
        for j in range(n):
            total -= border[i, j] * net[j]
        left[i] = root[i] * total
        used[i] = 0.0
    for c in range(m):
        value = system.corner[c, c]
        if value > DEPENDENT:
            part = 0.0
            for i in range(m):
                part += vectors[i, c] * left[i]
            for i in range(m):
                used[i] += root[i] * vectors[i, c] * part / value
    for i in range(m):
        for j in range(n):
            net[j] -= solved[i, j] * used[i]


@compiled
def pull_one(geometry, problem, work, grad, target, bound):
    """The cotangent `grad` of ln q pulled back to the target and to the bounds that hold, `(E)`; what costs need is left in `work`.

    Their cotangent is -dlam_i s - lam_i exponent.
    """
    actions, row, successor = geometry.actions, geometry.row, geometry.successor
    response, v, dv, dlam, exponent = work.response, work.v, work.dv, work.dlam, work.response.exponent
    evaluate(geometry, problem, response, v, work.lam)
    close_corners(geometry, problem, response, v)
    work.system.iterates.enough[0] = 1e-12
    prepare(geometry, response, work.system)
    reduce_multipliers(geometry, problem, work)
    moves_back(geometry, problem, response, v, grad, target, bound, exponent)
    constrain(geometry, problem.costs, target, dv, dlam)
    solve_duals(geometry, problem, dv, dlam, work)
    dv[dv.shape[0] - 1] = 0.0
    for pair in range(exponent.shape[0]):
        own = dv[pair // actions]
        for i in range(dlam.shape[0]):
            own += dlam[i] * problem.costs[i, pair]
        for e in range(row[pair], row[pair + 1]):
            grad[e] += response.s[pair] * response.p[e] * (dv[successor[e]] - own)
    moves_back(geometry, problem, response, v, grad, target, bound, exponent)


@entry
def pull_range(
    start, stop, geometry, target, lower, upper, costs, potentials, multipliers, grad, reals, codes,
    d_target, d_lower, d_upper, d_costs,
):  # fmt: skip
    """Pull `grad` back for instances start..stop-1 of a batch of flattened padded tensors; padding is left alone."""
    entry_at, pair_at, row = geometry.entry_at, geometry.pair_at, geometry.row
    work, instance = carve(geometry, costs.shape[1], reals, codes)
    response, own, moved, bound = work.response, instance.occupancy, instance.log_occupancy, work.scaled
    problem = Problem(instance.target, instance.lower, instance.upper, instance.costs, work.weight, work.base)
    for b in range(start, stop):
        gather(geometry, target[b], lower[b], upper[b], costs[b], instance)
        normalise(instance.costs, work.costs, work.scale)
        for i in range(work.lam.shape[0]):
            work.lam[i] = multipliers[b, i]
        for j in range(geometry.state_at.shape[0]):
            work.v[j] = potentials[b, geometry.state_at[j]]
        work.v[geometry.state_at.shape[0]] = 0.0  # of the terminal state: whatever an earlier call left there, NaN too, would count
        for e in range(entry_at.shape[0]):
            own[e] = grad[b, entry_at[e]]
        weigh(geometry, instance.target, instance.upper, work.weight, work.base, response)
        pull_one(geometry, problem, work, own, moved, bound)
        for pair in range(pair_at.shape[0]):
            for i in range(work.lam.shape[0]):
                d_costs[b, i, pair_at[pair]] = -work.dlam[i] * response.s[pair] - work.lam[i] * response.exponent[pair]
            for e in range(row[pair], row[pair + 1]):
                d_target[b, entry_at[e]] = moved[e]
                if response.clipped[pair] and response.code[e] != FREE:
                    if response.code[e] == AT_LOWER:
                        d_lower[b, entry_at[e]] = bound[e]
                    else:
                        d_upper[b, entry_at[e]] = bound[e]


def pull_batch(geometry: Geometry, m: int, inputs: tuple[np.ndarray, ...], outputs: tuple[np.ndarray, ...]) -> None:
    """Fill in the cotangents of target, lower, upper `(B x (L*S*A*K))` and costs `(B x m x (L*S*A))`.

    Args:
        inputs: Those four, potentials `(B x (L*S))`, multipliers `(B x m)` and the cotangent of ln q `(B x (L*S*A*K))`.
        outputs: Zeros, or anything that may stay in the padding and where no bound holds.
    """

    def kernel(start: int, stop: int) -> None:
        pull_range(start, stop, geometry, *inputs, *room(geometry, m), *outputs)

    over_batch(kernel, len(inputs[0]), len(geometry.entry_at))
