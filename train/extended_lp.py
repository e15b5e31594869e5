"""The extended linear program of an optimistic CMDP written out row by row and solved by HiGHS: slow, and beyond doubt."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, lil_array

from torchcmdp import Layout, TorchCMDPError

TIGHT = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}


class Program(NamedTuple):
    """Variables q(x,a,y) in the order of `index`, and the common violation s last."""

    index: dict[tuple[int, int, int, int], int]
    flow: csr_array
    source: np.ndarray
    rows: csr_array
    constraints: int


def build(layout: Layout, lower: np.ndarray, upper: np.ndarray, costs: np.ndarray) -> Program:
    """Flow equations, interval rows `(L x S x A x S)`, and the m rows <costs_i, q> - s <= 0, costs `(m x L x S x A)`."""
    widths = layout.widths
    index: dict[tuple[int, int, int, int], int] = {}
    for k, x, a, y in np.argwhere(layout.transition_mask().numpy()).tolist():
        index[k, x, a, y] = len(index)
    flow, source = lil_array((sum(widths[:-1]), len(index) + 1)), np.zeros(sum(widths[:-1]))
    source[0] = 1
    first = np.cumsum((0, *widths))
    rows = lil_array((2 * len(index) + len(costs), len(index) + 1))
    for (k, x, a, y), j in index.items():
        flow[first[k] + x, j] += 1
        if k + 1 < len(widths) - 1:
            flow[first[k + 1] + y, j] -= 1
        for z in range(widths[k + 1]):
            rows[2 * j, index[k, x, a, z]] = (z == y) - upper[k, x, a, y]
            rows[2 * j + 1, index[k, x, a, z]] = lower[k, x, a, y] - (z == y)
        for i, cost in enumerate(costs):
            rows[2 * len(index) + i, j] = cost[k, x, a]
    for i in range(len(costs)):
        rows[2 * len(index) + i, len(index)] = -1
    return Program(index, flow.tocsr(), source, rows.tocsr(), len(costs))


def solve(layout: Layout, rewards: np.ndarray, lower: np.ndarray, upper: np.ndarray, costs: np.ndarray) -> tuple[float, float]:
    """The best reward, and the least common violation: where it is positive, the reward at that violation plus 1e-7."""
    return optimise(build(layout, lower, upper, costs), rewards)


def optimise(program: Program, rewards: np.ndarray) -> tuple[float, float]:
    """What `solve` returns, of a program that is already built."""
    n = len(program.index)
    least = 0.0
    if program.constraints:
        least = _highs(program, np.append(np.zeros(n), 1.0), None)
        least = least if least > 1e-9 else 0.0
    gain = np.zeros(n + 1)
    k, x, a, _ = np.array(list(program.index)).T
    gain[:n] = -rewards[k, x, a]
    return -_highs(program, gain, least + 1e-7 if least else 0.0), least


def _highs(program: Program, objective: np.ndarray, most: float | None) -> float:
    bounds = np.tile((0.0, np.inf), (len(objective), 1))
    bounds[-1, 1] = np.inf if most is None else most
    limits = np.zeros(program.rows.shape[0])
    result = linprog(objective, program.rows, limits, program.flow, program.source, bounds=bounds, method="highs", options=TIGHT)
    if result.status != 0:
        raise TorchCMDPError(f"HiGHS could not solve the extended program: {result.message}")
    return float(result.fun)
