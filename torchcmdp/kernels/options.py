"""How the kernels of an episode are compiled.

Without fast mathematics a formula rounds the same wherever it is compiled into, so that a block of episodes and single calls agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, typeof

from torchcmdp.kernels.cpu import OPTIONS, _EntryCompiler, _InnerCompiler, _KernelCache

_EXACT = {**OPTIONS, "fastmath": False}


def formula(function: Callable[..., Any]) -> Any:
    """A function that is part of whoever calls it, before types are known: for short ones."""
    return njit(inline="always", **_EXACT)(function)


def kernel(function: Callable[..., Any]) -> Any:
    """A function that other kernels call."""
    return njit(pipeline_class=_InnerCompiler, no_cpython_wrapper=True, **_EXACT)(function)


def entry(function: Callable[..., Any]) -> Any:
    """A kernel that Python calls, compiled with all that it calls on its first call or loaded from the cache."""
    dispatcher = njit(pipeline_class=_EntryCompiler, **_EXACT)(function)
    dispatcher._cache = _KernelCache(function)
    return dispatcher


def outlined(function: Callable[..., Any]) -> Any:
    """A kernel that is called by its address.

    It is not compiled into its callers, which for one as large as the projection would take longer than all the rest of them.
    """
    dispatcher = njit(pipeline_class=_EntryCompiler, no_cpython_wrapper=True, **OPTIONS)(function)
    dispatcher._cache = _KernelCache(function)
    return dispatcher


def address_of(dispatcher: Any, *samples: Any) -> int:
    """Where the machine code of an `outlined` kernel for arguments like these lies."""
    signature = tuple(typeof(sample) for sample in samples)
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))
