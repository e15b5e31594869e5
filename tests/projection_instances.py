"""Random projection instances for the tests, from mild to as degenerate as they come, and independent solutions of them."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcmdp.layout import Layout
from torchcmdp.projection import Newton, ProjectionResult, project
from torchcmdp.projection.torch_multipliers import units
from torchcmdp.safe_set import SafeSet


def random_instances(
    widths: tuple[int, ...], actions: int, m: int, batch: int, seed: int, *, width: float = 0.15, severity: float = 0.2
) -> tuple[Tensor, Tensor, SafeSet]:
    """Losses, references and safe sets: intervals that clip, costs shifted up by `severity` so that safety often binds."""
    rng = np.random.default_rng(seed)
    layout = Layout(widths, actions)
    real, pairs = layout.transition_mask().numpy(), layout.pair_mask().numpy()
    shape = (batch, *layout.transition_shape)
    kernel = rng.gamma(1.0, size=shape) * real
    kernel /= np.where(pairs[..., None], kernel.sum(-1, keepdims=True), 1)
    # different room below and above: complementary ends of two successors would make the derivative one-sided
    lower = np.clip(kernel - width * rng.uniform(0.5, 1.5, size=shape), 0, 1) * real
    upper = np.clip(kernel + width * rng.uniform(0.5, 1.5, size=shape), 0, 1) * real
    reference = rng.gamma(1.0, size=shape) * real
    reference /= reference.sum(axis=(-1, -2, -3), keepdims=True)
    loss = rng.uniform(0, 3, size=(batch, *layout.pair_shape)) * pairs
    costs = np.clip(rng.uniform(-1, 1, size=(batch, m, *layout.pair_shape)) + severity, -1, 1) * pairs
    tensors = [torch.from_numpy(array) for array in (loss, reference, lower, upper, costs)]
    return tensors[0], tensors[1], SafeSet(layout, *tensors[2:])


def wild_instances(seed: int, batch: int) -> tuple[Tensor, SafeSet]:
    """Log references and safe sets over all sizes and degenerate shapes: see the branches for what is in the bag."""
    rng = np.random.default_rng(seed)
    layers, actions = rng.integers(1, 6), int(rng.integers(1, 5))
    m = int(rng.choice([0, 1, 2, 3, 6, 20, 50], p=[0.1, 0.3, 0.25, 0.15, 0.1, 0.07, 0.03]))
    layout = Layout((1, *rng.integers(1, 6, size=layers - 1), 1), actions)
    real, pairs = layout.transition_mask().numpy(), layout.pair_mask().numpy()
    shape = (batch, *layout.transition_shape)
    kernel = (rng.gamma(rng.choice([0.05, 0.3, 1.0]), size=shape) + 1e-300) * real
    kernel /= np.where(pairs[..., None], kernel.sum(-1, keepdims=True), 1)
    kind = rng.integers(5)
    room = {0: 0.0, 1: 1.0}.get(kind, rng.choice([1e-6, 0.01, 0.1, 0.5]) * (rng.uniform(size=(*shape[:-1], 1)) if kind > 2 else 1))
    lower, upper = np.clip(kernel - room, 0, 1) * real, np.clip(kernel + room, 0, 1) * real
    kind = rng.integers(6)
    log_reference = rng.normal(size=shape) * [0.1, 1, 5, 30, 1, 1][kind]
    if kind == 4:  # references near 1e-300
        log_reference = np.where(rng.uniform(size=shape) < 0.3, -690.0, log_reference)
    if kind == 5:  # eta * loss up to 1e3
        log_reference = log_reference - 1000 * rng.uniform(size=(*shape[:-1], 1)) * (rng.uniform(size=(*shape[:-1], 1)) < 0.2)
    kind = rng.integers(6)
    costs = rng.uniform(-1, 1, size=(batch, m, *layout.pair_shape))
    if kind == 1:
        costs = costs + rng.uniform(-0.5, 0.8)
    if kind == 2:
        costs = np.sign(costs)
    if kind == 3 and m > 1:  # duplicates
        costs[:, m // 2 :] = costs[:, : m - m // 2]
    if kind == 4 and m > 1:  # opposites
        costs[:, m // 2 :] = -costs[:, : m - m // 2]
    if kind == 5:  # no safe policy, or costs that say nothing
        costs = np.abs(costs) * rng.choice([1, 1e-3, 0])
    costs = np.clip(costs, -1, 1) * pairs
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in (log_reference, lower, upper, costs)]
    return tensors[0], SafeSet(layout, *tensors[1:])


def wild_units(seed: int, batch: int) -> tuple[Tensor, SafeSet]:
    """`wild_instances` with costs of every unit from 1e-12 to 1e6, references to 1e-300 and losses to 1e4."""
    log_reference, safe_set = wild_instances(seed, batch)
    rng = np.random.default_rng(seed)
    unit = 10.0 ** torch.from_numpy(rng.uniform(-12, 6, size=(batch, safe_set.constraints, 1, 1, 1)))
    loss = torch.from_numpy(10.0 ** rng.uniform(-2, 4, size=(batch, 1, 1, 1, 1)) * rng.uniform(size=(*log_reference.shape[:-1], 1)))
    rare = torch.from_numpy(rng.uniform(size=log_reference.shape) < 0.1)
    wild = torch.where(rare, -690.0, log_reference) - loss * (seed % 2)
    return wild, SafeSet(safe_set.layout, safe_set.lower, safe_set.upper, safe_set.costs * unit)


def derivatives_disagree(seed: int, batch: int, backend: str = "compiled") -> int:
    """How many of `batch` wild instances have a derivative that is not finite, or that differs between the two modes."""
    log_reference, safe_set = wild_units(seed, batch)
    layout, rng = safe_set.layout, torch.Generator().manual_seed(seed)
    real = layout.transition_mask()
    primals = (log_reference.clamp_min(-700), safe_set.lower, safe_set.upper, safe_set.costs)
    zero = torch.zeros(layout.pair_shape, dtype=torch.float64)

    def function(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor) -> ProjectionResult:
        return project(zero, None, SafeSet(layout, lower, upper, costs), 1.0, log_reference=target, solver=Newton(backend=backend))

    leaves = [x.clone().requires_grad_() for x in primals]
    result = function(*leaves)
    outputs = (result.occupancy, result.log_occupancy)
    # a tangent of a bound or a cost is in units of that bound or cost
    tangents = [torch.randn(x.shape, generator=rng, dtype=torch.float64) * (x.abs() if i else real) for i, x in enumerate(primals)]
    cotangents = [torch.randn(x.shape, generator=rng, dtype=torch.float64) * (x.detach() > -torch.inf) * real for x in outputs]
    pulled = torch.autograd.grad(outputs, leaves, cotangents)
    with forward_ad.dual_level():
        duals = (forward_ad.make_dual(x, d) for x, d in zip(primals, tangents, strict=True))
        moved = function(*duals)
        pushed = [forward_ad.unpack_dual(x).tangent for x in (moved.occupancy, moved.log_occupancy)]
    forward = [(c * d).flatten(1) for c, d in zip(cotangents, pushed, strict=True)]
    reverse = [(g * d).flatten(1) for g, d in zip(pulled, tangents, strict=True)]
    size = sum(part.abs().sum(1) for part in (*forward, *reverse))
    error = sum(part.sum(1) for part in forward) - sum(part.sum(1) for part in reverse)
    # where a policy is pinned to one action, both are what rounding leaves of a multiplier times a moved cost
    priced = (result.multipliers[:, :, None, None, None] * tangents[3]).flatten(1).abs().sum(1)
    rounding = 1e-13 * (1 + priced) * sum(c.flatten(1).abs().sum(1) for c in cotangents)
    return int((~(error.abs() <= 1e-6 * size + rounding)).sum())


def one(safe_set: SafeSet, j: int) -> SafeSet:
    """Instance j of a flat batch."""
    return SafeSet(safe_set.layout, safe_set.lower[j], safe_set.upper[j], safe_set.costs[j])


def _constraints(q: list[list[cp.Expression]], safe_set: SafeSet) -> list[cp.Constraint]:
    """Flow and intervals of one instance, for q[k][x] an (A x n_{k+1}) expression."""
    layout = safe_set.layout
    rows = [cp.sum(q[0][0]) == 1]
    for k in range(1, layout.layers):
        for x in range(layout.widths[k]):
            rows.append(cp.sum(q[k][x]) == sum(cp.sum(q[k - 1][y][:, x]) for y in range(layout.widths[k - 1])))
    for k in range(layout.layers):
        n = layout.widths[k + 1]
        for x in range(layout.widths[k]):
            pair = cp.sum(q[k][x], axis=1, keepdims=True) @ np.ones((1, n))
            if n > 1:
                rows += [
                    q[k][x] >= cp.multiply(safe_set.lower[k, x, :, :n].numpy(), pair),
                    q[k][x] <= cp.multiply(safe_set.upper[k, x, :, :n].numpy(), pair),
                ]
    return rows


def clarabel_projection(loss: Tensor, reference: Tensor, safe_set: SafeSet, eta: float, cap: float) -> Tensor:
    """The elastic projection of one instance by Clarabel through cvxpy, with the largest violation at price `cap`."""
    layout, m = safe_set.layout, safe_set.constraints
    q = [
        [cp.Variable((layout.actions, layout.widths[k + 1]), nonneg=True) for _ in range(n)]
        for k, n in enumerate(layout.widths[:-1])
    ]
    objective: cp.Expression = cp.Constant(0)
    used: list[cp.Expression] = [cp.Constant(0)] * m
    for k in range(layout.layers):
        for x in range(layout.widths[k]):
            linear = eta * loss[k, x, :, None].numpy() - np.log(reference[k, x, :, : layout.widths[k + 1]].numpy())
            objective += cp.sum(-cp.entr(q[k][x]) + cp.multiply(linear, q[k][x]))
            for i in range(m):
                used[i] = used[i] + cp.sum(cp.multiply(safe_set.costs[i, k, x, :, None].numpy(), q[k][x]))
    rows = _constraints(q, safe_set)
    if m:
        slack = cp.Variable(nonneg=True)
        objective += cap * slack
        rows += [used[i] / scale <= slack for i, scale in enumerate(units(safe_set.costs[None])[0].tolist())]
    tight = {"tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12, "max_iter": 500}
    cp.Problem(cp.Minimize(objective), rows).solve(solver=cp.CLARABEL, **tight)
    out = torch.zeros(layout.transition_shape, dtype=torch.float64)
    for k in range(layout.layers):
        for x in range(layout.widths[k]):
            out[k, x, :, : layout.widths[k + 1]] = torch.from_numpy(q[k][x].value)
    return out


def least_largest_violation(safe_set: SafeSet) -> float:
    """min over the transition set of max_i [<costs_i, q>]^+, each in its unit, by HiGHS."""
    layout, m = safe_set.layout, safe_set.constraints
    q = [
        [cp.Variable((layout.actions, layout.widths[k + 1]), nonneg=True) for _ in range(n)]
        for k, n in enumerate(layout.widths[:-1])
    ]
    used = [
        sum(
            cp.sum(cp.multiply(safe_set.costs[i, k, x, :, None].numpy(), q[k][x]))
            for k in range(layout.layers)
            for x in range(layout.widths[k])
        )
        for i in range(m)
    ]
    slack = cp.Variable(nonneg=True)
    rows = [used[i] / scale <= slack for i, scale in enumerate(units(safe_set.costs[None])[0].tolist())]
    problem = cp.Problem(cp.Minimize(slack), [*_constraints(q, safe_set), *rows])
    tight = {"method": "highs", "primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    return float(problem.solve(solver=cp.SCIPY, scipy_options=tight))
