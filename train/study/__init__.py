"""`python -m train study [compare|alarms|safe]`: which learner to choose, false alarms, whether promises are kept."""

from __future__ import annotations

from collections.abc import Sequence

from ..program import Command, hand_over

STUDIES = {
    "compare": Command(
        f"{__package__}.compare", "learners with equal search effort on held-out instances (what `study` alone does)"
    ),
    "alarms": Command(f"{__package__}.alarms", "how often the drift test rings where nothing has changed"),
    "safe": Command(f"{__package__}.safe", "learners with a baseline on random instances: how many episodes were unsafe"),
}


def main(arguments: Sequence[str]) -> int:
    """Hand over to one of them; returns the exit code."""
    rest = list(arguments)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "compare"
    return hand_over(STUDIES, name, rest, "a part of python -m train study")
