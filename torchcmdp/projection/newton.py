"""The Newton projection as an autograd function: kernels for tensors on the CPU and on GPUs, the torch solver everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcmdp.errors import InvalidInput
from torchcmdp.layout import Layout
from torchcmdp.projection import backends, implicit
from torchcmdp.projection.backends import Settings
from torchcmdp.projection.problem import DEFAULT_CAP, ProjectionResult, ProjectionSolver
from torchcmdp.safe_set import SafeSet, flattened
from torchcmdp.solver import BACKENDS, IterativeSolver


@dataclass(frozen=True, kw_only=True)
class Newton(IterativeSolver[ProjectionResult], ProjectionSolver):
    """Newton's method on the duals.

    Attributes:
        multiplier_cap: Where the safe set is empty, the exact penalty per unit of the largest violation, which the multipliers
            share. Constraints count in units of their largest cost, rounded to a power of two.
        tolerance: Largest flow and safety residual at which an instance is done.
        max_iterations, fixed_iterations: As in `IterativeSolver`.
        backend: "compiled" (CPU), "cuda" (kernels on a GPU, by numba-cuda), "torch" (any device), or "auto": the first of them that
            can take the tensors.
    """

    backends: ClassVar[tuple[str, ...]] = (*BACKENDS, "cuda")

    multiplier_cap: float = DEFAULT_CAP
    tolerance: float = 1e-11
    max_iterations: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        self._positive("multiplier_cap")
        self._positive("tolerance")
        if self.backend == "cuda" and self.fixed_iterations is not None:
            raise InvalidInput('backend is "cuda", which iterates until it is done; fixed_iterations needs "torch" or "auto".')

    def settings(self, device: torch.device) -> Settings:
        """Whom tensors on `device` go to, and when to stop."""
        backend = "compiled" if self.compiled(device) else "cuda" if self._on_gpu(device) else "torch"
        return Settings(backend, self.multiplier_cap, self.tolerance, self.max_iterations, self.fixed_iterations)

    def _on_gpu(self, device: torch.device) -> bool:
        """Whether tensors on `device` go to the kernels on a GPU."""
        if self.backend == "torch" or self.fixed_iterations is not None or (self.backend == "auto" and device.type != "cuda"):
            return False
        from torchcmdp.kernels import cuda  # here, because numba takes half a second to import

        why = cuda.obstacle(device)
        if why and self.backend == "cuda":
            raise InvalidInput(f'backend is "cuda", but {why}.')
        return not why

    def solve(self, objective: Tensor, safe_set: SafeSet) -> ProjectionResult:
        """Project exp(objective) onto the safe set: ln reference - eta * loss, `(... x L x S x A x K)`."""
        batch = safe_set.batch_with("objective", objective.shape[:-4])
        settings = self.settings(objective.device)
        if torch.compiler.is_compiling():
            # a graph holds the solver as one operator, whose shapes are known without its values
            from torchcmdp.projection import operators  # here, because it loads torch's compiler

            inputs = (flattened(objective, batch, 4), *safe_set.flat(batch))
            outputs = operators.project(inputs, safe_set.layout, settings)
        else:
            outputs = self._outputs(objective, safe_set, batch, settings)
        dtype = torch.promote_types(objective.dtype, safe_set.costs.dtype)
        if len(batch) != 1:
            outputs = [output.reshape((*batch, *output.shape[1:])) for output in outputs]
        if dtype != torch.float64:
            outputs = [*(output.to(dtype) for output in outputs[:4]), *outputs[4:]]
        return ProjectionResult(*outputs)

    def _outputs(self, objective: Tensor, safe_set: SafeSet, batch: torch.Size, settings: Settings) -> Any:
        """The fields of a flat `ProjectionResult`."""
        target = flattened(objective, batch, 4)
        if settings.fixed_iterations is None:
            # mending takes longer than a small batch, so it waits until the solver has refused something
            inputs = (target, *safe_set.flat(batch, mended=False))
            try:
                return _solve(inputs, safe_set.layout, settings)
            except InvalidInput:
                pass
        return _solve((target, *safe_set.flat(batch)), safe_set.layout, settings)


def _solve(inputs: tuple[Tensor, ...], layout: Layout, settings: Settings) -> Any:
    # the machinery of an autograd function takes longer than a small batch, so it is left out where nobody asks for it
    if torch._C._are_functorch_transforms_active():
        return _Projection.apply(*inputs, layout, settings)
    if forward_ad._current_level >= 0 or (torch.is_grad_enabled() and any([tensor.requires_grad for tensor in inputs])):
        rest: list[Tensor] = []
        return *_Plain.apply(*inputs, layout, settings, rest), *rest
    return backends.solve(inputs, layout, settings)


class _Projection(torch.autograd.Function):
    """Occupancy and its logarithm as functions of (target, lower, upper, costs); `implicit` has their derivatives."""

    @staticmethod
    def forward(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, layout: Layout, settings: Settings) -> Any:
        return backends.solve((target, lower, upper, costs), layout, settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output[2:])
        _remember(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return *_pulled(ctx, *grads[:2]), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return *_pushed(ctx, tangents), *(None,) * 6


class _Plain(torch.autograd.Function):
    """The same, unknown to `torch.func`: looking up the arguments of a function that it knows takes longer than a small batch.

    So does handing over outputs without derivatives, which therefore go into the list that is the last argument.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = backends.solve(inputs[:4], *inputs[4:6])
        _remember(ctx, inputs[:6], output)
        inputs[6].extend(output[2:])
        return output[:2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return *_pulled(ctx, *grads), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _pushed(ctx, tangents)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep what derivatives need."""
    *theta, ctx.layout, settings = inputs
    ctx.backend = settings.backend
    ctx.set_materialize_grads(False)
    saved = (*theta, output[2], output[3], output[0])
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)


def _pulled(ctx: Any, of_occupancy: Tensor | None, of_logarithm: Tensor | None) -> tuple[Tensor | None, ...]:
    """The cotangents of target, lower, upper and costs."""
    *saved, occupancy = ctx.saved_tensors
    grad = implicit.cotangent(occupancy, of_occupancy, of_logarithm)
    if grad is None:
        return (None,) * 4
    if ctx.backend != "torch" and not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        return backends.pull(saved, grad, ctx.layout, ctx.backend)
    with backends.one_thread(occupancy.device):
        pulled: tuple[Tensor, ...] = implicit.Pull.apply(*saved, grad, backends.how(ctx.layout, ctx.backend))
        return pulled


def _pushed(ctx: Any, tangents: Any) -> tuple[Tensor, Tensor]:
    """The tangents of the occupancy and its logarithm."""
    *saved, occupancy = ctx.saved_tensors
    moves = [torch.zeros_like(x) if d is None else d for x, d in zip(saved[:4], tangents[:4], strict=True)]
    with backends.one_thread(occupancy.device):
        log_tangent = implicit.Push.apply(*saved, *moves, backends.how(ctx.layout, ctx.backend))
    return occupancy * log_tangent, log_tangent


_Projection.vmap = staticmethod(implicit.vmapped(_Projection))  # type: ignore[method-assign]
