"""`python -m train bench NAME`: where the time goes, how it grows, and how we compare with other solvers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchcmdp.errors import InvalidInput

from ..program import hand_over, listing

PARTS = {
    "projection": "our projection against cvxpylayers (Moreau, DIFFCP) and Clarabel, same instances, same run",
    "program": "the optimistic linear program of OptCMDP, a whole batch at once, against HiGHS",
    "episode": "where an episode of WC-OPS spends its time, and the same run through cvxpylayers",
    "scale": "how its cost grows with the batch, the widths and the layers",
    "sizes": "FrozenLake and Taxi with successor lists, and how a projection grows with the lists",
    "env": "a step of our Gymnasium environments beside one of FrozenLake",
    "gpu": "the kernels on a GPU: what the compiler makes of them (--static), or how long they take",
    "fuzz": "random projections, degenerate ones among them, and how many go wrong",
    "imports": "what `import torchcmdp` takes beside `import torch`",
}


@dataclass
class BenchOptions:
    """What all benchmarks are asked."""

    seed: int = 0  # Of what is measured and of all random numbers.
    name: str = "bench"  # Folder of the results inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments.

    def check_sizes(self, *names: str) -> None:
        """Refuse sizes, options of these names, to which no growth can be fitted."""
        for name in names:
            if len(set(getattr(self, name))) < 3:
                raise InvalidInput(f"--{name} has fewer than three sizes; a fit to the larger half needs at least three.")


def main(arguments: Sequence[str]) -> int:
    """Hand over to one benchmark; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing("python -m train bench NAME [options]", PARTS))
        print("\nExample: python -m train bench projection --sizes paper --batches 10 128\nEach has --help.")
        return 0
    return hand_over(__package__, PARTS, arguments[0], arguments[1:], "a benchmark")


def median_seconds(work: Callable[[], object], least: int = 1, seconds: float = 0.0) -> float:
    """The median time of doing the work so many times, and for so many seconds, at least; after once that is not counted."""
    work()
    times: list[float] = []
    while sum(times) < seconds or len(times) < least:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
