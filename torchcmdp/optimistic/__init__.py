"""The optimistic linear program: the best safe occupancy over all plausible kernels, exact and batched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from torchcmdp.kernels.threads import over_batch
from torchcmdp.layout import Layout
from torchcmdp.optimistic import torch_simplex
from torchcmdp.optimistic.problem import OptimisticOptimum, ProgramSolver, program_faults
from torchcmdp.safe_set import SafeSet, flattened, refuse
from torchcmdp.solver import IterativeSolver, resolve
from torchcmdp.status import INVALID

__all__ = ["ColumnGeneration", "OptimisticOptimum", "ProgramSolver", "optimistic_optimum", "program_solver"]


@dataclass(frozen=True, kw_only=True)
class ColumnGeneration(IterativeSolver[OptimisticOptimum], ProgramSolver):
    """The simplex method over mixtures of occupancies.

    For given multipliers the best q is an optimistic backward recursion; the mixture of such q that is best among the safe ones
    comes from a simplex method with m + 1 rows, for which that recursion is the pricing step. Where no q is safe, the least
    violation is found first and the best value with that much violation second.

    Attributes:
        max_iterations, backend, fixed_iterations: As in `IterativeSolver`; an iteration tries one policy.
    """

    max_iterations: int = 2000

    def solve(self, objective: Tensor, safe_set: SafeSet) -> OptimisticOptimum:
        """max <objective, q> over the safe set, `(... x L x S x A)`."""
        layout, device = safe_set.layout, objective.device
        batch = safe_set.batch_with("rewards", objective.shape[:-3])
        flat = [tensor.detach() for tensor in (flattened(objective, batch, 3), *safe_set.flat(batch))]
        rewards, lower, upper, costs = flat
        if self.compiled(device):
            outputs = _solve_compiled(flat, layout, self.max_iterations)
        else:
            outputs = torch_simplex.solve(rewards, lower, upper, costs, layout, self.max_iterations, self.fixed_iterations)
        if self.fixed_iterations is None and device.type != "meta" and (outputs[4] == INVALID).any():
            refuse(program_faults(rewards, lower, upper, costs, layout), certain=True)
        dtype = torch.promote_types(objective.dtype, safe_set.costs.dtype)
        outputs = [output.reshape((*batch, *output.shape[1:])) for output in outputs]
        return OptimisticOptimum(*(output.to(dtype) if output.is_floating_point() else output for output in outputs))


def program_solver(solver: str | ProgramSolver) -> ProgramSolver:
    """The solver of the optimistic program that is meant by "column_generation" or itself."""
    return resolve(solver, ProgramSolver, {"column_generation": ColumnGeneration})  # type: ignore[type-abstract]


def optimistic_optimum(
    rewards: Tensor, safe_set: SafeSet, *, solver: str | ProgramSolver = "column_generation"
) -> OptimisticOptimum:
    """max <rewards, q> over q in the safe set, jointly over policies and kernels in the intervals.

    Args:
        rewards: `(... x L x S x A)`; broadcasts against the safe set.
        safe_set: Intervals and costs.
        solver: A solver with settings, such as `ColumnGeneration(max_iterations=100)`.
    """
    safe_set.layout.check_shape("rewards", rewards, kind="pair")
    return program_solver(solver).solve(rewards, safe_set)


@lru_cache(maxsize=256)
def _geometry(layout: Layout) -> tuple[np.ndarray, int]:
    return np.array(layout.widths, dtype=np.int64), int(layout.transition_mask().sum())


def _solve_compiled(flat: list[Tensor], layout: Layout, max_iterations: int) -> list[Tensor]:
    """The fields of an `OptimisticOptimum` with one batch axis."""
    from torchcmdp.optimistic.compiled import solve_range  # numba takes half a second to import: only those who solve wait

    widths, size = _geometry(layout)
    rewards, lower, upper, costs = (tensor.contiguous().numpy() for tensor in flat)
    batch, m = costs.shape[:2]
    occupancy, multipliers, answers = np.zeros(lower.shape), np.zeros((batch, m)), np.zeros((batch, 3))
    status, iterations = np.zeros(batch, np.int8), np.zeros(batch, np.int64)
    inputs = (widths, rewards, lower, upper, costs, max_iterations)
    over_batch(solve_range, batch, size, *inputs, occupancy, multipliers, answers, status, iterations)
    value, excess, residual = answers.T
    arrays = (value, occupancy, multipliers, excess, status, residual, iterations)
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
