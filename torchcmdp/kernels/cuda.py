"""The kernels on a GPU: compiled by numba-cuda from the very functions that `cpu` compiles, and launched one thread an instance.

A CPU kernel takes a range of instances, or of runs, and room for one. Here every thread calls it with a range of one, and with its
own slice of rooms whose last axis is over instances, so that the threads of a warp read neighbouring numbers.
"""

from __future__ import annotations

import dis
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from numba.core import config
from numba.core.dispatcher import Dispatcher
from torch import Tensor

from torchcmdp.kernels import (
    block,
    confidence,
    emptiness,
    linalg,
    newton,
    occupancy,
    opt_cmdp,
    opt_primal_dual,
    pairs,
    pdbps,
    program,
    projection,
    pull,
    quadratic,
    rollout,
    wcops,
)
from torchcmdp.kernels.exponentials import exponentials, one_by_one
from torchcmdp.kernels.geometry import Geometry, geometry_of
from torchcmdp.kernels.projection import Batch, Limits, project_one, project_range
from torchcmdp.kernels.pull import pull_range
from torchcmdp.kernels.solver import project_at
from torchcmdp.kernels.system import respond_range, solve_range
from torchcmdp.kernels.work import carve, memory
from torchcmdp.layout import Layout

# One warp a block: batches are small, and blocks are what spreads them over the processors.
THREADS = 32

# Functions that stay functions: numba-cuda puts everything into its caller, and then the projection alone takes eight minutes.
APART = {
    getattr(module, name).py_func
    for module, names in {
        linalg: ("prepare", "solve", "schur", "assemble_border"),
        projection: ("project_one", "solve", "recover"),
        emptiness: ("least_violation",),
        newton: ("newton", "cooled_newton", "newton_step", "rebalance", "search"),
        pairs: ("evaluate", "respond"),
        quadratic: ("quadratic",),
        pull: ("moves_back", "pull_one"),
        program: ("optimise_one",),
        confidence: ("confidence_row", "reach"),
        occupancy: ("policy_of_log", "policy_of_logits"),
        rollout: ("rollout",),
        block: ("measure", "move_on"),
        **dict.fromkeys((wcops, opt_cmdp, opt_primal_dual, pdbps), ("carry", "update")),
    }.items()
    for name in names
}


@lru_cache(maxsize=1)
def usable() -> bool:
    """Whether numba-cuda is installed and finds a GPU; numba's simulator passes for one."""
    if not simulated() and importlib.util.find_spec("numba_cuda") is None:
        return False
    from numba import cuda

    return bool(cuda.is_available())


def simulated() -> bool:
    """Whether this process has numba's simulator in place of a GPU, which works on CPU tensors."""
    return bool(config.ENABLE_CUDASIM)


def obstacle(device: torch.device) -> str:
    """What keeps these kernels from tensors on a device, as a clause; empty where nothing does."""
    if device.type != ("cpu" if simulated() else "cuda"):
        return f"kernels on a GPU take CUDA tensors, and these are on {device}"
    return "" if usable() else 'kernels on a GPU need numba-cuda (pip install "torchcmdp[cuda]") and a GPU that it finds'


class Own(NamedTuple):
    """An argument of which every thread takes its own part: a record of arrays whose last axis is over instances."""

    record: Any


def _room_at_hand(geometry, m, reals, codes):
    """In place of `carve`: `reals` are the records already."""
    return reals


def _project_directly(
    address, geometry, target, lower, upper, costs, limits, work, occupancy, log_occupancy, potentials, multipliers
):  # fmt: skip
    """In place of `project_at`: there are no addresses of the CPU's code."""
    return project_one(geometry, target, lower, upper, costs, limits, work, occupancy, log_occupancy, potentials, multipliers)


# What means nothing on a GPU, and what stands for it there.
SUBSTITUTES = {carve: _room_at_hand, project_at: _project_directly, exponentials: one_by_one}


def _translated(value: Any, names: tuple[str, ...]) -> Any:
    """What a kernel's global name means on a GPU; `names` are all that the kernel mentions."""
    if isinstance(value, Dispatcher) or value is project_at:
        return on_device(SUBSTITUTES.get(value) or value.py_func)
    if isinstance(value, types.ModuleType) and value.__name__.startswith(__package__):
        module = types.ModuleType(value.__name__)
        vars(module).update({name: _translated(found, names) for name, found in vars(value).items() if name in names})
        return module
    return value


@cache
def on_device(function: types.FunctionType) -> Any:
    """A device function with this function's code, in which kernels mean their device functions."""
    from numba import cuda

    names = function.__code__.co_names  # attributes among them, which may be called like a kernel
    used = {step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"}
    known = {name: _translated(value, names) for name, value in function.__globals__.items() if name in used}
    device_function = cuda.jit(device=True)(types.FunctionType(function.__code__, known, function.__name__))
    if function in APART and not simulated():
        device_function.compile_device = _apart(device_function.compile_device)
    return device_function


def _apart(compile_device: Callable[..., Any]) -> Callable[..., Any]:
    """The compilation of a device function, marked so that no caller takes it in; numba-cuda has no option for it."""

    def compile_apart(*arguments: Any, **options: Any) -> Any:
        result = compile_device(*arguments, **options)
        for module in result.library.modules:
            for function in module.functions:
                if function.name == result.fndesc.llvm_func_name and not function.is_declaration:
                    function.attributes.add("noinline")
        return result

    return compile_apart


def _classes(value: Any) -> dict[str, type]:
    """The named tuples in an argument, by their names."""
    found = {type(value).__name__: type(value)} if hasattr(value, "_fields") else {}
    for part in value if isinstance(value, tuple) else ():
        found |= _classes(part)
    return found


def _part(value: Any, name: str) -> str:
    """The expression for thread b's part of a record of arrays called `name`."""
    if not isinstance(value, tuple):
        return f"{name}[{':, ' * (len(value.shape) - 1)}b]" if hasattr(value, "shape") else name
    if hasattr(value, "_fields"):
        parts = (_part(part, f"{name}.{field}") for field, part in zip(value._fields, value, strict=True))
        return f"{type(value).__name__}({', '.join(parts)})"
    return f"({''.join(_part(part, f'{name}[{j}]') + ', ' for j, part in enumerate(value))})"


@cache
def _grid(kernel: Dispatcher, expressions: tuple[str, ...], classes: tuple[type, ...]) -> Any:
    """The GPU kernel that calls this one in every thread."""
    from numba import cuda

    source = f"def {kernel.__name__}_grid(batch, arguments):\n    b = cuda.grid(1)\n    if b < batch:\n"
    source += f"        kernel(b, b + 1, {', '.join(expressions)})\n"
    space = {"cuda": cuda, "kernel": on_device(kernel.py_func), **{one.__name__: one for one in classes}}
    exec(source, space)  # the shape of an argument is written out, since numba has no loops over tuples of different things
    return cuda.jit(space[f"{kernel.__name__}_grid"])


def grid_of(kernel: Dispatcher, arguments: tuple[Any, ...]) -> Any:
    """The GPU kernel that calls kernel(b, b + 1, *arguments) in thread b, with its own part of every `Own`."""
    expressions = tuple(
        _part(value.record, f"arguments[{j}].record") if isinstance(value, Own) else f"arguments[{j}]"
        for j, value in enumerate(arguments)
    )
    return _grid(kernel, expressions, tuple(_classes(arguments).values()))


def converted(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """A record with `leaf` applied to all that is no tuple."""
    if not isinstance(value, tuple):
        return leaf(value)
    parts = [converted(part, leaf) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _array(value: Any) -> Any:
    """A tensor's memory as numba knows it, without a copy; in the simulator numpy's."""
    from numba import cuda

    if not isinstance(value, Tensor):
        return value
    return value.numpy() if value.device.type == "cpu" else cuda.as_cuda_array(value.detach(), sync=False)


def launch(kernel: Dispatcher, batch: int, device: torch.device, *arguments: Any) -> None:
    """Call kernel(b, b + 1, *arguments) for every b below `batch` on torch's stream, with each thread's part of every `Own`.

    Args:
        kernel: An `entry` of the CPU.
        arguments: Numbers, contiguous tensors on `device`, and records of them.
    """
    from numba import cuda

    if batch == 0:
        return
    arguments = converted(arguments, _array)
    threads, grid = min(THREADS, batch), grid_of(kernel, arguments)
    if device.type == "cpu":
        grid[-(-batch // threads), threads](batch, arguments)
        return
    if not grid.overloads:
        print(f"compiling {kernel.__name__} for the GPU, which takes a minute or more", file=sys.stderr, flush=True)
    with torch.cuda.device(device), cuda.gpus[device.index or 0], warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Grid size")  # of a small batch, which is what it is
        stream = cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)
        grid[-(-batch // threads), threads, stream](batch, arguments)


def rooms(record: Any, batch: int, device: torch.device) -> Own:
    """Room for a batch like this room for one instance."""

    def room(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        return torch.empty((*value.shape, batch), dtype=torch.from_numpy(value).dtype, device=device)

    return Own(converted(record, room))


@lru_cache(maxsize=64)
def geometry_on(layout: Layout, device: torch.device) -> Geometry:
    """`geometry_of`, with its arrays as tensors on a device."""

    def moved(value: Any) -> Any:
        return torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value

    geometry: Geometry = converted(geometry_of(layout), moved)
    return geometry


def ptx(kernel: Dispatcher, batch: int, arguments: tuple[Any, ...], capability: tuple[int, int]) -> str:
    """The code for GPUs of this compute capability of launching a kernel with arguments like these; needs no GPU."""
    from numba import cuda, typeof
    from numba.cuda import dispatcher

    on_device.cache_clear()
    _grid.cache_clear()
    arguments = converted(arguments, _array)
    with patch.object(dispatcher, "get_current_device", lambda: types.SimpleNamespace(compute_capability=capability)):
        code, _ = cuda.compile_ptx(grid_of(kernel, arguments).py_func, (typeof(batch), typeof(arguments)), cc=capability)
    on_device.cache_clear()
    _grid.cache_clear()
    return str(code)


def _room(layout: Layout, m: int, batch: int, device: torch.device) -> tuple[Own, int]:
    """In place of `memory`: the records that `carve` makes of it, for a batch, and nothing."""
    geometry = geometry_of(layout)
    return rooms(carve.py_func(geometry, m, *memory(geometry, m)), batch, device), 0


def projection_arguments(
    layout: Layout, target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, limits: Limits
) -> tuple[tuple[Any, ...], Batch]:
    """What `launch` gives to `project_range`, and the outputs among it."""
    (batch, m), device = costs.shape[:2], target.device

    def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    outputs = Batch(
        zeros(*target.shape), torch.full_like(target, -torch.inf), zeros(batch, layout.layers * layout.width), zeros(batch, m),
        zeros(batch, dtype=torch.int8), zeros(batch), zeros(batch), zeros(batch, dtype=torch.int64),
    )  # fmt: skip
    inputs = (target, lower, upper, costs, limits, *_room(layout, m, batch, device))
    return (geometry_on(layout, device), *inputs, *outputs), outputs


def project_batch(layout: Layout, target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, limits: Limits) -> Batch:
    """`projection.project_batch` of contiguous float64 tensors on one device, whose fields are tensors there."""
    arguments, outputs = projection_arguments(layout, target, lower, upper, costs, limits)
    launch(project_range, len(target), target.device, *arguments)
    return outputs


def pull_arguments(layout: Layout, inputs: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """What `launch` gives to `pull_range`, and the outputs among it."""
    (batch, m), device = inputs[3].shape[:2], inputs[0].device
    outputs = tuple(torch.zeros_like(tensor) for tensor in inputs[:4])
    return (geometry_on(layout, device), *inputs, *_room(layout, m, batch, device), *outputs), outputs


def pull_batch(layout: Layout, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`pull.pull_batch` of contiguous float64 tensors on one device, which returns its outputs."""
    arguments, outputs = pull_arguments(layout, inputs)
    launch(pull_range, len(inputs[0]), inputs[0].device, *arguments)
    return outputs


def respond_batch(layout: Layout, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`system.respond_batch` of contiguous float64 tensors on one device, which returns its outputs there."""
    target, (batch, m, pairs) = inputs[0], inputs[3].shape
    by_pair = target.new_zeros(batch, pairs), target.new_zeros(batch, pairs)
    outputs = torch.zeros_like(target), torch.zeros_like(target, dtype=torch.int8), *by_pair
    room = _room(layout, m, batch, target.device)
    launch(respond_range, batch, target.device, geometry_on(layout, target.device), *inputs, *room, *outputs)
    return outputs


def solve_batch(layout: Layout, p: Tensor, code: Tensor, s: Tensor, columns: Tensor) -> None:
    """`system.solve_batch` of contiguous tensors on one device."""
    room = _room(layout, 0, len(p), p.device)
    launch(solve_range, len(p), p.device, geometry_on(layout, p.device), p, code, s, *room, columns)
