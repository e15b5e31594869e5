"""What comes back from a projection: the result record that every solver fills in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcmdp.layout import Layout
from torchcmdp.solver import Solver
from torchcmdp.status import Status

# Safety multipliers never exceed this; where the safe set is empty it is the exact penalty per unit of violation.
DEFAULT_CAP = 200.0

# ln of the smallest reference entry that a solver is shown; a zero reference is read as this.
LOG_FLOOR = -700.0


@dataclass(frozen=True, eq=False)
class ProjectionResult:
    """The KL projection of a batch of targets, with one certificate an instance.

    Attributes:
        occupancy: q, `(... x L x S x A x K)`, differentiable in the inputs.
        log_occupancy: ln q, accurate where q underflows; -inf in the padding and where q is zero.
        potentials: Flow multipliers v(x), `(... x L x S)`.
        multipliers: Safety multipliers, `(... x m)`; eta times the paper's. Where the set is empty they share the multiplier_cap,
            each in the unit of its constraint (see `Newton`).
        status: A `Status`, `(...)` int8; invalid only with fixed iterations, where bad numbers cannot be refused.
        residual: Largest violation of flow, intervals and (where not elastic) safety in each constraint's unit, `(...)`.
        gap: Duality gap of the elastic problem, `(...)`: an upper bound on the suboptimality of `occupancy`.
        iterations: Iterations spent, `(...)` int64; -1 where the solver does not say.
    """

    occupancy: Tensor
    log_occupancy: Tensor
    potentials: Tensor
    multipliers: Tensor
    status: Tensor
    residual: Tensor
    gap: Tensor
    iterations: Tensor

    @property
    def status_names(self) -> list[str]:
        """The status of each instance in words, in flattened batch order."""
        return [Status(code).name.lower() for code in self.status.flatten().tolist()]  # type: ignore[call-arg]


class ProjectionSolver(Solver[ProjectionResult]):
    """Projects exp(objective), `(... x L x S x A x K)`, onto a safe set in KL divergence; anybody's may be given to `project`."""


def target_fault(target: Tensor, layout: Layout) -> tuple[str, Tensor, str]:
    """Where a flat target cannot be used, as in `safe_set.faults`."""
    wrong = (~(target < torch.inf) & layout.transition_mask(target.device)).any(-1)
    return "loss, reference or eta", wrong, "numbers (a zero reference is allowed, NaN and +inf are not)"
