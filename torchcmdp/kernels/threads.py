"""Share the instances of a batch among threads.

The kernels release the interpreter lock and take a range of instances, so plain Python threads do. Everybody, the calling thread
first, takes small pieces until none is left: on a busy machine a late helper finds nothing to do and nobody waits for it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import lru_cache
from threading import Lock, Thread

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


# Transitions that make it worth waking another thread: less than a tenth of a millisecond of work.
WORTH_A_THREAD = 850


class _Helper:
    """A thread that sleeps until it is called; a `ThreadPoolExecutor` takes three times as long to wake one."""

    def __init__(self) -> None:
        self._called, self._done = Lock(), Lock()
        self._called.acquire()
        self._done.acquire()
        self._work: Callable[[], None] | None = None
        self._error: BaseException | None = None
        Thread(target=self._serve, name="torchcmdp-kernels", daemon=True).start()

    def call(self, work: Callable[[], None]) -> None:
        """Have it do this work."""
        self._work = work
        self._called.release()

    def join(self) -> BaseException | None:
        """Wait until it is done, unless it has not even begun; returns what it raised."""
        if not self._called.acquire(blocking=False):
            self._done.acquire()
        self._work, error, self._error = None, self._error, None
        return error

    def _serve(self) -> None:
        while self._called.acquire():
            try:
                self._work()
            except BaseException as error:  # noqa: BLE001
                self._error = error
            self._done.release()


class _Crew:
    """All helpers of a process, for one caller at a time."""

    def __init__(self, helpers: int) -> None:
        self.free = Lock()
        self.helpers = [_Helper() for _ in range(helpers)]


@lru_cache(maxsize=1)
def _crew(helpers: int, pid: int) -> _Crew:
    # keyed by the process, because threads do not survive a fork
    return _Crew(helpers)


def over_batch(kernel: Callable[..., None], batch: int, transitions: int, *arguments: object) -> None:
    """Call kernel(start, stop, *arguments) so that the ranges cover 0..batch, on at most `available()` threads.

    Args:
        batch: Number of instances.
        transitions: Number of transitions of one instance: the unit in which work is estimated.
    """
    threads = min(available(), batch, batch * transitions // WORTH_A_THREAD)
    crew = _crew(available() - 1, os.getpid()) if threads > 1 else None
    if crew is None or not crew.free.acquire(blocking=False):
        kernel(0, batch, *arguments)
        return
    piece = -(-batch // (3 * threads))
    starts = itertools.count(0, piece)  # next() of it is atomic

    def work() -> None:
        for start in starts:
            if start >= batch:
                return
            kernel(start, min(start + piece, batch), *arguments)

    helpers = crew.helpers[: threads - 1]
    try:
        for helper in helpers:
            helper.call(work)
        work()
    finally:
        errors = [error for helper in helpers if (error := helper.join()) is not None]
        crew.free.release()
    if errors:
        raise errors[0]
