"""How a run is logged and kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from torchcmdp.errors import InvalidInput, brief, check_kind, choice, number, switch, warn, whole_number
from torchcmdp.kernels.engine import ENGINES

POINTS = 200
MOST_POINTS = 10_000
MOST_EPISODES = 2**32


class RunKeywords(TypedDict, total=False):
    """The keyword arguments of `run` and `run_split` that are options: see `RunOptions`."""

    progress: bool
    fresh: bool
    checkpoint_every: float
    checkpoint_episodes: int | None
    images: bool
    engine: str | None
    on_progress: Callable[[int], object] | None


@dataclass(frozen=True)
class RunOptions:
    """How a run is logged and kept.

    Attributes:
        log_every: Episodes between logging points; about 200 points by default, and never more than 10,000: of a smaller number
            the least that gives no more is taken, with a warning. The last episode is always a point.
        progress: Show a progress bar.
        fresh: Forget what the folder holds and start over.
        checkpoint_every: Seconds between checkpoints.
        checkpoint_episodes: Episodes between checkpoints, besides those that the time asks for; none by default.
        images: Put the final figures in TensorBoard's Images tab.
        engine: Who plays: "compiled" code, where learner, simulator and processes are this library's and on the CPU in float64;
            "cuda", the same code on a GPU; "torch" alone; or "auto", compiled code where it can. By default what the environment
            variable TORCHCMDP_ENGINE says, and "auto" where it says nothing. The numbers agree up to rounding.
        on_progress: Called with how many episodes were played since its last call, about ten times a second.
    """

    log_every: int | None = None
    progress: bool = True
    fresh: bool = False
    checkpoint_every: float = 30.0
    checkpoint_episodes: int | None = None
    images: bool = True
    engine: str | None = None
    on_progress: Callable[[int], object] | None = None

    def __post_init__(self) -> None:
        for name in ("log_every", "checkpoint_episodes"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), least=1)
        for name in ("progress", "fresh", "images"):
            switch(name, getattr(self, name))
        number("checkpoint_every", self.checkpoint_every, "a number of seconds that is not negative", lambda found: found >= 0)
        if self.engine is not None:
            choice("engine", self.engine, ENGINES)
        check_kind("on_progress", self.on_progress, Callable | None, "a function of a number of episodes, or None")

    def spacing(self, episodes: int) -> int:
        """How many episodes lie between the logging points of a run of so many."""
        if whole_number("episodes", episodes, least=1) > MOST_EPISODES:
            raise InvalidInput(
                f"episodes is {brief(episodes)}; a run has at most {MOST_EPISODES:,}, and then no more random numbers."
            )
        if self.log_every is None:
            return max(1, int(episodes) // POINTS)
        least = math.ceil(int(episodes) / MOST_POINTS)
        if int(self.log_every) < least:
            points = int(episodes) // int(self.log_every)
            warn(
                f"log_every is {self.log_every}, which would make {points:,} logging points; every {least} episodes are logged "
                f"instead, so that there are at most {MOST_POINTS:,}."
            )
        return max(int(self.log_every), least)
