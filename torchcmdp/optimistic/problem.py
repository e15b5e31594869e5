"""What the optimistic linear program is asked and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from torchcmdp.layout import Layout
from torchcmdp.safe_set import faults
from torchcmdp.solver import Solver


@dataclass(frozen=True, eq=False)
class OptimisticOptimum:
    """The best occupancy of every instance of a batch over all plausible kernels, with a certificate.

    Attributes:
        value: <rewards, q>, `(...)`.
        occupancy: q(x,a,y), `(... x L x S x A x K)`: a mixture of at most m + 1 deterministic policies, each with the kernel that
            suits it best.
        multipliers: Of the safety constraints, `(... x m)`.
        excess: The least s with <costs_i, q> <= s for some q of the set and all i, and zero where a safe q exists, `(...)`.
        status: A `Status`, `(...)` int8: where it is infeasible, no q is safe and the value is the best at excess + 1e-7; invalid
            only with fixed iterations, where bad numbers cannot be refused.
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


class ProgramSolver(Solver[OptimisticOptimum]):
    """Maximises <objective, q>, `(... x L x S x A)`, over a safe set; anybody's may be given to `optimistic_optimum`."""


def program_faults(layout: Layout, rewards: Tensor, lower: Tensor, upper: Tensor, costs: Tensor) -> list[tuple[str, Tensor, str]]:
    """Where a flat program cannot be solved, as in `safe_set.faults`."""
    wrong = ~rewards.isfinite() & layout.pair_mask(rewards.device)
    return [("rewards", wrong, "finite numbers"), *faults(layout, lower, upper, costs)]
