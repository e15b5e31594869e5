"""How the kernels of an episode are compiled.

Without fast mathematics a formula rounds the same wherever it is inlined, so that a block of episodes and single calls agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, typeof

from torchcmdp.kernels.cpu import _KernelCache

_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}

# A formula: part of whoever calls it, and never compiled on its own.
formula = njit(inline="always", **_OPTIONS)


def kernel(function: Callable[..., Any]) -> Any:
    """A function that other kernels call, compiled on its first call or loaded from the cache; Python cannot call it."""
    dispatcher = njit(no_cpython_wrapper=True, **_OPTIONS)(function)
    dispatcher._cache = _KernelCache(function)
    return dispatcher


def entry(function: Callable[..., Any]) -> Any:
    """A kernel that Python calls."""
    dispatcher = njit(**_OPTIONS)(function)
    dispatcher._cache = _KernelCache(function)
    return dispatcher


def address_of(dispatcher: Any, *samples: Any) -> int:
    """Where the machine code of a kernel for arguments like these lies.

    A kernel that is called by its address is not compiled into its callers, which for one as large as the projection would take
    longer than everything else together.
    """
    signature = tuple(typeof(sample) for sample in samples)
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))
