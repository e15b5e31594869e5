"""When the costs have changed: Page's cumulative sum test, on both sides of every constraint."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torchcmdp.errors import number, positive
from torchcmdp.layout import Layout


@dataclass(frozen=True)
class Drift:
    """A test for costs that have changed, and how much of the past is kept when it rings.

    What the costs of an episode add up to beyond what the estimates said is summed up, less a slack, on both sides. The unit of
    `height` and `slack` is the noise of an episode, `noise * sqrt(L)`, so that they mean the same at every length of an episode.
    The defaults are 40 and 1/4 where L = 4. `python -m train study alarms` measures how often it rings for nothing.

    Attributes:
        height: The sum that rings, in units of the noise of an episode.
        slack: What an episode may surprise by for free, in the same unit.
        memory: How many samples every pair keeps at most when it rings.
        noise: The largest standard deviation of one cost: 1 for costs that are -1 or 1, less where they are known to be tamer.
    """

    height: float = 20.0
    slack: float = 0.125
    memory: float = 30.0
    noise: float = 1.0

    def __post_init__(self) -> None:
        for name in ("height", "memory", "noise"):
            positive(name, getattr(self, name))
        number("slack", self.slack, "a finite number that is not negative", lambda found: 0 <= found < math.inf)

    def unit(self, layout: Layout) -> float:
        """The noise of an episode: sqrt(L) costs, each with its own."""
        return self.noise * math.sqrt(layout.layers)

    def config(self) -> dict[str, Any]:
        """Everything that it was made with, ready for JSON."""
        return asdict(self)
