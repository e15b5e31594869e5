"""What the optimistic linear program is asked and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

SOLVED, INFEASIBLE, MAX_ITERATIONS, INVALID = 0, 1, 2, 3

# Where no occupancy is safe, the constraints are relaxed to their least violation and this much more.
RELAXATION = 1e-7
# A violation of this size is rounding.
FEASIBILITY = 1e-10
# A pivot is worth making when it promises more than this, plus the rounding of multipliers of this relative size.
IMPROVEMENT, ROUNDING = 1e-11, 1e-14
# Entries of a direction below this cannot be pivots.
SMALLEST_PIVOT = 1e-11


@dataclass(frozen=True, eq=False)
class OptimisticOptimum:
    """The best occupancy of every instance of a batch over all plausible kernels, with a certificate.

    Attributes:
        value: <rewards, q>, `(...)`.
        occupancy: q(x,a,y), `(... x L x S x A x S)`: a mixture of at most m + 1 deterministic policies, each with the kernel that
            suits it best.
        multipliers: Of the safety constraints, `(... x m)`.
        excess: The least s with <costs_i, q> <= s for some q of the set and all i, and zero where a safe q exists, `(...)`.
        status: `(...)` int8: 0 solved, 1 infeasible (no q is safe: the value is the best at excess + 1e-7), 2 max_iterations,
            3 invalid (NaN or an impossible interval; only seen in fixed-iteration mode, otherwise an error).
        residual: What the certificate leaves open, `(...)`: the value is within this of the best.
        iterations: Policies that were tried, `(...)` int64.
    """

    value: Tensor
    occupancy: Tensor
    multipliers: Tensor
    excess: Tensor
    status: Tensor
    residual: Tensor
    iterations: Tensor
