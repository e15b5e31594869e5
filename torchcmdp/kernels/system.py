"""What derivatives need of the solver at its solution: the pairs' responses, and solves with the Hessian of the potentials."""

from __future__ import annotations

import numpy as np

from torchcmdp.kernels.cpu import entry
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.linalg import prepare, solve
from torchcmdp.kernels.pairs import FREE, Problem, evaluate, weigh
from torchcmdp.kernels.projection import gather
from torchcmdp.kernels.pull import close_corners
from torchcmdp.kernels.threads import over_batch
from torchcmdp.kernels.work import carve, memory, room


@entry
def respond_range(
    start, stop, geometry, target, lower, upper, costs, potentials, multipliers, reals, codes, p, code, t, s,
):  # fmt: skip
    """Fill in the responses of instances start..stop-1 of flattened padded tensors."""
    entry_at, pair_at, state_at = geometry.entry_at, geometry.pair_at, geometry.state_at
    work, instance = carve(geometry, costs.shape[1], reals, codes)
    response = work.response
    problem = Problem(instance.target, instance.lower, instance.upper, instance.costs, work.weight, work.base)
    for b in range(start, stop):
        gather(geometry, target[b], lower[b], upper[b], costs[b], instance)
        for i in range(costs.shape[1]):
            work.lam[i] = multipliers[b, i]
        for j in range(state_at.shape[0]):
            work.v[j] = potentials[b, state_at[j]]
        work.v[state_at.shape[0]] = 0.0  # of the terminal state, as in `pull_range`
        weigh(geometry, instance.target, instance.upper, work.weight, work.base, response)
        evaluate(geometry, problem, response, work.v, work.lam)
        close_corners(geometry, problem, response, work.v)
        for pair in range(pair_at.shape[0]):
            s[b, pair_at[pair]] = response.s[pair]
            t[b, pair_at[pair]] = response.t[pair] if response.clipped[pair] else 0.0
            for e in range(geometry.row[pair], geometry.row[pair + 1]):
                p[b, entry_at[e]] = response.p[e]
                code[b, entry_at[e]] = response.code[e] if response.clipped[pair] else FREE


@entry
def solve_range(start, stop, geometry, p, code, s, reals, codes, columns):
    """columns `(B x C x (L*S))` <- Hessian^-1 columns for instances start..stop-1, with the potentials' block of the Hessian."""
    entry_at, pair_at, state_at, actions = geometry.entry_at, geometry.pair_at, geometry.state_at, geometry.actions
    work, _ = carve(geometry, 0, reals, codes)
    response, system, rhs = work.response, work.system, work.dv
    system.iterates.enough[0] = 1e-12
    for b in range(start, stop):
        for j in range(state_at.shape[0]):
            response.outflow[j] = 0.0
        for pair in range(pair_at.shape[0]):
            response.s[pair] = s[b, pair_at[pair]]
            response.outflow[pair // actions] += response.s[pair]
            response.clipped[pair] = False
            for e in range(geometry.row[pair], geometry.row[pair + 1]):
                response.p[e] = p[b, entry_at[e]]
                response.code[e] = code[b, entry_at[e]]
                if response.code[e] != FREE:
                    response.clipped[pair] = True
        prepare(geometry, response, system)
        for c in range(columns.shape[1]):
            for j in range(state_at.shape[0]):
                rhs[j] = columns[b, c, state_at[j]]
            solve(geometry, response, system, rhs)
            for j in range(state_at.shape[0]):
                columns[b, c, state_at[j]] = rhs[j]


def respond_batch(
    geometry: Geometry,
    target: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
    costs: np.ndarray,
    potentials: np.ndarray,
    multipliers: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """p and code `(B x (L*S*A*K))`, t and s `(B x (L*S*A))` at these duals; t is meant for clipped pairs alone."""
    batch, m, pairs = costs.shape[0], costs.shape[1], costs.shape[2]
    outputs = np.zeros(target.shape), np.zeros(target.shape, np.int8), np.zeros((batch, pairs)), np.zeros((batch, pairs))
    inputs = (target, lower, upper, costs, potentials, multipliers)

    def kernel(start: int, stop: int) -> None:
        respond_range(start, stop, geometry, *inputs, *room(geometry, m), *outputs)

    over_batch(kernel, batch, len(geometry.entry_at))
    return outputs


def solve_batch(geometry: Geometry, p: np.ndarray, code: np.ndarray, s: np.ndarray, columns: np.ndarray) -> None:
    """columns `(B x C x (L*S))` <- Hessian^-1 columns, at the responses of `respond_batch`."""

    def kernel(start: int, stop: int) -> None:
        solve_range(start, stop, geometry, p, code, s, *memory(geometry, 0), columns)

    over_batch(kernel, len(p), len(geometry.entry_at))
