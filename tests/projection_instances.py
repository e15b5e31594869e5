"""Random projection instances for the tests, from mild to as degenerate as they come, and independent solutions of them."""

from __future__ import annotations

from typing import Any

import cvxpy as cp
import numpy as np
import torch
from torch import Tensor

from torchcmdp.layout import Layout
from torchcmdp.projection import Cvxpy, ProjectionResult
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


def random_problem(layout: Layout, m: int, batch: tuple[int, ...], seed: int) -> tuple[Tensor, SafeSet]:
    """A target and a safe set whose costs the target's own policy breaks, but some policy keeps: action 0 is always safe."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*batch, *shape, generator=generator, dtype=torch.float64)

    mask, pairs = layout.transition_mask(), layout.pair_mask()
    weights = (uniform(*layout.transition_shape) + 0.1) * mask
    centre = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    width = 0.3 * uniform(*layout.transition_shape)
    lower, upper = (centre - width).clamp_min(0) * mask, (centre + width).clamp_max(1) * mask
    costs = uniform(m, *layout.pair_shape) * pairs
    costs[..., 0] = -0.2 * costs[..., 0]
    target = (-4 * uniform(*layout.transition_shape) - 1) * mask
    return target, SafeSet(layout, lower, upper, costs)


def solve_cvxpy(target: Tensor, safe: SafeSet, **settings: Any) -> ProjectionResult:
    return Cvxpy(**settings).solve(target, safe)
