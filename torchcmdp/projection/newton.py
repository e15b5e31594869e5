"""The Newton projection as an autograd function: the compiled kernel for CPU tensors, the torch solver everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcmdp.errors import InvalidInput
from torchcmdp.layout import Layout
from torchcmdp.projection import implicit, torch_solver
from torchcmdp.projection.compiled.pairs import AT_LOWER, AT_UPPER, offsets_of
from torchcmdp.projection.compiled.solve import solve_range
from torchcmdp.projection.compiled.system import respond_range, solve_potentials_range
from torchcmdp.projection.compiled.threads import over_batch
from torchcmdp.projection.problem import INVALID, ProjectionResult, SafeSet
from torchcmdp.projection.torch_pairs import Response

BACKENDS = ("auto", "compiled", "torch")


@dataclass(frozen=True)
class NewtonOptions:
    """How the Newton solver runs.

    Attributes:
        cap: Largest safety multiplier; the exact penalty per unit of violation where the safe set is empty.
        tolerance: Largest flow and safety residual at which an instance is done.
        max_iterations: Iterations after which an instance is given up.
        backend: "compiled" (CPU), "torch" (any device), or "auto".
        fixed_iterations: Run the torch solver for just this many iterations, with no read of a tensor's value on the host.
    """

    cap: float
    tolerance: float
    max_iterations: int
    backend: str
    fixed_iterations: int | None

    def compiled(self, device: torch.device) -> bool:
        """Whether tensors on `device` go to the compiled kernel."""
        if self.fixed_iterations is not None or self.backend == "torch":
            return False
        if self.backend == "compiled" and device.type != "cpu":
            raise InvalidInput(f'backend is "compiled", which needs CPU tensors, but the input is on {device}.')
        return device.type == "cpu"


def solve_newton(log_target: Tensor, safe_set: SafeSet, options: NewtonOptions) -> ProjectionResult:
    """Project exp(log_target) onto the safe set in KL divergence.

    Args:
        log_target: ln reference - eta * loss, `(... x L x S x A x S)`.
        safe_set: Its tensors broadcast against log_target.
    """
    layout = safe_set.layout
    inputs = (log_target, safe_set.lower, safe_set.upper, safe_set.costs)
    batch = log_target.shape[:-4]
    if any(tensor.shape[:-4] != batch for tensor in inputs):
        batch = torch.broadcast_shapes(batch, safe_set.batch_shape)
    flat = [_flat(tensor, batch) for tensor in inputs]
    # the machinery of an autograd function takes longer than a small batch, so it is left out where nobody asks for it
    if _differentiating(inputs):
        outputs = _Projection.apply(*flat, layout, options)
    else:
        outputs = _solve(flat, layout, options)
    dtype = torch.promote_types(log_target.dtype, safe_set.costs.dtype)
    if len(batch) != 1:
        outputs = [output.reshape((*batch, *output.shape[1:])) for output in outputs]
    if dtype != torch.float64:
        outputs = [*(output.to(dtype) for output in outputs[:4]), *outputs[4:]]
    return ProjectionResult(*outputs)


def _flat(tensor: Tensor, batch: torch.Size) -> Tensor:
    """One batch axis, and float64 whatever the caller works in, because the duals need it."""
    if len(batch) != 1 or tensor.shape[:-4] != batch:
        tensor = tensor.expand(*batch, *tensor.shape[-4:]).reshape(batch.numel(), *tensor.shape[-4:])
    return tensor if tensor.dtype == torch.float64 else tensor.double()


def _differentiating(inputs: tuple[Tensor, ...]) -> bool:
    """Whether a derivative of the projection may be wanted, in reverse or in forward mode."""
    forward_level: int = forward_ad._current_level
    transformed: bool = torch._C._are_functorch_transforms_active()
    return transformed or forward_level >= 0 or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs))


def _solve(inputs: Sequence[Tensor], layout: Layout, options: NewtonOptions) -> Any:
    """The fields of a flat `ProjectionResult`, by the backend that the options and the device call for."""
    target, lower, upper, costs = inputs
    if options.compiled(target.device):
        return _solve_compiled(target, lower, upper, costs, layout, options)
    target, lower, upper, costs = (tensor.detach() for tensor in inputs)
    limits = (options.cap, options.tolerance, options.max_iterations, options.fixed_iterations)
    with _one_thread(target.device):
        outputs = torch_solver.solve(target, lower, upper, costs, layout, *limits)
    if options.fixed_iterations is None and (outputs[4] == INVALID).any():
        raise_invalid(target, lower, upper, costs, layout)
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
    def forward(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, layout: Layout, options: NewtonOptions) -> Any:
        return _solve((target, lower, upper, costs), layout, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *theta, layout, options = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        saved = (*theta, output[2], output[3], output[0])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        compiled = options.compiled(theta[0].device)
        ctx.how = implicit.How(layout, options.cap, False, _compiled_system if compiled else implicit.torch_system)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        *saved, occupancy = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return (None,) * 6
        grad = torch.zeros_like(occupancy) if grads[0] is None else grads[0] * occupancy
        grad = grad if grads[1] is None else grad + grads[1]
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


@lru_cache(maxsize=256)
def _geometry(layout: Layout) -> tuple[np.ndarray, np.ndarray, int]:
    widths = np.array(layout.widths, dtype=np.int64)
    return widths, offsets_of(widths), int(layout.transition_mask().sum())


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [(tensor if tensor.is_contiguous() else tensor.contiguous()).numpy(force=True) for tensor in tensors]


def _solve_compiled(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, layout: Layout, options: NewtonOptions) -> Any:
    batch, m = target.shape[0], costs.shape[1]
    widths, offsets, size = _geometry(layout)
    occupancy = np.zeros(target.shape)
    log_occupancy = np.full(target.shape, -np.inf)
    potentials, multipliers = np.zeros((batch, *target.shape[1:3])), np.zeros((batch, m))
    status, iterations = np.zeros(batch, np.int8), np.zeros(batch, np.int64)
    residual, gap = np.zeros(batch), np.zeros(batch)
    outputs = (occupancy, log_occupancy, potentials, multipliers, status, residual, gap, iterations)
    inputs = _arrays(target, lower, upper, costs)
    over_batch(
        solve_range, batch, size, widths, offsets, *inputs, options.cap, options.tolerance, options.max_iterations, *outputs
    )  # fmt: skip
    if (status == INVALID).any():
        raise_invalid(target, lower, upper, costs, layout)
    return tuple(torch.from_numpy(array) for array in outputs)


def _compiled_system(
    theta: tuple[Tensor, ...], duals: implicit.Duals, layout: Layout
) -> tuple[Response, Callable[[Tensor], Tensor]]:
    """`implicit.torch_system` by compiled kernels."""
    widths, offsets, size = _geometry(layout)
    p, s = np.zeros(theta[0].shape), np.zeros(theta[0].shape[:-1])
    code, t = np.zeros(p.shape, np.int8), np.zeros(s.shape)
    over_batch(respond_range, len(p), size, widths, offsets, *_arrays(*theta, *duals), p, code, t, s)

    def solve(columns: Tensor) -> Tensor:
        solution = columns.numpy(force=True).copy()
        over_batch(solve_potentials_range, len(p), size, widths, offsets, p, code, s, solution)
        return torch.from_numpy(solution)

    at = torch.from_numpy(code)
    v, (found_p, found_t, found_s) = duals[0], (torch.from_numpy(array) for array in (p, t, s))
    return Response(v, v[:, 0, 0], found_p, at == AT_LOWER, at == AT_UPPER, found_t, found_s), solve


def raise_invalid(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, layout: Layout) -> None:
    """Say in one sentence which instance, layer, state and action cannot be solved, and why."""
    real, pairs = layout.transition_mask(target.device), layout.pair_mask(target.device)
    low, high = lower.sum(-1), upper.sum(-1)
    for name, wrong, expected in (
        (
            "loss, reference or eta",
            (~(target < torch.inf) & real).any(-1),
            "numbers (a zero reference is allowed, NaN and +inf are not)",
        ),
        ("costs", (~costs.isfinite()).any(1) & pairs, "finite numbers"),
        ("lower or upper", ((~(lower >= 0) | ~(upper >= lower)) & real).any(-1), "0 <= lower <= upper"),
        ("lower", (low > 1 + 1e-9) & pairs, "lower ends that sum to at most one"),
        ("upper", (high < 1 - 1e-9) & pairs, "upper ends that sum to at least one"),
    ):
        if wrong.any():
            b, k, x, a = wrong.nonzero()[0].tolist()
            raise InvalidInput(f"{name} cannot be used at instance {b}, layer {k}, state {x}, action {a}; expected {expected}.")
    raise InvalidInput("an instance cannot be solved: its intervals or costs are not valid numbers.")
