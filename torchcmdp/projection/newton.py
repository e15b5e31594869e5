"""The Newton projection as an autograd function: the compiled kernel for CPU tensors, the torch solver everywhere else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcmdp.errors import InvalidInput
from torchcmdp.layout import Layout
from torchcmdp.projection import implicit, torch_solver
from torchcmdp.projection.problem import DEFAULT_CAP, ProjectionResult, ProjectionSolver, target_fault
from torchcmdp.projection.torch_pairs import Response
from torchcmdp.safe_set import SafeSet, faults, flattened, refuse
from torchcmdp.solver import IterativeSolver
from torchcmdp.status import INVALID


@dataclass(frozen=True, kw_only=True)
class Newton(IterativeSolver[ProjectionResult], ProjectionSolver):
    """Newton's method on the duals.

    Attributes:
        multiplier_cap: Where the safe set is empty, the exact penalty per unit of the largest violation, which the multipliers
            share. Constraints count in units of their largest cost, rounded to a power of two.
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
        """Project exp(objective) onto the safe set: ln reference - eta * loss, `(... x L x S x A x K)`."""
        batch = safe_set.batch_with("objective", objective.shape[:-4])
        outputs = None
        if self.compiled(objective.device):
            # mending takes longer than a small batch, so it waits until the kernel has refused something
            with suppress(InvalidInput):
                outputs = self._outputs(flattened(objective, batch, 4), safe_set, safe_set.flat(batch, mended=False))
        if outputs is None:
            outputs = self._outputs(flattened(objective, batch, 4), safe_set, safe_set.flat(batch))
        dtype = torch.promote_types(objective.dtype, safe_set.costs.dtype)
        if len(batch) != 1:
            outputs = [output.reshape((*batch, *output.shape[1:])) for output in outputs]
        if dtype != torch.float64:
            outputs = [*(output.to(dtype) for output in outputs[:4]), *outputs[4:]]
        return ProjectionResult(*outputs)

    def _outputs(self, target: Tensor, safe_set: SafeSet, flat: Sequence[Tensor]) -> Any:
        """The fields of a flat `ProjectionResult`."""
        inputs = (target, *flat)
        # the machinery of an autograd function takes longer than a small batch, so it is left out where nobody asks for it
        if _differentiating(inputs):
            return _Projection.apply(*inputs, safe_set.layout, self)
        return _solve(inputs, safe_set.layout, self)


def _differentiating(inputs: tuple[Tensor, ...]) -> bool:
    """Whether a derivative of the projection may be wanted, in reverse or in forward mode."""
    forward_level: int = forward_ad._current_level
    transformed: bool = torch._C._are_functorch_transforms_active()
    return transformed or forward_level >= 0 or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs))


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
    """Occupancy and its logarithm as functions of (target, lower, upper, costs); `implicit` has their derivatives."""

    @staticmethod
    def forward(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, layout: Layout, options: Newton) -> Any:
        return _solve((target, lower, upper, costs), layout, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *theta, layout, options = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        saved = (*theta, output[2], output[3], output[0])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.compiled = options.compiled(theta[0].device)
        ctx.how = implicit.How(layout, _compiled_system if ctx.compiled else implicit.torch_system)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        *saved, occupancy = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return (None,) * 6
        grad = torch.zeros_like(occupancy) if grads[0] is None else grads[0] * occupancy
        grad = grad if grads[1] is None else grad + grads[1]
        if ctx.compiled and not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            return (*_pull_compiled(saved, grad, ctx.how.layout), None, None)
        with _one_thread(occupancy.device):
            return (*implicit.Pull.apply(*saved, grad, ctx.how), None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        *saved, occupancy = ctx.saved_tensors
        moves = [torch.zeros_like(x) if d is None else d for x, d in zip(saved[:4], tangents[:4], strict=True)]
        with _one_thread(occupancy.device):
            log_tangent = implicit.Push.apply(*saved, *moves, ctx.how)
        return occupancy * log_tangent, log_tangent, None, None, None, None, None, None


_Projection.vmap = staticmethod(implicit.vmapped(_Projection))  # type: ignore[method-assign]


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [(tensor if tensor.is_contiguous() else tensor.contiguous()).numpy(force=True) for tensor in tensors]


def _flat_arrays(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor) -> list[np.ndarray]:
    """`(B x entries)` three times and `(B x m x pairs)`, as the kernels take them."""
    batch, m = costs.shape[:2]
    pairs = math.prod(costs.shape[2:])
    *ends, values = _arrays(target, lower, upper, costs)
    return [array.reshape(batch, pairs * target.shape[-1]) for array in ends] + [values.reshape(batch, m, pairs)]


def _solve_compiled(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, layout: Layout, options: Newton) -> Any:
    from torchcmdp.kernels.geometry import geometry_of
    from torchcmdp.kernels.projection import Limits, project_batch  # here and below, because numba takes half a second to import

    limits = Limits(options.multiplier_cap, options.tolerance, options.max_iterations)
    flat = _flat_arrays(target, lower, upper, costs)
    outputs = project_batch(geometry_of(layout), *flat, states=layout.layers * layout.width, limits=limits)
    if INVALID in outputs.status.tobytes():
        refuse([target_fault(target, layout), *faults(layout, lower, upper, costs)], certain=True)
    q, log_q, v, *rest = outputs
    shaped = q.reshape(target.shape), log_q.reshape(target.shape), v.reshape(target.shape[:3]), *rest
    return tuple(map(torch.from_numpy, shaped))


def _pull_compiled(saved: Sequence[Tensor], grad: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """`implicit.pull` by a compiled kernel, for where nobody differentiates it again."""
    from torchcmdp.kernels.geometry import geometry_of
    from torchcmdp.kernels.pull import pull_batch

    target, lower, upper, costs, v, multipliers = saved
    batch, m = costs.shape[:2]
    theta = _flat_arrays(target, lower, upper, costs)
    potentials, lam, cotangent = _arrays(v, multipliers, grad)
    duals = potentials.reshape(batch, layout.layers * layout.width), lam, cotangent.reshape(theta[0].shape)
    found = tuple(np.zeros(array.shape) for array in theta)
    pull_batch(geometry_of(layout), m, (*theta, *duals), found)
    pairs = zip(found, (target, lower, upper, costs), strict=True)
    return tuple(torch.from_numpy(array.reshape(tensor.shape)) for array, tensor in pairs)


def _compiled_system(
    theta: tuple[Tensor, ...], duals: implicit.Duals, layout: Layout
) -> tuple[Response, Callable[[Tensor], Tensor]]:
    """`implicit.torch_system` by compiled kernels."""
    from torchcmdp.kernels.geometry import geometry_of
    from torchcmdp.kernels.pairs import AT_LOWER, AT_UPPER
    from torchcmdp.kernels.system import respond_batch, solve_batch

    geometry = geometry_of(layout)
    target, v = theta[0], duals[0]
    flat = _arrays(*(tensor.flatten(1) for tensor in theta[:3]), theta[3].flatten(2), v.flatten(1), duals[1])
    p, code, t, s = respond_batch(geometry, *flat)

    def solve(columns: Tensor) -> Tensor:
        solution = columns.flatten(2).numpy(force=True).copy()
        solve_batch(geometry, p, code, s, solution)
        return torch.from_numpy(solution).view_as(columns)

    found_p, at = (torch.from_numpy(array).view_as(target) for array in (p, code))
    found_t, found_s = (torch.from_numpy(array).view(target.shape[:-1]) for array in (t, s))
    return Response(v, v[:, 0, 0], found_p, at == AT_LOWER, at == AT_UPPER, found_t, found_s), solve
