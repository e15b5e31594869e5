"""The KL projection onto the safe occupancy set (line 10 of WC-OPS), by Newton's method or through cvxpylayers."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, check_kind, check_tensor, number
from torchcmdp.layout import broadcast_shapes
from torchcmdp.projection.cvxpy_layer import Cvxpy
from torchcmdp.projection.newton import Newton
from torchcmdp.projection.problem import DEFAULT_CAP, LOG_FLOOR, ProjectionResult, ProjectionSolver
from torchcmdp.safe_set import SafeSet
from torchcmdp.solver import resolve

__all__ = [
    "DEFAULT_CAP",
    "LOG_FLOOR",
    "Cvxpy",
    "Newton",
    "ProjectionResult",
    "ProjectionSolver",
    "project",
    "projection_solver",
]


def projection_solver(solver: str | ProjectionSolver) -> ProjectionSolver:
    """The solver of the projection that is meant by "newton", "cvxpy" or itself."""
    return resolve(solver, ProjectionSolver, {"newton": Newton, "cvxpy": Cvxpy})  # type: ignore[type-abstract]


def project(
    loss: Tensor,
    reference: Tensor | None,
    safe_set: SafeSet,
    eta: float | Tensor,
    *,
    log_reference: Tensor | None = None,
    solver: str | ProjectionSolver = "newton",
) -> ProjectionResult:
    """argmin over the safe set of eta * <loss, q> + KL(q || reference), differentiable in every tensor.

    Where the safe set is empty, the elastic problem with penalty multiplier_cap * max_i [<costs_i, q>]^+ is solved instead and the
    status says so; each constraint counts in units of its largest cost, rounded to a power of two. One instance never affects
    another.

    Args:
        loss: `(... x L x S x A)`.
        reference: `(... x L x S x A x K)`, non-negative; zero entries get no mass unless the intervals force it. None if
            `log_reference` is given.
        safe_set: Intervals and costs; every batch shape broadcasts.
        eta: Step size: a number, or a tensor of the batch shape.
        log_reference: ln reference, for references that underflow.
        solver: "newton" (ours), "cvxpy" (a cvxpylayers layer, for comparison), or a solver with settings, such as
            `Newton(tolerance=1e-9)`.
    """
    solver = projection_solver(solver)
    check_kind("safe_set", safe_set, SafeSet, "a SafeSet")
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
    if loss.device != safe_set.costs.device:
        raise InvalidInput(f"loss is on {loss.device}, but the safe set on {safe_set.costs.device}; both must be on one device.")
    floored = torch.clamp_min(log_reference, LOG_FLOOR)
    if isinstance(eta, Tensor):
        log_target = floored - (_step(eta, loss, safe_set) * loss).unsqueeze(-1)
    else:
        log_target = torch.sub(floored, loss.unsqueeze(-1), alpha=number("eta", eta))
    return solver.solve(log_target, safe_set)


def _step(eta: Tensor, loss: Tensor, safe_set: SafeSet) -> Tensor:
    """eta, ready to be multiplied with the loss."""
    check_tensor("eta", eta)
    if eta.device != loss.device and eta.dim():
        raise InvalidInput(f"eta is on {eta.device}, but the loss on {loss.device}; both must be on one device.")
    safe_set.batch_with("eta", eta.shape)
    try:
        broadcast_shapes(eta.shape, loss.shape[:-3])
    except RuntimeError:
        raise InvalidInput(
            f"eta has shape {tuple(eta.shape)}; it must broadcast with the loss's {tuple(loss.shape[:-3])}."
        ) from None
    return eta[..., None, None, None]
