"""The optimistic linear program: the best safe occupancy over all plausible kernels, exact and batched."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, choice
from torchcmdp.layout import Layout
from torchcmdp.optimistic import torch_simplex
from torchcmdp.optimistic.problem import INFEASIBLE, INVALID, MAX_ITERATIONS, SOLVED, OptimisticOptimum
from torchcmdp.projection.compiled.threads import over_batch
from torchcmdp.projection.problem import SafeSet

__all__ = ["INFEASIBLE", "INVALID", "MAX_ITERATIONS", "SOLVED", "OptimisticOptimum", "optimistic_optimum"]

BACKENDS = ("auto", "compiled", "torch")


def optimistic_optimum(
    rewards: Tensor, safe_set: SafeSet, *, max_iterations: int = 2000, backend: str = "auto", fixed_iterations: int | None = None
) -> OptimisticOptimum:
    """max <rewards, q> over q in the safe set, jointly over policies and kernels in the intervals.

    For given multipliers the best q is an optimistic backward recursion; the mixture of such q that is best among the safe ones
    comes from a simplex method with m + 1 rows, for which that recursion is the pricing step. Where no q is safe, the least
    violation is found first and the best value with that much violation second.

    Args:
        rewards: `(... x L x S x A)`; broadcasts against the safe set.
        safe_set: Intervals and costs.
        max_iterations: Policies tried before an instance is given up.
        backend: "compiled" (CPU tensors), "torch" (any device), or "auto".
        fixed_iterations: Run the torch solver for just this many pivots, with no read of a tensor's value on the host.
    """
    layout = safe_set.layout
    layout.check_shape("rewards", rewards, kind="pair")
    choice("backend", backend, BACKENDS)
    if backend == "compiled" and rewards.device.type != "cpu":
        raise InvalidInput(f'backend is "compiled", which needs CPU tensors, but the input is on {rewards.device}.')
    batch = torch.broadcast_shapes(rewards.shape[:-3], safe_set.batch_shape)
    axes = ((rewards, 3), (safe_set.lower, 4), (safe_set.upper, 4), (safe_set.costs, 4))
    flat = [_flat(tensor.detach(), batch, own) for tensor, own in axes]
    if safe_set.lower.dtype != torch.float64:
        flat[1:3] = _admitting(flat[1], flat[2])
    compiled = backend == "compiled" or (backend == "auto" and rewards.device.type == "cpu" and fixed_iterations is None)
    if compiled:
        outputs = _solve_compiled(flat, layout, max_iterations)
    else:
        flat_rewards, lower, upper, costs = flat
        outputs = torch_simplex.solve(flat_rewards, lower, upper, costs, layout, max_iterations, fixed_iterations)
    if fixed_iterations is None and rewards.device.type != "meta" and (outputs[4] == INVALID).any():
        _raise_invalid(flat, layout)
    dtype = torch.promote_types(rewards.dtype, safe_set.costs.dtype)
    outputs = [output.reshape((*batch, *output.shape[1:])) for output in outputs]
    return OptimisticOptimum(*(output.to(dtype) if output.is_floating_point() else output for output in outputs))


def _flat(tensor: Tensor, batch: torch.Size, own: int) -> Tensor:
    """One batch axis, and float64 whatever the caller works in, because a basis needs it."""
    return tensor.expand(*batch, *tensor.shape[-own:]).reshape(batch.numel(), *tensor.shape[-own:]).double()


def _admitting(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Intervals from a coarser type, whose ends may miss a sum of one by its rounding, so that they hold a distribution again."""
    low, high = lower.sum(-1, keepdim=True), upper.sum(-1, keepdim=True)
    rounding = 1e-5
    lower = torch.where((low > 1) & (low < 1 + rounding), lower / low, lower)
    upper = torch.where((high < 1) & (high > 1 - rounding), upper / high, upper)
    return lower, torch.maximum(upper, lower)


@lru_cache(maxsize=256)
def _geometry(layout: Layout) -> tuple[np.ndarray, int]:
    return np.array(layout.widths, dtype=np.int64), int(layout.transition_mask().sum())


def _solve_compiled(flat: list[Tensor], layout: Layout, max_iterations: int) -> list[Tensor]:
    """The fields of an `OptimisticOptimum` with one batch axis."""
    from torchcmdp.optimistic.compiled import solve_range  # numba takes half a second to import: only those who solve wait

    widths, size = _geometry(layout)
    rewards, lower, upper, costs = (tensor.contiguous().numpy() for tensor in flat)
    batch, m = costs.shape[:2]
    occupancy, multipliers, answers = np.zeros(lower.shape), np.zeros((batch, m)), np.zeros((batch, 3))
    status, iterations = np.zeros(batch, np.int8), np.zeros(batch, np.int64)
    inputs = (widths, rewards, lower, upper, costs, max_iterations)
    over_batch(solve_range, batch, size, *inputs, occupancy, multipliers, answers, status, iterations)
    value, excess, residual = answers.T
    arrays = (value, occupancy, multipliers, excess, status, residual, iterations)
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]


def _raise_invalid(flat: list[Tensor], layout: Layout) -> None:
    """Say in one sentence which instance, layer, state and action cannot be solved, and why."""
    rewards, lower, upper, costs = flat
    real, pairs = layout.transition_mask(rewards.device), layout.pair_mask(rewards.device)
    for name, wrong, expected in (
        ("rewards", ~rewards.isfinite() & pairs, "finite numbers"),
        ("costs", (~costs.isfinite()).any(1) & pairs, "finite numbers"),
        ("lower or upper", ((~(lower >= 0) | ~(upper >= lower)) & real).any(-1), "0 <= lower <= upper"),
        ("lower", (lower.sum(-1) > 1 + 1e-9) & pairs, "lower ends that sum to at most one"),
        ("upper", (upper.sum(-1) < 1 - 1e-9) & pairs, "upper ends that sum to at least one"),
    ):
        if wrong.any():
            b, k, x, a = wrong.nonzero()[0].tolist()
            raise InvalidInput(f"{name} cannot be used at instance {b}, layer {k}, state {x}, action {a}; expected {expected}.")
