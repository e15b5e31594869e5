"""The projection and its derivative as operators of torch, opaque to graphs, which know their outputs' shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcmdp.errors import InvalidInput
from torchcmdp.layout import Layout
from torchcmdp.projection import backends, implicit
from torchcmdp.projection.backends import Settings

# Operators take numbers, so a layout goes by its place here.
_layouts: list[Layout] = []


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _place(layout: Layout) -> int:
    if layout not in _layouts:
        _layouts.append(layout)
    return _layouts.index(layout)


def project(inputs: tuple[Tensor, ...], layout: Layout, settings: Settings) -> Any:
    """`backends.solve` as one operator, differentiable in reverse mode, once."""
    backend, cap, tolerance, most, fixed = settings
    return _project(*inputs, _place(layout), backend, cap, tolerance, most, 0 if fixed is None else fixed)


INPUTS = "Tensor target, Tensor lower, Tensor upper, Tensor costs"
FOUR = ", ".join(["Tensor"] * 4)


@torch.library.custom_op(
    "torchcmdp::project",
    mutates_args=(),
    schema=f"({INPUTS}, int layout, str backend, float cap, float tolerance, int most, int fixed) -> ({FOUR}, {FOUR})",
)
def _project(
    target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor,
    layout: int, backend: str, cap: float, tolerance: float, most: int, fixed: int,
) -> Any:  # fmt: skip
    _refuse_forward_mode()
    settings = Settings(backend, cap, tolerance, most, fixed or None)
    return tuple(output.clone() for output in backends.solve((target, lower, upper, costs), _layouts[layout], settings))


@_project.register_fake
def _fake_project(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, *settings: Any) -> Any:
    _refuse_forward_mode()
    return backends.shapes(target, costs)


def _refuse_forward_mode() -> None:
    """Torch has no forward mode of operators, and says nothing when it loses their tangents."""
    if forward_ad._current_level >= 0:
        raise InvalidInput("forward mode of the projection is not available inside torch.compile; leave it out of the graph.")


@torch.library.custom_op(
    "torchcmdp::pull",
    mutates_args=(),
    schema=f"({INPUTS}, Tensor potentials, Tensor multipliers, Tensor grad, int layout, str backend) -> ({FOUR})",
)
def _pull(
    target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, potentials: Tensor, multipliers: Tensor, grad: Tensor,
    layout: int, backend: str,
) -> Any:  # fmt: skip
    return backends.pull((target, lower, upper, costs, potentials, multipliers), grad, _layouts[layout], backend)


@_pull.register_fake
def _pulled_shapes(*inputs: Any) -> Any:
    return tuple(torch.empty_like(tensor) for tensor in inputs[:4])


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4], output[2], output[3], output[0])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.layout, ctx.backend = inputs[4:6]


def _backward(ctx: Any, *grads: Tensor | None) -> Any:
    *saved, occupancy = ctx.saved_tensors
    grad = implicit.cotangent(occupancy, *grads[:2])
    found = (None,) * 4 if grad is None else _pull(*saved, grad, ctx.layout, ctx.backend)
    return (*found, *(None,) * 6)


def _refuse_second(ctx: Any, *grads: Tensor | None) -> Any:
    raise InvalidInput("the projection has first derivatives only inside torch.compile; leave it out of the graph for second ones.")


_project.register_autograd(_backward, setup_context=_remember)
_pull.register_autograd(_refuse_second)
for _operator in (_project, _pull):
    _operator.register_vmap(implicit.merged(_operator))
