"""Compile kernels for the CPU and share the instances of a batch among threads.

The kernels release the interpreter lock and take a range of instances, so plain Python threads do. Everybody, the calling thread
first, takes small pieces until none is left: on a busy machine a late helper finds nothing to do and nobody waits for it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache
from numba.core.compiler import Compiler

from torchcmdp.errors import InvalidInput

# No "nnan"/"ninf": -inf is a legal logarithm here.
FASTMATH = {"contract", "reassoc", "nsz"}


@lru_cache(maxsize=1)
def _stamp() -> str:
    """A digest of every kernel file: a kernel is compiled into its callers, so an edit of any file ages all."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _announce() -> None:
    print("compiling kernels, once: this takes some seconds", file=sys.stderr, flush=True)


class _KernelCache(FunctionCache):
    """Numba's cache on disk, with the stamp of all kernel files, and one line on stderr when something is not in it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = _stamp()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None:
            _announce()
        return found


class _Unlinked:
    """A code generator that neither optimises nor emits: for functions that only ever run inside another."""

    def __init__(self, codegen: Any) -> None:
        self._real = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _add_module(self, module: Any) -> None: ...

    def set_env(self, name: str, environment: Any) -> None: ...


class _InnerCompiler(Compiler):
    """Numba optimises a function again in every caller of its callers; this one leaves it to the outermost."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        library = self.state.targetctx.codegen().create_library(func.__qualname__)
        library._codegen = _Unlinked(library._codegen)
        library._optimize_final_module = lambda: None
        self.state.library = library
        return super().compile_extra(func)


OPTIONS = {"nogil": True, "fastmath": FASTMATH, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a kernel that other kernels call."""
    return njit(pipeline_class=_InnerCompiler, no_cpython_wrapper=True, **OPTIONS)(function)


def entry(function: Callable[..., Any]) -> Any:
    """Compile a kernel that Python calls, with all that it calls, on its first call, or load it from the cache."""
    dispatcher = njit(**OPTIONS)(function)
    dispatcher._cache = _KernelCache(function)
    return dispatcher


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
