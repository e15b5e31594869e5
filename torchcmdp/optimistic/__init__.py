"""The optimistic linear program: the best safe occupancy over all plausible kernels, exact and batched."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, check_kind
from torchcmdp.layout import Layout
from torchcmdp.optimistic import torch_simplex
from torchcmdp.optimistic.problem import OptimisticOptimum, ProgramSolver, program_faults
from torchcmdp.safe_set import SafeSet, flattened, refuse
from torchcmdp.solver import IterativeSolver, resolve
from torchcmdp.status import INVALID

__all__ = ["ColumnGeneration", "OptimisticOptimum", "ProgramSolver", "largest_margin", "optimistic_optimum", "program_solver"]


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
        if self.compiled(device) and layout.lists is None and layout.choices is None:
            outputs = _solve_compiled(flat, layout, self.max_iterations)
        else:
            outputs = torch_simplex.solve(flat, layout, self.max_iterations, self.fixed_iterations)
        if self.fixed_iterations is None and device.type != "meta" and (outputs[4] == INVALID).any():
            refuse(program_faults(layout, *flat), certain=True)
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
    check_kind("safe_set", safe_set, SafeSet, "a SafeSet")
    safe_set.layout.check_shape("rewards", rewards, kind="pair")
    if rewards.device != safe_set.costs.device:
        raise InvalidInput(
            f"rewards is on {rewards.device}, but the safe set on {safe_set.costs.device}; both must be on one device."
        )
    return program_solver(solver).solve(rewards, safe_set)


def largest_margin(safe_set: SafeSet, *, solver: str | ProgramSolver = "column_generation") -> tuple[Tensor, OptimisticOptimum]:
    """max_q min_i -<costs_i, q> over the policies and kernels of a set, `(...)`, and the optimum that attains it.

    Negative where no q is safe, and +inf without constraints.
    """
    check_kind("safe_set", safe_set, SafeSet, "a SafeSet")
    layout, costs = safe_set.layout, safe_set.costs
    # the least common violation of costs that were raised until none is negative, which moves every policy's by the same
    raised = (
        costs.abs().amax(dim=(-1, -2, -3, -4), keepdim=True)
        if safe_set.constraints
        else costs.new_zeros(*costs.shape[:-4], *[1] * 4)
    )
    risen = (costs + raised) * layout.pair_mask(costs.device)
    rewards = costs.new_zeros(*costs.shape[:-4], *layout.pair_shape)
    optimum = optimistic_optimum(rewards, SafeSet(layout, safe_set.lower, safe_set.upper, risen), solver=solver)
    margin = layout.layers * raised.flatten(-4).squeeze(-1) - optimum.excess
    return (margin if safe_set.constraints else torch.full_like(margin, torch.inf)), optimum


def _solve_compiled(flat: list[Tensor], layout: Layout, max_iterations: int) -> list[Tensor]:
    """The fields of an `OptimisticOptimum` with one batch axis."""
    from torchcmdp.kernels.geometry import geometry_of
    from torchcmdp.kernels.program_batch import optimise_batch  # numba takes half a second to import: only those who solve wait

    rewards, lower, upper = (tensor.flatten(1).contiguous().numpy() for tensor in flat[:3])
    costs = flat[3].flatten(2).contiguous().numpy()
    outputs = optimise_batch(geometry_of(layout), rewards, lower, upper, costs, max_iterations)
    value, occupancy, *rest = (torch.from_numpy(array) for array in outputs)
    return [value, occupancy.view_as(flat[1]), *rest]
