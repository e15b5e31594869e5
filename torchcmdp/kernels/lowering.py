"""Two detours that numba's machine code takes and that of kernels does not: from the end of an array, and to `exp` and `log`.

An index of numba may count from the end, so that it asks at every access for its sign, which took a third of the time of a
projection. It leaves the question out for unsigned numbers only, and a loop whose counter is one is written badly in Python.
Indices of kernels count from the front; a constant one, as in `first[-1]`, may count from the end.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from llvmlite import binding, ir
from numba.core import types
from numba.np import arrayobj

# How the names of functions begin that are defined here, kernels that these were written into among them.
KERNELS = "".join(f"{len(part)}{part}" for part in __package__.split("."))
# What kernels call most. Numba's build goes through wrappers that set errno, as old programs expect; the C library has it without.
DIRECT = ("exp", "log", "log1p")

_ask = arrayobj.fix_integer_index


def _from_the_front(context: Any, builder: Any, index_type: Any, index: Any, size: Any) -> Any:
    """In place of numba's `fix_integer_index`, for all that it compiles: outside of kernels nothing changes."""
    if isinstance(index, ir.Constant) or not index_type.signed or KERNELS not in builder.function.name:
        return _ask(context, builder, index_type, index, size)
    return context.cast(builder, index, index_type, types.intp)


arrayobj.fix_integer_index = _from_the_front
if sys.platform == "linux":
    for _name in DIRECT:
        binding.add_symbol(_name, ctypes.cast(getattr(ctypes.CDLL("libm.so.6"), _name), ctypes.c_void_p).value)
