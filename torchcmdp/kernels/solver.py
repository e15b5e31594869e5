"""The projection called by its address, from kernels that it is not compiled into."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from torchcmdp.kernels.geometry import geometry_of
from torchcmdp.kernels.options import address_of, outlined
from torchcmdp.kernels.projection import Limits, project_one
from torchcmdp.kernels.work import workspace
from torchcmdp.layout import Layout

_RESULT = types.Tuple((types.int64, types.int64, types.float64, types.float64))


@intrinsic
def project_at(
    typing_context: Any, address: Any, geometry: Any, target: Any, lower: Any, upper: Any, costs: Any, limits: Any, work: Any,
    occupancy: Any, log_occupancy: Any, potentials: Any, multipliers: Any,
) -> Any:  # fmt: skip
    """`project` at the address that `projection_address` gave."""
    inputs = (geometry, target, lower, upper, costs, limits, work, occupancy, log_occupancy, potentials, multipliers)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        convention = context.call_conv
        pointer = convention.get_function_type(_RESULT, inputs).as_pointer()
        callee = builder.inttoptr(arguments[0], pointer)
        status, result = convention.call_function(builder, callee, _RESULT, inputs, arguments[1:])
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return result

    return _RESULT(types.int64, *inputs), generate


@outlined
def project(geometry, target, lower, upper, costs, limits, work, occupancy, log_occupancy, potentials, multipliers):
    """`project_one`."""
    return project_one(
        geometry, target, lower, upper, costs, limits, work, occupancy, log_occupancy, potentials, multipliers
    )  # fmt: skip


@lru_cache(maxsize=1)
def projection_address() -> int:
    """Where the compiled `project` lies; compiles it, or loads it from the cache."""
    geometry = geometry_of(Layout((1, 1), 1))
    vector, costs = np.zeros(1), np.zeros((1, 1))
    work = workspace(geometry, 1)
    samples = (geometry, vector, vector, vector, costs, Limits(1.0, 1e-11, 1), work, vector, vector, vector, vector)
    return address_of(project, *samples)
