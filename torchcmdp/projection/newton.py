"""The Newton projection as an autograd function: the compiled kernel for CPU tensors, the torch solver everywhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcmdp.layout import Layout
from torchcmdp.projection import torch_solver
from torchcmdp.projection.compiled.threads import over_batch
from torchcmdp.projection.problem import DEFAULT_CAP, ProjectionResult, ProjectionSolver, target_fault
from torchcmdp.safe_set import SafeSet, faults, flattened, refuse
from torchcmdp.solver import IterativeSolver
from torchcmdp.status import INVALID


@dataclass(frozen=True, kw_only=True)
class Newton(IterativeSolver[ProjectionResult], ProjectionSolver):
    """Newton's method on the duals.

    Attributes:
        multiplier_cap: Largest safety multiplier; the exact penalty per unit of violation where the safe set is empty.
        tolerance: Largest flow and safety residual at which an instance is done.
        max_iterations, backend, fixed_iterations: As in `IterativeSolver`.
    """

    multiplier_cap: float = DEFAULT_CAP
    tolerance: float = 1e-11
    max_iterations: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        self._positive("multiplier_cap")
        self._positive("tolerance")

    def solve(self, objective: Tensor, safe_set: SafeSet) -> ProjectionResult:
        """Project exp(objective) onto the safe set: ln reference - eta * loss, `(... x L x S x A x S)`."""
        batch = safe_set.batch_with("objective", objective.shape[:-4])
        inputs = (flattened(objective, batch, 4), *safe_set.flat(batch))
        # the machinery of an autograd function takes longer than a small batch, so it is left out where nobody asks for it
        if _differentiating(inputs):
            outputs = _Projection.apply(*inputs, safe_set.layout, self)
        else:
            outputs = _solve(inputs, safe_set.layout, self)
        dtype = torch.promote_types(objective.dtype, safe_set.costs.dtype)
        if len(batch) != 1:
            outputs = [output.reshape((*batch, *output.shape[1:])) for output in outputs]
        if dtype != torch.float64:
            outputs = [*(output.to(dtype) for output in outputs[:4]), *outputs[4:]]
        return ProjectionResult(*outputs)


def _differentiating(inputs: tuple[Tensor, ...]) -> bool:
    """Whether a derivative of the projection may be wanted, in reverse or in forward mode."""
    forward_level: int = forward_ad._current_level
    return forward_level >= 0 or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs))


def _solve(inputs: Sequence[Tensor], layout: Layout, options: Newton) -> Any:
    """The fields of a flat `ProjectionResult`, by the backend that the options and the device call for."""
    target, lower, upper, costs = inputs
    if options.compiled(target.device):
        return _solve_compiled(target, lower, upper, costs, layout, options)
    target, lower, upper, costs = (tensor.detach() for tensor in inputs)
    limits = (options.multiplier_cap, options.tolerance, options.max_iterations, options.fixed_iterations)
    with _one_thread(target.device):
        outputs = torch_solver.solve(target, lower, upper, costs, layout, *limits)
    if options.fixed_iterations is None and (outputs[4] == INVALID).any():
        refuse([target_fault(target, layout), *faults(layout, lower, upper, costs)], certain=True)
    return outputs


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Keep torch to one thread on the CPU: its many small operations crawl when two threads meet on a busy machine."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Projection(torch.autograd.Function):
    """Occupancy and its logarithm as functions of (target, lower, upper, costs), differentiable once in either direction."""

    @staticmethod
    def forward(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, layout: Layout, options: Newton) -> Any:
        return _solve((target, lower, upper, costs), layout, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        target, lower, upper, costs, layout, options = inputs
        occupancy, _, potentials, multipliers = output[:4]
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        saved = (target, lower, upper, costs, potentials, multipliers, occupancy)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.layout, ctx.options = layout, options

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        target, lower, upper, costs, potentials, multipliers, occupancy = (tensor.detach() for tensor in ctx.saved_tensors)
        if grads[0] is None and grads[1] is None:
            return None, None, None, None, None, None
        grad = torch.zeros_like(occupancy) if grads[0] is None else grads[0]
        if grads[1] is not None:
            grad = grad + torch.where(occupancy > 0, grads[1] / occupancy, 0.0)
        pull: Any = _vjp_compiled if ctx.options.compiled(target.device) else torch_solver.vjp
        with _one_thread(target.device):
            pulled = pull(target, lower, upper, costs, potentials, multipliers, grad, ctx.layout, ctx.options.multiplier_cap)
        return (*pulled, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        target, lower, upper, costs, potentials, multipliers, occupancy = (tensor.detach() for tensor in ctx.saved_tensors)
        moves = [
            torch.zeros_like(value) if tangent is None else tangent
            for value, tangent in zip((target, lower, upper, costs), tangents[:4], strict=True)
        ]
        push: Any = _jvp_compiled if ctx.options.compiled(target.device) else torch_solver.jvp
        with _one_thread(target.device):
            tangent = push(target, lower, upper, costs, potentials, multipliers, *moves, ctx.layout, ctx.options.multiplier_cap)
        log_tangent = torch.where(occupancy > 0, tangent / occupancy, 0.0)
        return tangent, log_tangent, None, None, None, None, None, None


@lru_cache(maxsize=256)
def _geometry(layout: Layout) -> tuple[np.ndarray, np.ndarray, int]:
    from torchcmdp.projection.compiled.pairs import offsets_of

    widths = np.array(layout.widths, dtype=np.int64)
    return widths, offsets_of(widths), int(layout.transition_mask().sum())


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [(tensor if tensor.is_contiguous() else tensor.contiguous()).numpy(force=True) for tensor in tensors]


def _solve_compiled(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, layout: Layout, options: Newton) -> Any:
    from torchcmdp.projection.compiled.solve import solve_range  # here and below, because numba takes half a second to import

    batch, m = target.shape[0], costs.shape[1]
    widths, offsets, size = _geometry(layout)
    occupancy = np.zeros(target.shape)
    log_occupancy = np.full(target.shape, -np.inf)
    potentials, multipliers = np.zeros((batch, *target.shape[1:3])), np.zeros((batch, m))
    status, iterations = np.zeros(batch, np.int8), np.zeros(batch, np.int64)
    residual, gap = np.zeros(batch), np.zeros(batch)
    outputs = (occupancy, log_occupancy, potentials, multipliers, status, residual, gap, iterations)
    inputs = _arrays(target, lower, upper, costs)
    limits = (options.multiplier_cap, options.tolerance, options.max_iterations)
    over_batch(solve_range, batch, size, widths, offsets, *inputs, *limits, *outputs)
    if (status == INVALID).any():
        refuse([target_fault(target, layout), *faults(layout, lower, upper, costs)], certain=True)
    return tuple(torch.from_numpy(array) for array in outputs)


def _vjp_compiled(target, lower, upper, costs, potentials, multipliers, grad, layout, cap):  # type: ignore[no-untyped-def]
    from torchcmdp.projection.compiled.derivatives import vjp_range

    widths, offsets, size = _geometry(layout)
    inputs = _arrays(target, lower, upper, costs)
    outputs = [np.zeros_like(array) for array in inputs]
    over_batch(
        vjp_range, target.shape[0], size, widths, offsets, *inputs, cap, *_arrays(potentials, multipliers, grad), *outputs
    )  # fmt: skip
    return tuple(torch.from_numpy(array) for array in outputs)


def _jvp_compiled(target, lower, upper, costs, potentials, multipliers, d_target, d_lower, d_upper, d_costs, layout, cap):  # type: ignore[no-untyped-def]
    from torchcmdp.projection.compiled.derivatives import jvp_range

    widths, offsets, size = _geometry(layout)
    inputs = _arrays(target, lower, upper, costs)
    duals, moves = _arrays(potentials, multipliers), _arrays(d_target, d_lower, d_upper, d_costs)
    d_q = np.zeros_like(inputs[0])
    over_batch(jvp_range, target.shape[0], size, widths, offsets, *inputs, cap, *duals, *moves, d_q)
    return torch.from_numpy(d_q)
