"""Share the instances of a batch among threads.

The kernels release the interpreter lock and take a range of instances, so plain Python threads do. They pull small pieces from a queue:
on a busy machine a slow thread then takes fewer pieces instead of holding up the rest, and small batches never leave the calling thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

# Threads at most; the environment variable is for people who share a machine.
THREADS = int(os.environ.get("TORCHCMDP_THREADS", 0)) or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

# Below this many transitions in all, starting a thread costs more than it saves.
WORTH_A_THREAD = 20_000


@lru_cache(maxsize=1)
def _pool(threads: int, pid: int) -> ThreadPoolExecutor:
    # keyed by the process, because threads do not survive a fork
    return ThreadPoolExecutor(threads, thread_name_prefix="torchcmdp-projection")


def over_batch(kernel: Callable[..., None], batch: int, transitions: int, *arguments: object) -> None:
    """Call kernel(start, stop, *arguments) so that the ranges cover 0..batch, on at most THREADS threads.

    Args:
        batch: Number of instances.
        transitions: Number of transitions of one instance: the unit in which work is estimated.
    """
    threads = min(THREADS, batch, batch * transitions // WORTH_A_THREAD)
    if threads < 2:
        kernel(0, batch, *arguments)
        return
    piece = max(1, -(-batch // (4 * threads)))
    pool = _pool(THREADS, os.getpid())
    pieces = [pool.submit(kernel, start, min(start + piece, batch), *arguments) for start in range(0, batch, piece)]
    for future in pieces:
        future.result()
