"""Compile kernels for the CPU, once for all files, and say so."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from llvmlite.binding import Linkage
from numba import njit
from numba.core.caching import FunctionCache
from numba.core.compiler import Compiler

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


class _KernelCache(FunctionCache):  # type: ignore[misc]
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


class _InnerCompiler(Compiler):  # type: ignore[misc]
    """Numba optimises a function again in every caller of its callers; this one leaves it to the outermost."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        library = self.state.targetctx.codegen().create_library(func.__qualname__)
        library._codegen = _Unlinked(library._codegen)
        library._optimize_final_module = lambda: None
        self.state.library = library
        return super().compile_extra(func)


class _EntryCompiler(Compiler):  # type: ignore[misc]
    """Makes the functions that were linked in private to the entry: they lose the arguments and copies that nobody needs."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        library = self.state.targetctx.codegen().create_library(func.__qualname__)
        library.enable_object_caching()
        optimize = library._optimize_final_module

        def privately() -> None:
            for linked in library._final_module.functions:
                if not linked.is_declaration and linked.linkage == Linkage.linkonce_odr:
                    linked.linkage = Linkage.internal
            optimize()

        library._optimize_final_module = privately
        self.state.library = library
        return super().compile_extra(func)


OPTIONS = {"nogil": True, "fastmath": FASTMATH, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a kernel that other kernels call."""
    return njit(pipeline_class=_InnerCompiler, no_cpython_wrapper=True, **OPTIONS)(function)


def entry(function: Callable[..., Any]) -> Any:
    """Compile a kernel that Python calls, with all that it calls, on its first call, or load it from the cache."""
    dispatcher = njit(pipeline_class=_EntryCompiler, **OPTIONS)(function)
    dispatcher._cache = _KernelCache(function)
    return dispatcher
