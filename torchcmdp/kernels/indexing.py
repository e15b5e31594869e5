"""Indices of kernels count from the front, so that machine code need not ask of each whether it counts from the end.

Numba asks that at every access, which took a third of the time of a projection. It leaves the question out for unsigned numbers only,
and a loop whose counter is one is written badly in Python. A constant index, as in `first[-1]`, may count from the end.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.np import arrayobj

# How the names of functions begin that are defined here, kernels that these were written into among them.
KERNELS = "".join(f"{len(part)}{part}" for part in __package__.split("."))

_ask = arrayobj.fix_integer_index


def _from_the_front(context: Any, builder: Any, index_type: Any, index: Any, size: Any) -> Any:
    """In place of numba's `fix_integer_index`, for all that it compiles: outside of kernels nothing changes."""
    if isinstance(index, ir.Constant) or not index_type.signed or KERNELS not in builder.function.name:
        return _ask(context, builder, index_type, index, size)
    return context.cast(builder, index, index_type, types.intp)


arrayobj.fix_integer_index = _from_the_front
