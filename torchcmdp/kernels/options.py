"""How the kernels of an episode are compiled."""

from __future__ import annotations

from numba import njit

OPTIONS = {"cache": True, "nogil": True, "error_model": "numpy"}
kernel = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)
entry = njit(no_cfunc_wrapper=True, **OPTIONS)
