"""Share the instances of a batch among threads.

The kernels release the interpreter lock and take a range of instances, so plain Python threads do. Everybody, the calling thread
first, takes small pieces until none is left: on a busy machine a late helper finds nothing to do and nobody waits for it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from torchcmdp.errors import InvalidInput


@lru_cache(maxsize=1)
def available() -> int:
    """Threads to use at most: TORCHCMDP_THREADS if set, else the cores this process may run on, shared with torchrun's others."""
    asked = os.environ.get("TORCHCMDP_THREADS", "0")
    if not asked.isdecimal():
        raise InvalidInput(
            f"the environment variable TORCHCMDP_THREADS is {asked!r}; expected a number of threads, or 0 for all cores."
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(asked) or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


# Transitions that make it worth waking another thread: about a fifth of a millisecond of work.
WORTH_A_THREAD = 500


@lru_cache(maxsize=1)
def _pool(threads: int, pid: int) -> ThreadPoolExecutor:
    # keyed by the process, because threads do not survive a fork
    return ThreadPoolExecutor(threads, thread_name_prefix="torchcmdp-kernels")


def over_batch(kernel: Callable[..., None], batch: int, transitions: int, *arguments: object) -> None:
    """Call kernel(start, stop, *arguments) so that the ranges cover 0..batch, on at most `available()` threads.

    Args:
        batch: Number of instances.
        transitions: Number of transitions of one instance: the unit in which work is estimated.
    """
    threads = min(available(), batch, batch * transitions // WORTH_A_THREAD)
    if threads < 2:
        kernel(0, batch, *arguments)
        return
    piece = -(-batch // (3 * threads))
    starts = itertools.count(0, piece)  # next() of it is atomic

    def work() -> None:
        for start in starts:
            if start >= batch:
                return
            kernel(start, min(start + piece, batch), *arguments)

    pool = _pool(available(), os.getpid())
    helpers = [pool.submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        if not helper.cancel():
            helper.result()
