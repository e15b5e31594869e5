"""The KL projection onto the safe occupancy set (line 10 of WC-OPS), by Newton's method or through cvxpylayers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, choice
from torchcmdp.projection.newton import BACKENDS, NewtonOptions, solve_newton
from torchcmdp.projection.problem import (
    DEFAULT_CAP,
    ELASTIC,
    LOG_FLOOR,
    MAX_ITERATIONS,
    SOLVED,
    STATUS_NAMES,
    ProjectionResult,
    SafeSet,
)

__all__ = [
    "DEFAULT_CAP",
    "ELASTIC",
    "LOG_FLOOR",
    "MAX_ITERATIONS",
    "METHODS",
    "SOLVED",
    "STATUS_NAMES",
    "ProjectionResult",
    "SafeSet",
    "project",
]

METHODS = ("newton", "cvxpy")


def project(
    loss: Tensor,
    reference: Tensor | None,
    safe_set: SafeSet,
    eta: float | Tensor,
    *,
    log_reference: Tensor | None = None,
    method: str = "newton",
    cap: float = DEFAULT_CAP,
    tolerance: float = 1e-11,
    max_iterations: int = 500,
    backend: str = "auto",
    fixed_iterations: int | None = None,
    solver: str | None = None,
    solver_args: dict[str, Any] | None = None,
) -> ProjectionResult:
    """argmin over the safe set of eta * <loss, q> + KL(q || reference), differentiable in every tensor.

    Where the safe set is empty, or a multiplier would exceed `cap`, the elastic problem with penalty cap * sum_i [<costs_i, q>]^+
    is solved instead and the status says so. One instance never affects another.

    Args:
        loss: `(... x L x S x A)`.
        reference: `(... x L x S x A x S)`, non-negative; zero entries get no mass unless the intervals force it. None if
            `log_reference` is given.
        safe_set: Intervals and costs; every batch shape broadcasts.
        eta: Step size: a number, or a tensor of the batch shape.
        log_reference: ln reference, for references that underflow.
        method: "newton" (ours) or "cvxpy" (a cvxpylayers layer, for comparison).
        cap: Largest safety multiplier.
        tolerance, max_iterations, backend, fixed_iterations: Newton only, see `NewtonOptions`.
        solver, solver_args: cvxpy only, see `cvxpy_layer.solve_cvxpy`.
    """
    choice("method", method, METHODS)
    layout = safe_set.layout
    layout.check_shape("loss", loss, kind="pair")
    if (reference is None) == (log_reference is None):
        raise InvalidInput("give either reference or log_reference, and not both.")
    if log_reference is None:
        assert reference is not None
        layout.check_shape("reference", reference, kind="transition")
        # a double `where` keeps the gradient of ln at zero out of the backward pass
        positive = reference != 0
        log_reference = torch.where(positive, torch.where(positive, reference, 1.0).log(), LOG_FLOOR)
    else:
        layout.check_shape("log_reference", log_reference, kind="transition")
    if not cap > 0:
        raise InvalidInput(f"cap is {cap}; the largest safety multiplier must be positive.")
    step = eta[..., None, None, None] if isinstance(eta, Tensor) else eta
    log_target = torch.clamp_min(log_reference, LOG_FLOOR) - (step * loss).unsqueeze(-1)
    if method == "newton":
        choice("backend", backend, BACKENDS)
        options = NewtonOptions(float(cap), float(tolerance), int(max_iterations), backend, fixed_iterations)
        return solve_newton(log_target, safe_set, options)
    from torchcmdp.projection.cvxpy_layer import solve_cvxpy  # cvxpy takes seconds to import: only those who use it wait

    return solve_cvxpy(log_target, safe_set, cap=cap, solver=solver, solver_args=solver_args)
