"""A proof that a safe set is empty: a weighting of its constraints that every occupancy violates."""

from __future__ import annotations

import math

from torchcmdp.kernels.cpu import compiled
from torchcmdp.kernels.pairs import AT_LOWER, FREE, price


@compiled
def cheapest_mean(start, stop, lower, upper, successor, value, code):
    """min over lower <= p <= upper, sum p = 1 of sum p value(y): what is left over the lower ends goes to the cheapest first."""
    left = 1.0
    mean = 0.0
    for e in range(start, stop):
        code[e] = FREE
        left -= lower[e]
        mean += lower[e] * value[successor[e]]
    while left > 0.0:
        best = -1
        for e in range(start, stop):
            if code[e] == FREE and (best < 0 or value[successor[e]] < value[successor[best]]):
                best = e
        if best < 0:
            break
        code[best] = AT_LOWER
        share = min(left, upper[best] - lower[best])
        mean += share * value[successor[best]]
        left -= share
    return mean


@compiled
def least_violation(geometry, problem, response, multipliers):
    """A lower bound on the largest violation of any occupancy: the least of the multipliers' mean of all constraints.

    Exact for one constraint; for more it is as good as the multipliers. Overwrites the response.
    """
    actions, row, value, penalty = geometry.actions, geometry.row, response.growth, response.penalty
    n = value.shape[0] - 1
    total = 0.0
    for i in range(multipliers.shape[0]):
        total += multipliers[i]
    if total <= 0.0:
        return 0.0
    price(problem.costs, multipliers, penalty)
    value[n] = 0.0
    for j in range(n - 1, -1, -1):
        value[j] = math.inf
        for pair in range(j * actions, (j + 1) * actions):
            if row[pair] == row[pair + 1]:
                continue
            mean = cheapest_mean(row[pair], row[pair + 1], problem.lower, problem.upper, geometry.successor, value, response.code)
            value[j] = min(value[j], penalty[pair] / total + mean)
    return value[0]
