"""The safe occupancy set: its shapes checked at the door, its intervals mended in one place, no value read on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, first
from torchcmdp.layout import Layout, broadcast_shapes, check_layout

# Ends of intervals that miss a distribution by less than this are rounding, of numbers that were float32 once.
ROUNDING = 1e-5
# A float64 row may miss it by this much and is solved as it is.
HAIR = 1e-9


@dataclass(frozen=True, eq=False)
class SafeSet:
    """Occupancies q with lower * q(x,a) <= q(x,a,y) <= upper * q(x,a), conserved flow, and <costs_i, q> <= 0 for every i.

    Attributes:
        layout: Layer widths and actions.
        lower, upper: Transition intervals, `(... x L x S x A x K)`; zero in the padding. Where rounding has left no distribution
            between them, solvers see them moved until one fits.
        costs: (Optimistic) costs of the m safety constraints, `(... x m x L x S x A)`; zero in the padding.
        batch: The batch shape that the three broadcast to.
    """

    layout: Layout
    lower: Tensor
    upper: Tensor
    costs: Tensor
    batch: torch.Size = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_layout(self.layout)
        for name, kind in (("lower", "transition"), ("upper", "transition"), ("costs", "constraint")):
            self.layout.check_shape(name, getattr(self, name), kind=kind)
        if not self.lower.device == self.upper.device == self.costs.device:
            devices = ", ".join(str(tensor.device) for tensor in (self.lower, self.upper, self.costs))
            raise InvalidInput(f"lower, upper and costs are on {devices}; all three must be on one device.")
        object.__setattr__(self, "batch", self._broadcast())

    @property
    def constraints(self) -> int:
        """m, the number of safety constraints."""
        return self.costs.shape[-4]

    def batch_with(self, name: str, batch: torch.Size) -> torch.Size:
        """The batch shape that the set has together with a tensor of that name and batch shape."""
        return batch if batch == self.batch else self._broadcast(**{name: batch})

    def _broadcast(self, **others: torch.Size) -> torch.Size:
        shapes = {**others, "lower": self.lower.shape[:-4], "upper": self.upper.shape[:-4], "costs": self.costs.shape[:-4]}
        try:
            common: torch.Size = broadcast_shapes(*shapes.values())
            return common
        except RuntimeError:
            listed = ", ".join(f"{key} {tuple(shape)}" for key, shape in shapes.items())
            raise InvalidInput(f"the batch shapes {listed} do not broadcast.") from None

    def flat(self, batch: torch.Size, *, mended: bool = True) -> list[Tensor]:
        """Lower and upper, mended, and costs, in float64 with the one batch axis that `batch` flattens to.

        A solver that refuses what needs mending may ask for float64 ends as they are first.
        """
        exact = not mended and self.lower.dtype == self.upper.dtype == torch.float64
        ends = (self.lower, self.upper) if exact else _mended(self.lower, self.upper)
        return [flattened(tensor, batch, 4) for tensor in (*ends, self.costs)]


def flattened(tensor: Tensor, batch: torch.Size, own: int) -> Tensor:
    """One batch axis before its `own` last ones, and float64 whatever the caller works in, because the duals need it."""
    if len(batch) != 1 or tensor.dim() != own + 1 or tensor.shape[0] != batch[0]:
        tensor = tensor.expand(*batch, *tensor.shape[-own:]).reshape(batch.numel(), *tensor.shape[-own:])
    return tensor if tensor.dtype == torch.float64 else tensor.double()


def _mended(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """The intervals, scaled or closed where only rounding keeps a distribution out; all others unchanged to the bit."""
    hair_below, hair_above = (HAIR if bound.dtype == torch.float64 else 0.0 for bound in (lower, upper))
    lower, upper = lower.double(), upper.double()
    least, most = lower.detach().sum(-1, keepdim=True), upper.detach().sum(-1, keepdim=True)
    over, under = (least > 1 + hair_below) & (least < 1 + ROUNDING), (most < 1 - hair_above) & (most > 1 - ROUNDING)
    lower, upper = lower / torch.where(over, least, 1.0), upper / torch.where(under, most, 1.0)
    return lower, torch.where((lower > upper) & (lower - upper < ROUNDING), lower, upper)


def faults(layout: Layout, lower: Tensor, upper: Tensor, costs: Tensor) -> list[tuple[str, Tensor, str]]:
    """What no solver can use of a flat set: a name, at which pairs `(B x L x S x A)` bool, and what was expected."""
    real, pairs = layout.transition_mask(costs.device), layout.pair_mask(costs.device)
    return [
        ("costs", (~costs.isfinite()).any(1) & pairs, "finite numbers"),
        ("lower or upper", ((~(lower >= 0) | ~(upper >= lower)) & real).any(-1), "0 <= lower <= upper"),
        ("lower", (lower.sum(-1) > 1 + 1e-9) & pairs, "lower ends that sum to at most one"),
        ("upper", (upper.sum(-1) < 1 - 1e-9) & pairs, "upper ends that sum to at least one"),
    ]


def refuse(found: list[tuple[str, Tensor, str]], *, certain: bool = False) -> None:
    """Say in one sentence which instance, layer, state and action cannot be solved, and why; nothing where all can.

    Args:
        found: As `faults` gives them.
        certain: A solver has met a fault already, so that there is something to refuse.
    """
    for name, wrong, expected in found:
        if place := first(wrong):
            b, k, x, a = place
            raise InvalidInput(f"{name} cannot be used at instance {b}, layer {k}, state {x}, action {a}; expected {expected}.")
    if certain:
        raise InvalidInput("an instance cannot be solved: its intervals or costs are not valid numbers.")
