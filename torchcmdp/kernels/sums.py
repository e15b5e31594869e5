"""Sums in four parts, of which none waits for another: an addition takes four cycles, and two could begin in each."""

from __future__ import annotations

from torchcmdp.kernels.cpu import compiled


@compiled
def inner(rows, i, vector):
    """<rows_i, vector>."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    j = 0
    while j + 3 < vector.shape[0]:
        a += rows[i, j] * vector[j]
        b += rows[i, j + 1] * vector[j + 1]
        c += rows[i, j + 2] * vector[j + 2]
        d += rows[i, j + 3] * vector[j + 3]
        j += 4
    while j < vector.shape[0]:
        a += rows[i, j] * vector[j]
        j += 1
    return (a + b) + (c + d)


@compiled
def scale_each(numbers, factors, start, stop):
    """numbers <- numbers * factors over a range; returns their sum."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    j = start
    while j + 3 < stop:
        numbers[j] *= factors[j]
        numbers[j + 1] *= factors[j + 1]
        numbers[j + 2] *= factors[j + 2]
        numbers[j + 3] *= factors[j + 3]
        a += numbers[j]
        b += numbers[j + 1]
        c += numbers[j + 2]
        d += numbers[j + 3]
        j += 4
    while j < stop:
        numbers[j] *= factors[j]
        a += numbers[j]
        j += 1
    return (a + b) + (c + d)
