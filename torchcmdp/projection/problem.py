"""What is projected and what comes back: the safe occupancy set and the result record that every solver fills in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput
from torchcmdp.layout import Layout

# Invalid is only ever seen in fixed-iteration mode, which cannot look at its input to refuse it.
SOLVED, ELASTIC, MAX_ITERATIONS, INVALID = 0, 1, 2, 3
STATUS_NAMES = ("solved", "elastic", "max_iterations", "invalid")

# Safety multipliers never exceed this; where the safe set is empty it is the exact penalty per unit of violation.
DEFAULT_CAP = 200.0

# ln of the smallest reference entry that a solver is shown; a zero reference is read as this.
LOG_FLOOR = -700.0


@dataclass(frozen=True, eq=False)
class SafeSet:
    """Occupancies q with lower * q(x,a) <= q(x,a,y) <= upper * q(x,a), conserved flow, and <costs_i, q> <= 0 for every i.

    Attributes:
        layout: Layer widths and actions.
        lower, upper: Transition intervals, `(... x L x S x A x S)`; zero in the padding.
        costs: (Optimistic) costs of the m safety constraints, `(... x m x L x S x A)`; zero in the padding.
    """

    layout: Layout
    lower: Tensor
    upper: Tensor
    costs: Tensor

    def __post_init__(self) -> None:
        self.layout.check_shape("lower", self.lower, kind="transition")
        self.layout.check_shape("upper", self.upper, kind="transition")
        self.layout.check_shape("costs", self.costs, kind="pair")
        if self.costs.dim() < 4:
            raise InvalidInput(
                f"costs has shape {tuple(self.costs.shape)}; it needs a constraint axis before (L x S x A), of size 0 when "
                "there are no constraints."
            )

    @property
    def constraints(self) -> int:
        """m, the number of safety constraints."""
        return self.costs.shape[-4]

    @property
    def batch_shape(self) -> torch.Size:
        """The broadcast shape of everything before the named axes."""
        return torch.broadcast_shapes(self.lower.shape[:-4], self.upper.shape[:-4], self.costs.shape[:-4])


@dataclass(frozen=True, eq=False)
class ProjectionResult:
    """The KL projection of a batch of targets, with one certificate an instance.

    Attributes:
        occupancy: q, `(... x L x S x A x S)`, differentiable in the inputs.
        log_occupancy: ln q, accurate where q underflows; -inf in the padding and where q is zero.
        potentials: Flow multipliers v(x), `(... x L x S)`.
        multipliers: Safety multipliers in [0, cap], `(... x m)`; eta times the paper's.
        status: `(...)` int8: 0 solved, 1 elastic (a multiplier is at its cap: the set is empty or nearly so), 2 max_iterations,
            3 invalid (NaN or an impossible interval, in fixed-iteration mode; otherwise that is an error).
        residual: Largest violation of flow, intervals and (where not elastic) safety, `(...)`.
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
        return [STATUS_NAMES[code] for code in self.status.flatten().tolist()]
