"""The Newton system: a Hessian with a block-tridiagonal profile over the layers, bordered by the safety constraints."""

from __future__ import annotations

import math

from numba import njit

from torchcmdp.projection.compiled.pairs import FREE, OPTIONS

# A pivot below this part of its diagonal entry is noise: the variable is left where it is.
PIVOT_TOLERANCE = 1e-14
# A state with less throughput than this cannot be resolved in float64 and is left where it is.
NEGLIGIBLE = 1e-280


@njit(**OPTIONS)
def assemble(widths, offsets, costs, p, code, s, hessian, border, corner):
    """Hessian of the dual: over pairs, s u u^T + s (diag(p_f) - p_f p_f^T / sum p_f), u = (e_x - p, costs), p_f the unclipped p.

    Only the lower triangle is filled, and in it only the profile. For an unclipped pair the p p^T terms cancel.
    """
    layers, actions = s.shape[0], s.shape[2]
    m = costs.shape[0]
    hessian[:, :] = 0.0
    border[:, :] = 0.0
    corner[:, :] = 0.0
    for k in range(layers):
        n_next = widths[k + 1] if k < layers - 1 else 0
        base = offsets[k + 1]
        for x in range(widths[k]):
            j = offsets[k] + x
            for a in range(actions):
                mass = s[k, x, a]
                hessian[j, j] += mass
                for i in range(m):
                    weighted = mass * costs[i, k, x, a]
                    border[j, i] += weighted
                    for y in range(n_next):
                        border[base + y, i] -= weighted * p[k, x, a, y]
                    for other in range(i + 1):
                        corner[i, other] += weighted * costs[other, k, x, a]
                free_mass = 0.0
                clipped = False
                for y in range(n_next):
                    hessian[base + y, j] -= mass * p[k, x, a, y]
                    if code[k, x, a, y] == FREE:
                        hessian[base + y, base + y] += mass * p[k, x, a, y]
                        free_mass += p[k, x, a, y]
                    else:
                        clipped = True
                if clipped:
                    for y in range(n_next):
                        for w in range(y + 1):
                            both = mass * p[k, x, a, y] * p[k, x, a, w]
                            if code[k, x, a, y] == FREE and code[k, x, a, w] == FREE:
                                both -= both / free_mass
                            hessian[base + y, base + w] += both
    for i in range(m):
        for other in range(i):
            corner[other, i] = corner[i, other]


@njit(**OPTIONS)
def factor(widths, offsets, hessian):
    """Cholesky factor in place, inside the profile: a row of layer k reaches back to the first state of layer k - 1."""
    for k in range(widths.shape[0] - 1):
        first = offsets[k - 1] if k > 0 else 0
        for i in range(offsets[k], offsets[k + 1]):
            diagonal = hessian[i, i]
            for j in range(first, i):
                row_start = first if j >= offsets[k] or k < 2 else max(first, offsets[k - 2])
                total = hessian[i, j]
                for c in range(row_start, j):
                    total -= hessian[i, c] * hessian[j, c]
                hessian[i, j] = total / hessian[j, j]
            pivot = diagonal
            for c in range(first, i):
                pivot -= hessian[i, c] * hessian[i, c]
            if diagonal < NEGLIGIBLE or pivot <= PIVOT_TOLERANCE * diagonal:
                for c in range(first, i):
                    hessian[i, c] = 0.0
                hessian[i, i] = math.inf
            else:
                hessian[i, i] = math.sqrt(pivot)


@njit(**OPTIONS)
def solve_lower(widths, offsets, cholesky, rhs):
    """rhs <- L^-1 rhs."""
    for k in range(widths.shape[0] - 1):
        first = offsets[k - 1] if k > 0 else 0
        for i in range(offsets[k], offsets[k + 1]):
            total = rhs[i]
            for c in range(first, i):
                total -= cholesky[i, c] * rhs[c]
            rhs[i] = total / cholesky[i, i]


@njit(**OPTIONS)
def solve_upper(widths, offsets, cholesky, rhs):
    """rhs <- L^-T rhs."""
    for k in range(widths.shape[0] - 2, -1, -1):
        first = offsets[k - 1] if k > 0 else 0
        for i in range(offsets[k + 1] - 1, offsets[k] - 1, -1):
            rhs[i] /= cholesky[i, i]
            for c in range(first, i):
                rhs[c] -= cholesky[i, c] * rhs[i]


@njit(**OPTIONS)
def schur(widths, offsets, cholesky, border, corner):
    """border <- L^-1 border and corner <- corner - border^T border, with a ridge that keeps duplicate constraints solvable."""
    m = corner.shape[0]
    for i in range(m):
        solve_lower(widths, offsets, cholesky, border[:, i])
        for other in range(i + 1):
            total = 0.0
            for c in range(border.shape[0]):
                total += border[c, i] * border[c, other]
            reduced = corner[i, other] - total
            if other == i:
                reduced = max(reduced, 0.0) + 1e-13 * corner[i, i] + 1e-250
            corner[i, other] = reduced
            corner[other, i] = reduced


@njit(**OPTIONS)
def solve_free(matrix, free, rhs, work):
    """rhs <- matrix[free, free]^-1 rhs on the free entries, zero on the others; `work` is overwritten by the factor."""
    m = rhs.shape[0]
    for i in range(m):
        if not free[i]:
            rhs[i] = 0.0
            continue
        for j in range(i):
            if free[j]:
                total = matrix[i, j]
                for c in range(j):
                    if free[c]:
                        total -= work[i, c] * work[j, c]
                work[i, j] = total / work[j, j]
        pivot = matrix[i, i]
        for c in range(i):
            if free[c]:
                pivot -= work[i, c] * work[i, c]
        work[i, i] = math.sqrt(max(pivot, 1e-14 * matrix[i, i]))
        for c in range(i):
            if free[c]:
                rhs[i] -= work[i, c] * rhs[c]
        rhs[i] /= work[i, i]
    for i in range(m - 1, -1, -1):
        if free[i]:
            rhs[i] /= work[i, i]
            for c in range(i):
                if free[c]:
                    rhs[c] -= work[i, c] * rhs[i]


@njit(**OPTIONS)
def coordinate_sweep(matrix, low, high, d, slope):
    """Minimise the boxed quadratic over each coordinate in turn; `slope` stays matrix d + linear. Returns the largest move."""
    largest = 0.0
    for i in range(d.shape[0]):
        new = min(max(d[i] - slope[i] / matrix[i, i], low[i]), high[i])
        move = new - d[i]
        if move != 0.0:
            d[i] = new
            largest = max(largest, abs(move))
            for j in range(d.shape[0]):
                slope[j] += matrix[i, j] * move
    return largest


@njit(**OPTIONS)
def box_quadratic(matrix, linear, low, high, d, slope, free, step, work):
    """d <- argmin 1/2 d'Md + linear'd over low <= d <= high (with low <= 0 <= high), by a primal active-set method.

    Clipping the unconstrained step instead would give ascent directions: this has to be exact. Two sweeps over the coordinates
    guess the face; then a step to the minimum of the face is cut at the first bound in its way, or the bound with the worst sign
    is released.
    """
    m = d.shape[0]
    d[:] = 0.0
    slope[:] = linear
    for _ in range(2):
        if coordinate_sweep(matrix, low, high, d, slope) == 0.0 or m == 1:
            return
    for i in range(m):
        free[i] = low[i] < d[i] < high[i]
    for _ in range(50 + 10 * m):
        for i in range(m):
            step[i] = -slope[i]
        solve_free(matrix, free, step, work)
        scale = 1.0
        blocking = -1
        for i in range(m):
            if free[i] and d[i] + scale * step[i] > high[i]:
                scale = (high[i] - d[i]) / step[i]
                blocking = i
            elif free[i] and d[i] + scale * step[i] < low[i]:
                scale = (low[i] - d[i]) / step[i]
                blocking = i
        for i in range(m):
            if free[i]:
                d[i] = min(max(d[i] + scale * step[i], low[i]), high[i])
        if blocking >= 0:
            d[blocking] = high[blocking] if step[blocking] > 0.0 else low[blocking]
            free[blocking] = False
        release = -1
        worst = 0.0
        for i in range(m):
            slope[i] = linear[i]
            for j in range(m):
                slope[i] += matrix[i, j] * d[j]
            wrong = -slope[i] if d[i] <= low[i] else slope[i]
            if blocking < 0 and not free[i] and high[i] > low[i] and wrong > max(worst, 1e-13 * abs(linear[i])):
                worst = wrong
                release = i
        if blocking < 0:
            if release < 0:
                return
            free[release] = True
