"""How a solver ended with an instance: one word, and one sentence on what it means and what to do about it."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class Status(IntEnum):
    """The end of one instance, of the projection or of the optimistic program; results hold its integer.

    Attributes:
        advice: What it means, and what to do next.
    """

    advice: str

    def __new__(cls, code: int, advice: str) -> Status:  # noqa: D102
        member = int.__new__(cls, code)
        member._value_, member.advice = code, advice
        return member

    SOLVED = 0, "The answer is the optimum up to the solver's tolerance; nothing needs doing."
    ELASTIC = (
        1,
        (
            "No occupancy is safe, and this one trades its largest violation for loss at the price of multiplier_cap; loosen the "
            "costs or widen the intervals if that is not what you want."
        ),
    )
    MAX_ITERATIONS = (
        2,
        (
            "The solver gave up and the answer is its last point; look at its residual, raise max_iterations, or ask for less "
            "accuracy of a badly scaled instance."
        ),
    )
    INVALID = (
        3,
        (
            "A number is NaN or infinite, or an interval holds no distribution; fixed_iterations cannot refuse what it does not "
            "read, so solve once without it to be told which number it is."
        ),
    )
    INFEASIBLE = (
        4,
        (
            "No occupancy of the set is safe, and this one has the least violation, which is its excess; loosen the costs or widen "
            "the intervals if that is not what you want."
        ),
    )


def shares(status: Tensor, *kinds: Status, dtype: torch.dtype) -> dict[str, Tensor]:
    """One where an instance ended in that way and zero elsewhere, by the tag under which a learner reports it."""
    return {f"Solver/{kind.name.lower()}": (status == kind).to(dtype) for kind in kinds}


# For compiled functions, which know no enumeration.
SOLVED, ELASTIC, MAX_ITERATIONS, INVALID, INFEASIBLE = (int(status) for status in Status)
