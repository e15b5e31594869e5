"""How the kernels of an episode are compiled.

Without fast mathematics a formula rounds the same wherever it is compiled into, so that a block of episodes and single calls agree.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from numba import njit, typeof

from torchcmdp.kernels.cpu import OPTIONS, compiled, entry


def formula(function: Callable[..., Any]) -> Any:
    """A function that is part of whoever calls it, before types are known: for short ones."""
    return njit(inline="always", **{**OPTIONS, "fastmath": False})(function)


def kernel(function: Callable[..., Any]) -> Any:
    """A function that other kernels call."""
    return compiled(function, fastmath=False)


def exact_entry(function: Callable[..., Any]) -> Any:
    """A kernel that Python calls, compiled with all that it calls on its first call or loaded from the cache."""
    return entry(function, fastmath=False)


def entry_for(function: Callable[..., Any], **meanings: Any) -> Any:
    """An entry with this function's code, in which these global names mean something: the same loop for several learners."""
    name = "_".join([function.__name__.strip("_"), *(module.__name__.rpartition(".")[2] for module in meanings.values())])
    own = FunctionType(function.__code__, {**function.__globals__, **meanings}, name)
    own.__qualname__ = name  # which the cache goes by
    return exact_entry(own)


def outlined(function: Callable[..., Any]) -> Any:
    """A kernel that is called by its address.

    It is not compiled into its callers, which for one as large as the projection would take longer than all the rest of them.
    """
    return entry(function, no_cpython_wrapper=True)


def address_of(dispatcher: Any, *samples: Any) -> int:
    """Where the machine code of an `outlined` kernel for arguments like these lies."""
    signature = tuple(typeof(sample) for sample in samples)
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))
