"""Who solves a flat batch of projections, and who differentiates it: kernels on the CPU or on a GPU, or torch anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcmdp.layout import Layout
from torchcmdp.projection import implicit, torch_solver
from torchcmdp.projection.problem import target_fault
from torchcmdp.safe_set import faults, refuse
from torchcmdp.status import INVALID


class Settings(NamedTuple):
    """Whom a batch goes to ("compiled", "cuda" or "torch"), and when to stop: see `Newton`."""

    backend: str
    multiplier_cap: float
    tolerance: float
    max_iterations: int
    fixed_iterations: int | None


def solve(inputs: Sequence[Tensor], layout: Layout, settings: Settings) -> Any:
    """The fields of a flat `ProjectionResult`."""
    if settings.backend == "compiled":
        return _solve_compiled(inputs, layout, settings)
    target, lower, upper, costs = (tensor.detach() for tensor in inputs)
    if target.is_meta and settings.fixed_iterations is None:
        return shapes(target, costs)
    if settings.backend == "cuda":
        outputs = _solve_cuda(target, lower, upper, costs, layout, settings)
    else:
        with one_thread(target.device):
            outputs = torch_solver.solve(target, lower, upper, costs, layout, *settings[1:])
    if settings.fixed_iterations is None and (outputs[4] == INVALID).any():
        _refuse(layout, target, lower, upper, costs)
    return outputs


def _refuse(layout: Layout, target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor) -> None:
    """Say which instance of a flat batch is invalid, and why."""
    refuse([target_fault(target, layout), *faults(layout, lower, upper, costs)], certain=True)


def shapes(target: Tensor, costs: Tensor) -> Any:
    """The outputs of `solve` without their values."""
    status, iterations, *rest = (
        target.new_empty(len(target), dtype=dtype) for dtype in (torch.int8, torch.int64, *[target.dtype] * 2)
    )
    duals = target.new_empty(target.shape[:3]), costs.new_empty(costs.shape[:2])
    return torch.empty_like(target), torch.empty_like(target), *duals, status, *rest, iterations


def pull(saved: Sequence[Tensor], grad: Tensor, layout: Layout, backend: str) -> tuple[Tensor, ...]:
    """`implicit.pull` of the inputs, potentials and multipliers, for where nobody differentiates it again."""
    if backend == "torch":
        with one_thread(grad.device):
            return implicit.pull(implicit.linearise(tuple(saved[:4]), (saved[4], saved[5]), how(layout, backend)), grad)
    return (_pull_compiled if backend == "compiled" else _pull_cuda)(saved, grad, layout)


def how(layout: Layout, backend: str) -> implicit.How:
    """Who answers the pairs and solves the Newton system for all other derivatives."""
    # by who pulls: where bounds meet in a corner either may be said to hold, and both modes must say the same
    return implicit.How(layout, {"compiled": _compiled_system, "cuda": _cuda_system}.get(backend, implicit.torch_system))


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
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


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [(tensor if tensor.is_contiguous() else tensor.contiguous()).numpy(force=True) for tensor in tensors]


def _flat_arrays(*inputs: Tensor) -> tuple[np.ndarray, ...]:
    """`(B x entries)` three times and `(B x m x pairs)`, as the kernels take them."""
    target, lower, upper, costs = _arrays(*inputs)
    batch, m, layers, width, actions = costs.shape
    pairs = layers * width * actions
    flat = batch, pairs * target.shape[-1]
    return target.reshape(flat), lower.reshape(flat), upper.reshape(flat), costs.reshape(batch, m, pairs)


@lru_cache(maxsize=256)
def _projector(layout: Layout, settings: Settings) -> Callable[..., Any]:
    """`project_batch` of flat arrays. What it looks up would take as long as a small batch, so that is kept."""
    from torchcmdp.kernels.geometry import geometry_of
    from torchcmdp.kernels.projection import Limits, project_batch  # here and below, because numba takes half a second to import

    return partial(project_batch, geometry_of(layout), states=layout.layers * layout.width, limits=Limits(*settings[1:4]))


def _solve_compiled(inputs: Sequence[Tensor], layout: Layout, settings: Settings) -> Any:
    flat = _flat_arrays(*inputs)
    q, log_q, v, multipliers, status, *rest = _projector(layout, settings)(*flat)
    if INVALID in status.tobytes():
        _refuse(layout, *(tensor.detach() for tensor in inputs))
    shape = (len(q), *layout.transition_shape)
    shaped = q.reshape(shape), log_q.reshape(shape), v.reshape(shape[:3]), multipliers, status, *rest
    return tuple(map(torch.from_numpy, shaped))


def _flat_tensors(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_flat_arrays` as tensors where they are, copied only where they are not contiguous."""
    target, lower, upper = (tensor.flatten(1).contiguous() for tensor in (target, lower, upper))
    return target, lower, upper, costs.flatten(2).contiguous()


def _solve_cuda(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, layout: Layout, settings: Settings) -> Any:
    from torchcmdp.kernels import cuda
    from torchcmdp.kernels.projection import Limits

    outputs: Any = cuda.project_batch(layout, *_flat_tensors(target, lower, upper, costs), Limits(*settings[1:4]))
    q, log_q, v, *rest = outputs
    return q.view(target.shape), log_q.view(target.shape), v.view(target.shape[:3]), *rest


def _pull_cuda(saved: Sequence[Tensor], grad: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    from torchcmdp.kernels import cuda

    target, lower, upper, costs, v, multipliers = (tensor.detach() for tensor in saved)
    duals = v.flatten(1).contiguous(), multipliers.contiguous(), grad.detach().flatten(1).contiguous()
    found = cuda.pull_batch(layout, (*_flat_tensors(target, lower, upper, costs), *duals))
    return tuple(each.view(tensor.shape) for each, tensor in zip(found, (target, lower, upper, costs), strict=True))


@lru_cache(maxsize=256)
def _puller(layout: Layout) -> Callable[..., None]:
    """`pull_batch` of flat arrays."""
    from torchcmdp.kernels.geometry import geometry_of
    from torchcmdp.kernels.pull import pull_batch

    return partial(pull_batch, geometry_of(layout))


def _pull_compiled(saved: Sequence[Tensor], grad: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    theta = _flat_arrays(*saved[:4])
    potentials, lam, cotangent = _arrays(*saved[4:], grad)
    flat = batch, _ = theta[0].shape
    duals = potentials.reshape(batch, layout.layers * layout.width), lam, cotangent.reshape(flat)
    m, shape = lam.shape[1], (batch, *layout.transition_shape)
    target, lower, upper, costs = found = tuple([np.zeros(array.shape) for array in theta])
    _puller(layout)(m, (*theta, *duals), found)
    # views are made by numpy, which takes a fifth of the time
    shaped = target.reshape(shape), lower.reshape(shape), upper.reshape(shape), costs.reshape(batch, m, *layout.pair_shape)
    return tuple(map(torch.from_numpy, shaped))


def _compiled_system(
    theta: tuple[Tensor, ...], duals: implicit.Duals, layout: Layout
) -> tuple[implicit.Answer, Callable[[Tensor], Tensor]]:
    """`implicit.torch_system` by compiled kernels."""
    from torchcmdp.kernels.geometry import geometry_of
    from torchcmdp.kernels.system import respond_batch, solve_batch

    geometry = geometry_of(layout)
    flat = _arrays(*(tensor.flatten(1) for tensor in theta[:3]), theta[3].flatten(2), duals[0].flatten(1), duals[1])
    p, code, t, s = respond_batch(geometry, *flat)

    def solve(columns: Tensor) -> Tensor:
        solution = columns.flatten(2).numpy(force=True).copy()
        solve_batch(geometry, p, code, s, solution)
        return torch.from_numpy(solution).view_as(columns)

    return _answer(theta[0], duals[0], *map(torch.from_numpy, (p, code, t, s))), solve


def _cuda_system(
    theta: tuple[Tensor, ...], duals: implicit.Duals, layout: Layout
) -> tuple[implicit.Answer, Callable[[Tensor], Tensor]]:
    """`implicit.torch_system` by kernels on a GPU."""
    from torchcmdp.kernels import cuda

    target, lower, upper, costs, v, multipliers = (tensor.detach() for tensor in (*theta, *duals))
    flat = _flat_tensors(target, lower, upper, costs)
    p, code, t, s = cuda.respond_batch(layout, (*flat, v.flatten(1).contiguous(), multipliers.contiguous()))

    def solve(columns: Tensor) -> Tensor:
        solution = columns.detach().flatten(2).clone(memory_format=torch.contiguous_format)
        cuda.solve_batch(layout, p, code, s, solution)
        return solution.view(columns.shape)

    return _answer(theta[0], duals[0], p, code, t, s), solve


def _answer(target: Tensor, v: Tensor, p: Tensor, code: Tensor, t: Tensor, s: Tensor) -> implicit.Answer:
    """What `respond_batch` found, in the shapes of the target."""
    from torchcmdp.kernels.pairs import AT_LOWER, AT_UPPER

    at, pair = code.view_as(target), target.shape[:-1]
    return implicit.Answer(p.view_as(target), at == AT_LOWER, at == AT_UPPER, t.view(pair), s.view(pair), v)
