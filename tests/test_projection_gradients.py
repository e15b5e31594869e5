"""Derivatives of the projection: finite differences, both modes, both backends, and cvxpylayers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad, gradcheck

from tests.projection_instances import random_instances
from torchcmdp.errors import InvalidInput
from torchcmdp.layout import Layout
from torchcmdp.nn import SafeOccupancy
from torchcmdp.occupancy import transitions_of
from torchcmdp.projection import Cvxpy, Newton, ProjectionResult, project
from torchcmdp.projection.problem import ProjectionSolver
from torchcmdp.safe_set import SafeSet
from torchcmdp.status import ELASTIC, SOLVED
from train.bench.fuzz import derivatives_disagree

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
    options = {"check_forward_ad": True, "check_undefined_grad": False, "fast_mode": True}
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


def scalar(safe_set: SafeSet, backend: str, like: Tensor):  # type: ignore[no-untyped-def]
    """A smooth scalar of both outputs."""
    weights = torch.randn(like.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    function = projected(safe_set, backend)

    def value(*inputs: Tensor) -> Tensor:
        occupancy, logarithm = function(*inputs)
        return (weights * occupancy).sum() + (weights.cos() * logarithm).sum()

    return value


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["binding safety", "two constraints, clipped intervals", "one state"])
def test_second_derivatives_are_those_of_the_gradient(name: str, backend: str) -> None:
    inputs, safe_set = differentiable_instance(name)
    value = scalar(safe_set, backend, inputs[1])
    generator = torch.Generator().manual_seed(1)
    # each in units of its own size: the logarithm of a lower end of 1e-3 bends within a step of 1e-5
    direction = [torch.randn(x.shape, generator=generator, dtype=torch.float64) * x.detach().abs().clamp_max(1) for x in inputs]

    def gradient(step: float) -> tuple[Tensor, ...]:
        moved = [(x + step * d).detach().requires_grad_() for x, d in zip(inputs, direction, strict=True)]
        return torch.autograd.grad(value(*moved), moved)

    first = torch.autograd.grad(value(*inputs), inputs, create_graph=True)
    second = torch.autograd.grad(sum((g * d).sum() for g, d in zip(first, direction, strict=True)), inputs)
    for found, up, down in zip(second, gradient(1e-5), gradient(-1e-5), strict=True):
        expected = (up - down) / 2e-5
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6 * float(1 + expected.abs().max()))


def test_third_derivatives_are_refused() -> None:
    inputs, safe_set = differentiable_instance("binding safety")
    value = scalar(safe_set, "compiled", inputs[1])
    (first,) = torch.autograd.grad(value(*inputs), inputs[0], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(InvalidInput, match="first and second derivatives only"):
        torch.autograd.grad(second.sum(), inputs[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_function_transforms(backend: str) -> None:
    inputs, safe_set = differentiable_instance("two constraints, clipped intervals")
    value = scalar(safe_set, backend, inputs[1])
    gradient = torch.autograd.grad(value(*inputs), inputs)
    plain = tuple(x.detach() for x in inputs)
    everything = tuple(range(len(plain)))
    direction = tuple(torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) for x in plain)
    along = sum((g * d).sum() for g, d in zip(gradient, direction, strict=True))
    assert torch.allclose(func.jvp(value, plain, direction)[1], along)
    transformed = func.grad(value, everything)
    for a, b in zip(transformed(*plain), gradient, strict=True):
        assert torch.allclose(a, b)
    forward_over_reverse = func.jvp(transformed, plain, direction)[1]
    reverse_over_forward = func.grad(lambda *x: func.jvp(value, x, direction)[1], everything)(*plain)
    for a, b in zip(forward_over_reverse, reverse_over_forward, strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-8)
    with pytest.raises(InvalidInput, match="forward mode over forward mode"):
        func.jvp(lambda *x: func.jvp(value, x, direction)[1], plain, direction)

    def occupancy(eta: Tensor) -> Tensor:
        return projected(safe_set, backend)(*plain[:5], eta)[0]

    assert torch.allclose(func.jacrev(occupancy)(plain[5]), func.jacfwd(occupancy)(plain[5]), atol=1e-12)
    etas = torch.stack([plain[5], 2 * plain[5]])
    assert torch.allclose(func.vmap(occupancy)(etas), torch.stack([occupancy(eta) for eta in etas]), atol=1e-12)


def test_function_transforms_of_the_layer() -> None:
    loss, _, safe_set = random_instances((1, 2, 3, 1), 2, 1, batch=3, seed=1)
    layer = SafeOccupancy(safe_set.layout, 1, lower=safe_set.lower[0], upper=safe_set.upper[0], costs=safe_set.costs[0])

    def value(loss: Tensor) -> Tensor:
        return layer(loss).policy.square().sum()

    leaf = loss.clone().requires_grad_()
    (expected,) = torch.autograd.grad(sum(value(x) for x in leaf), leaf)
    assert torch.allclose(func.vmap(func.grad(value))(loss), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_known_transitions_move_within_the_simplex(backend: str) -> None:
    """Every entry is at a bound there: derivatives exist along moves that keep the rows' sums, and only those are asked for."""
    loss, reference, safe_set = random_instances((1, 3, 2, 1), 2, 1, batch=4, seed=9, severity=0.0)
    layout = safe_set.layout
    real = layout.transition_mask()
    logits = torch.where(real, (reference + ~real).log(), -torch.inf)
    logits = torch.where(layout.pair_mask().unsqueeze(-1), logits, 0.0).requires_grad_()

    def function(logits: Tensor) -> Tensor:
        kernel = logits.softmax(-1) * real
        return project(
            loss, reference, SafeSet(layout, kernel, kernel, safe_set.costs), 1.0, solver=Newton(backend=backend)
        ).occupancy

    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    direction = torch.randn(logits.shape, generator=generator, dtype=torch.float64) * real
    (gradient,) = torch.autograd.grad((weights * function(logits)).sum(), logits)
    with torch.no_grad():
        difference = (weights * (function(logits + 1e-6 * direction) - function(logits - 1e-6 * direction))).sum() / 2e-6
    assert torch.allclose((gradient * direction).sum(), difference, rtol=1e-6, atol=1e-7)


def test_elastic_instances_have_derivatives() -> None:
    loss, reference, safe_set = random_instances((1, 3, 3, 1), 2, 2, batch=8, seed=7, severity=0.9)
    leaf = loss.clone().requires_grad_()
    result = project(leaf, reference, safe_set, 0.5, solver=Newton(multiplier_cap=20.0))
    elastic = result.status == ELASTIC
    assert elastic.sum() >= 4
    weights = torch.randn(reference.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights *= elastic[:, None, None, None, None]
    (gradient,) = torch.autograd.grad((weights * result.occupancy).sum(), leaf)
    direction = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def moved(step: float) -> Tensor:
        return (
            weights * project(loss + step * direction, reference, safe_set, 0.5, solver=Newton(multiplier_cap=20.0)).occupancy
        ).sum()

    assert torch.allclose((gradient * direction).sum(), (moved(1e-6) - moved(-1e-6)) / 2e-6, rtol=1e-6, atol=1e-7)


def test_wild_derivatives_are_finite_and_both_modes_agree() -> None:
    assert sum(derivatives_disagree(seed, 20) for seed in range(60)) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_modes_agree_where_bounds_leave_one_rounding(backend: str) -> None:
    """The seed has a pair whose bounds leave a free mass of 3e-17: derivatives of 1e16 used to cancel in forward mode."""
    assert derivatives_disagree(137, 20, backend) == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("left", [1e-16, 3e-16, 6e-16])
def test_what_rounding_leaves_between_bounds_is_not_free(left: float, backend: str) -> None:
    """Else the gradient in a bound would be one over it: a number without a correct digit."""
    layout = Layout((1, 3, 1), 1)
    target, lower, upper = torch.zeros(3, 1, *layout.transition_shape, dtype=torch.float64)
    lower[0, 1, :, 0, 0] = upper[0, 1, :, 0, 0] = 1
    for tensor, ends in ((target, (-200, 0, -150)), (lower, (0.3, 0, 0)), (upper, (1, 0.7 - left, 0.5))):
        tensor[0, 0, 0, 0] = torch.tensor(ends, dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in (target, lower, upper)]
    safe_set = SafeSet(layout, *leaves[1:], torch.zeros(1, 0, *layout.pair_shape, dtype=torch.float64))
    result = Newton(backend=backend).solve(leaves[0], safe_set)
    assert 0 < result.occupancy[0, 0, 0, 0, 2] < 1e-15
    gradients = torch.autograd.grad(result.log_occupancy[result.occupancy > 0].sum(), leaves)
    assert max(gradient.abs().max() for gradient in gradients) < 100


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_log_occupancy_has_derivatives_at_vanishing_mass_and_just_active_bounds(seed: int, backend: str) -> None:
    """Of ln q alone, whose parts are not small where q is: finite, and the same in forward and reverse mode."""
    loss, reference, safe_set = random_instances((1, 3, 2, 1), 2, 2, batch=16, seed=seed, severity=0.1)
    rng, layout, real = torch.Generator().manual_seed(seed), safe_set.layout, safe_set.layout.transition_mask()
    coin = torch.rand(reference.shape, generator=rng)

    def function(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor) -> ProjectionResult:
        the_set, solver = SafeSet(layout, lower, upper, costs), Newton(backend=backend)
        return project(torch.zeros_like(loss), None, the_set, 1.0, log_reference=target, solver=solver)

    target = torch.where(coin < 0.2, -690.0, (reference + ~real).log()) * real
    q = function(target, safe_set.lower, safe_set.upper, safe_set.costs).occupancy
    p = transitions_of(q, layout)
    # ends that the solution touches without being held by them, some of them off by a rounding error
    near, held = p * (1 + 1e-15 * torch.randint(-1, 2, p.shape, generator=rng)), (q > 0) & real
    lower = torch.where(held & (coin > 0.8), torch.minimum(near, safe_set.upper), safe_set.lower)
    upper = torch.where(held & (coin > 0.6) & (coin < 0.8), torch.maximum(near, safe_set.lower), safe_set.upper)
    primals = (target, lower, upper, safe_set.costs)
    leaves = [x.clone().requires_grad_() for x in primals]
    result = function(*leaves)
    log_q = result.log_occupancy.detach()
    assert (result.status == SOLVED).sum() >= 8 and ((log_q < -600) & (log_q > -torch.inf)).sum() >= 8
    tangents = [torch.randn(x.shape, generator=rng, dtype=torch.float64) * (x.abs() if i else real) for i, x in enumerate(primals)]
    cotangent = torch.randn(p.shape, generator=rng, dtype=torch.float64) * (log_q > -torch.inf)
    pulled = torch.autograd.grad(result.log_occupancy, leaves, cotangent)
    with forward_ad.dual_level():
        moved = function(*(forward_ad.make_dual(x, d) for x, d in zip(primals, tangents, strict=True)))
        pushed = forward_ad.unpack_dual(moved.log_occupancy).tangent
    assert pushed.isfinite().all() and all(gradient.isfinite().all() for gradient in pulled)
    forward = (cotangent * pushed).flatten(1)
    reverse = torch.cat([(g * d).flatten(1) for g, d in zip(pulled, tangents, strict=True)], 1)
    assert ((forward.sum(1) - reverse.sum(1)).abs() <= 1e-6 * (forward.abs().sum(1) + reverse.abs().sum(1))).all()


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


@pytest.mark.parametrize("solver", [Newton(backend="compiled"), Newton(backend="torch"), Newton(fixed_iterations=30)])
def test_what_the_reference_leaves_out_has_the_derivatives_of_what_it_hardly_has(solver: Newton) -> None:
    layout, generator = Layout((1, 2, 3, 1), 2), torch.Generator().manual_seed(1)
    real = layout.transition_mask()
    target, weight = torch.randn(2, 1, *layout.transition_shape, dtype=torch.float64, generator=generator)
    costs = torch.zeros(1, 0, *layout.pair_shape, dtype=torch.float64)
    found = []
    for impossible in (-torch.inf, -1e4):
        inputs = [torch.where(real, target, 0.0), (0.2 * real.double()).expand_as(target).clone()]
        inputs[0][0, 0, 0, 1, real[0, 0, 1]] = impossible  # a whole pair
        inputs[0][0, 1, 0, 1, 0] = impossible  # a successor that has to have some mass
        inputs = [each.requires_grad_() for each in inputs]
        occupancy = solver.solve(inputs[0], SafeSet(layout, inputs[1], real.double().expand_as(target), costs)).occupancy
        first = torch.autograd.grad((weight * occupancy).sum(), inputs, create_graph=True)
        plain = torch.autograd.grad((weight * occupancy).sum(), inputs, retain_graph=True)
        second = torch.autograd.grad(sum((weight * each).sum() for each in first), inputs)
        found.append(torch.stack([*first, *plain, *second]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)
