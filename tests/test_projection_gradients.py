"""Derivatives of the projection: finite differences, both modes, both backends, and cvxpylayers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck

from tests.projection_instances import random_instances
from torchcmdp.projection import Cvxpy, Newton, project
from torchcmdp.projection.problem import ProjectionSolver
from torchcmdp.safe_set import SafeSet

BACKENDS = ["compiled", "torch"]
CASES = {
    "binding safety": ((1, 2, 3, 1), 2, 1, 0.3, 0.1),
    "two constraints, clipped intervals": ((1, 3, 2, 1), 2, 2, 0.05, 0.2),
    "single successors": ((1, 2, 1, 2, 1), 2, 1, 0.1, 0.2),
    "no constraints": ((1, 2, 3, 1), 2, 0, 0.05, 0.0),
    "one state": ((1, 1), 3, 2, 0.1, 0.2),
}


def differentiable_instance(name: str) -> tuple[tuple[Tensor, ...], SafeSet]:
    """Inputs that gradcheck may move each on its own: lower ends off zero, and room above one for single successors."""
    widths, actions, m, width, severity = CASES[name]
    loss, reference, safe_set = random_instances(widths, actions, m, batch=2, seed=11, width=width, severity=severity)
    real = safe_set.layout.transition_mask()
    several = (real.sum(-1, keepdim=True) > 1) & real
    lower = torch.where(several, safe_set.lower.clamp_min(1e-3), torch.where(real, 0.1, 0.0))
    upper = torch.where(several, torch.maximum(safe_set.upper, lower + 1e-2), torch.where(real, 1.5, 0.0))
    eta = torch.tensor([0.5, 0.8], dtype=torch.float64)
    # gradcheck refuses an empty input that requires grad
    inputs = tuple(
        t.clone().contiguous().requires_grad_(t.numel() > 0)
        for t in (loss, (reference + ~real).log(), lower, upper, safe_set.costs, eta)
    )
    return inputs, safe_set


def projected(safe_set: SafeSet, backend: str, **options: object):  # type: ignore[no-untyped-def]
    layout, solver = safe_set.layout, Newton(backend=backend, **options)
    real, pairs = layout.transition_mask(), layout.pair_mask()

    def function(
        loss: Tensor, log_reference: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, eta: Tensor
    ) -> tuple[Tensor, Tensor]:
        the_set = SafeSet(layout, lower * real, upper * real, costs * pairs)
        result = project(loss * pairs, None, the_set, eta, log_reference=log_reference * real, solver=solver)
        return result.occupancy, 1e-2 * result.log_occupancy.masked_fill(~real, 0.0)

    return function


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(CASES))
def test_gradcheck_in_both_modes(name: str, backend: str) -> None:
    inputs, safe_set = differentiable_instance(name)
    function = projected(safe_set, backend)
    # every entry for the compiled kernel; random directions for the slower torch solver, which has to agree with it below
    options = {"check_forward_ad": True, "check_undefined_grad": False, "fast_mode": backend == "torch"}
    assert gradcheck(function, inputs, eps=1e-6, atol=1e-6, rtol=1e-4, **options)


@pytest.mark.parametrize("name", list(CASES))
def test_instances_are_what_they_are_called(name: str) -> None:
    inputs, safe_set = differentiable_instance(name)
    loss, log_reference, lower, upper, costs, eta = (x.detach() for x in inputs)
    result = project(loss, None, SafeSet(safe_set.layout, lower, upper, costs), eta, log_reference=log_reference)
    q = result.occupancy
    pair = q.sum(-1, keepdim=True)
    real = safe_set.layout.transition_mask()
    clipped = (((q - lower * pair).abs() < 1e-12) | ((q - upper * pair).abs() < 1e-12)) & real
    if "safety" in name or "two" in name:
        assert (result.multipliers > 1e-3).any()
    if "clipped" in name:
        assert clipped.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_reverse_are_adjoint(backend: str) -> None:
    inputs, safe_set = differentiable_instance("two constraints, clipped intervals")
    function = projected(safe_set, backend)
    torch.manual_seed(0)
    cotangent = torch.randn_like(inputs[1])
    grads = torch.autograd.grad((function(*inputs)[0] * cotangent).sum(), inputs)
    tangents = [torch.randn_like(x) for x in inputs]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), t) for x, t in zip(inputs, tangents, strict=True)]
        pushed = forward_ad.unpack_dual(function(*duals)[0]).tangent
    assert torch.allclose((pushed * cotangent).sum(), sum((g * t).sum() for g, t in zip(grads, tangents, strict=True)), atol=1e-10)


def test_backends_and_fixed_iterations_have_one_gradient() -> None:
    inputs, safe_set = differentiable_instance("two constraints, clipped intervals")
    torch.manual_seed(0)
    cotangent = torch.randn_like(inputs[1])
    found = [
        torch.autograd.grad((projected(safe_set, backend, **options)(*inputs)[0] * cotangent).sum(), inputs)
        for backend, options in (("compiled", {}), ("torch", {}), ("torch", {"fixed_iterations": 20}))
    ]
    for others in found[1:]:
        for a, b in zip(found[0], others, strict=True):
            assert torch.allclose(a, b, atol=1e-8)


def test_agrees_with_cvxpylayers_in_dense_mode() -> None:
    loss, reference, safe_set = random_instances((1, 2, 3, 1), 2, 1, batch=16, seed=12, severity=0.1)
    priced = project(loss, reference, safe_set, 1.0).multipliers.squeeze(-1)
    # their derivative needs unique multipliers and a solution that is not pressed against the boundary
    keep = (priced > 0.05) & (priced < 10)
    assert keep.sum() >= 4
    inputs = [x[keep].clone().requires_grad_() for x in (loss, reference, safe_set.lower, safe_set.upper, safe_set.costs)]
    torch.manual_seed(0)
    cotangent = torch.rand_like(inputs[1])

    def grads(solver: ProjectionSolver) -> tuple[Tensor, ...]:
        result = project(inputs[0], inputs[1], SafeSet(safe_set.layout, *inputs[2:]), 1.0, solver=solver)
        return torch.autograd.grad((result.occupancy * cotangent).sum(), inputs)

    several = (safe_set.layout.transition_mask().sum(-1) > 1).unsqueeze(-1).expand_as(inputs[2])
    # nor is the multiplier of an interval unique where a pair has one successor or the interval ends at zero or one
    inside = several & (inputs[2] > 0) & (inputs[3] < 1)
    real = safe_set.layout.transition_mask().expand_as(several)
    shown = (torch.ones_like(inputs[0], dtype=torch.bool), real, inside, inside, torch.ones_like(inputs[4], dtype=torch.bool))
    dense = Cvxpy(solver="DIFFCP", solver_args={"mode": "dense"})
    for ours, theirs, where in zip(grads(Newton()), grads(dense), shown, strict=True):
        assert torch.allclose(ours[where], theirs[where], atol=1e-4)
