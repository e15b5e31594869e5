"""The cvxpylayers projection where its backend fails, returns nonsense, or nearly the answer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cvxpylayers.torch import CvxpyLayer
from torch import Tensor

from tests.projection_instances import random_problem, solve_cvxpy
from torchcmdp.layout import Layout
from torchcmdp.occupancy import flow_residual, interval_residual
from torchcmdp.projection import cvxpy_layer
from torchcmdp.projection.cvxpy_layer import RETRY_CAPS
from torchcmdp.projection.torch_multipliers import units
from torchcmdp.safe_set import SafeSet
from torchcmdp.status import MAX_ITERATIONS, SOLVED

SOLVERS = [pytest.param("MOREAU", marks=pytest.mark.skipif(not cvxpy_layer._installed("moreau"), reason="no moreau")), "DIFFCP"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:cvxpylayers", "ignore::UserWarning")
TINY = Layout((1, 2, 2, 1), 2)
LAYOUTS = [Layout((1, 1), 3), TINY, Layout((1, 3, 1, 2, 1), 2), Layout((1, 2, 4, 1), 2)]


def refuse_marked(monkeypatch: pytest.MonkeyPatch, mark: float) -> list[int]:
    """Make the backend raise for every batch whose first parameter holds `mark`; returns the sizes of the calls."""
    real, sizes = CvxpyLayer.forward, []

    def forward(self: CvxpyLayer, *parameters: Tensor, **options: Any) -> tuple[Tensor, ...]:
        sizes.append(len(parameters[0]))
        if (parameters[0] == mark).any():
            raise RuntimeError("no solution")
        return real(self, *parameters, **options)

    monkeypatch.setattr(CvxpyLayer, "forward", forward)
    return sizes


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_failing_instance_does_not_disturb_the_others(monkeypatch: pytest.MonkeyPatch, solver: str) -> None:
    target, safe = random_problem(TINY, 1, (3,), seed=11)
    target[1, 0, 0] = 0.0
    target[1, 0, 0, 0, 0] = 64.0  # the backend sees every layer relative to its largest entry: here 0 and -64, the mark
    healthy = solve_cvxpy(target, safe, solver=solver)
    sizes = refuse_marked(monkeypatch, mark=-64.0)
    leaf = target.clone().requires_grad_()
    result = solve_cvxpy(leaf, safe, solver=solver)
    assert sizes == [3, 1, 1, 1] + 2 * len(RETRY_CAPS) * [1]  # the batch, one at a time, then each retry twice
    assert result.status.tolist() == [SOLVED, MAX_ITERATIONS, SOLVED]
    assert (result.occupancy[[0, 2]] - healthy.occupancy[[0, 2]]).abs().max() < 1e-7
    assert flow_residual(result.occupancy[1]) < 1e-12
    assert interval_residual(result.occupancy[1], safe.lower[1], safe.upper[1]) < 1e-12
    unsafe = (safe.costs[1] * result.occupancy[1].sum(-1)).sum().clamp_min(0)
    assert abs(result.residual[1] - unsafe / units(safe.costs)[1, 0]) < 1e-12 and unsafe > 0.1
    assert result.multipliers[1].isnan().all() and result.gap[1].isnan() and result.gap[[0, 2]].max() < 1e-7
    assert (result.potentials[1][~TINY.state_mask()] == 0).all()
    result.occupancy[..., 0, 0].sum().backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()
    assert (leaf.grad[1] == 0).all() and leaf.grad[0].abs().max() > 1e-3


def test_a_backend_that_returns_nonsense_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target, safe = random_problem(TINY, 1, (3,), seed=12)
    real = CvxpyLayer.forward

    def forward(self: CvxpyLayer, *parameters: Tensor, **options: Any) -> tuple[Tensor, ...]:
        q, *duals = real(self, *parameters, **options)
        factor = torch.tensor([[1.0], [3.0], [math.nan]], dtype=torch.float64)
        return (q * factor[-len(q) :], *duals)  # the last two fail, and fail again when they are retried

    monkeypatch.setattr(CvxpyLayer, "forward", forward)
    shared = safe.costs[0].clone().requires_grad_()
    result = solve_cvxpy(target, SafeSet(TINY, safe.lower, safe.upper, shared))
    assert result.status.tolist() == [SOLVED, MAX_ITERATIONS, MAX_ITERATIONS]
    for certificate in (result.multipliers, result.potentials[:, 0, :1], result.gap):
        assert certificate[0].isfinite().all() and certificate[1:].isnan().all()
    assert flow_residual(result.occupancy).max() < 1e-8
    result.occupancy[..., 0, 0].sum().backward()
    assert shared.grad is not None and shared.grad.isfinite().all() and shared.grad.abs().max() > 1e-3


def test_a_failure_is_retried_with_a_smaller_exact_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    target, safe = random_problem(TINY, 1, (3,), seed=12)
    expected = solve_cvxpy(target, safe)
    assert (expected.status == SOLVED).all() and expected.multipliers.max() < 200 / 8
    real, calls = CvxpyLayer.forward, []

    def forward(self: CvxpyLayer, *parameters: Tensor, **options: Any) -> tuple[Tensor, ...]:
        calls.append(len(parameters[0]))
        if len(calls) <= 4:
            raise RuntimeError("no solution")
        return real(self, *parameters, **options)

    monkeypatch.setattr(CvxpyLayer, "forward", forward)
    result = solve_cvxpy(target, safe)
    assert calls == [3, 1, 1, 1, 3] and (result.status == SOLVED).all()
    assert torch.allclose(result.occupancy, expected.occupancy, atol=1e-6)


def test_tiny_negatives_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = CvxpyLayer.forward
    monkeypatch.setattr(CvxpyLayer, "forward", lambda *a, **k: (real(*a, **k)[0] - 1e-8, *real(*a, **k)[1:]))
    target, safe = random_problem(TINY, 0, (), seed=12)
    target[0, 0, 1] = -math.inf
    result = solve_cvxpy(target, safe)
    assert (result.occupancy >= 0).all() and (result.occupancy[0, 0, 1] == 0).all()
    assert not result.log_occupancy.isnan().any() and (result.log_occupancy[result.occupancy > 0] > -50).all()
    assert 1e-9 < result.residual < 1e-6
