"""`python -m train study [compare|alarms|safe]`: which learner to choose, false alarms, whether promises are kept."""

from __future__ import annotations

from collections.abc import Sequence

from ..program import Command, hand_to_part

STUDIES = {
    "compare": Command(
        f"{__package__}.compare", "learners with equal search effort on held-out instances (what `study` alone does)"
    ),
    "alarms": Command(f"{__package__}.alarms", "how often the drift test rings where nothing has changed"),
    "safe": Command(f"{__package__}.safe", "learners with a baseline on random instances: how many episodes were unsafe"),
}


def main(arguments: Sequence[str]) -> int:
    """Hand over to one of them; returns the exit code."""
    return hand_to_part(STUDIES, "compare", arguments, "study")
