"""`python -m train study [compare|alarms|safe]`: which learner to choose, false alarms, whether promises are kept."""

from __future__ import annotations

from functools import partial

from ..program import hand_to_part

PARTS = {
    "compare": "learners with equal search effort on held-out instances (what `study` alone does)",
    "alarms": "how often the drift test rings where nothing has changed",
    "safe": "learners with a baseline on random instances: how many episodes were unsafe",
}

main = partial(hand_to_part, __package__, PARTS, "compare")
