"""The kernels on a GPU: what the compiler makes of them, which needs none, and how long they take, which does."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch

import torchcmdp as tc
from torchcmdp.kernels import cuda
from torchcmdp.kernels.projection import Limits, project_range
from torchcmdp.kernels.pull import pull_range
from torchcmdp.run.blocks import Blocks
from torchcmdp.run.session import Session

from ..program import Among, Count, Positive, Whole, bar, begin, publish, table
from . import BenchOptions, median_seconds
from .episode import play, session_of
from .projection import Size, capture

KERNELS = ("projection", "pull", "episode")
MISSING = 'numba-cuda is not installed, without which no kernel becomes code for a GPU: pip install "torchcmdp[cuda]".'
NO_GPU = "there is no GPU here that PyTorch and numba-cuda find, so that nothing can be timed; --static needs none."


@dataclass
class Options(BenchOptions):
    """What the compiler makes of the kernels of the projection, its derivative (pull) and an episode of WC-OPS, for several GPUs.

    With --static no GPU is needed: PTX by numba-cuda, machine code by ptxas where there is one, its registers, spills and sizes;
    what an instance loads, stores and calls is counted in numba's simulator. It takes some minutes. Without --static the kernels
    are timed on the GPU beside those of the CPU. Writes what it prints to LOGDIR/NAME/gpu.md.

    Examples:
      python -m train bench gpu --static
      python -m train bench gpu --static --kernels projection --architectures 80
      python -m train bench gpu --batches 1024 16384
    """

    static: bool = False  # Compile and count, and time nothing.
    kernels: Annotated[tuple[str, ...], Among(KERNELS)] = KERNELS  # Among projection, pull and episode.
    architectures: tuple[Count, ...] = (75, 80, 90)  # Compute capabilities: 80 is 8.0.
    widths: tuple[Count, ...] = (1, 4, 4, 4, 1)  # States of each layer.
    actions: Count = 3  # Actions of each state.
    constraints: Whole = 2  # How many.
    instances: Whole = 8  # That are counted in the simulator, and episodes; 0 leaves it out.
    batches: tuple[Count, ...] = (128, 1024, 8192, 65536)  # Instances, or runs, that are timed at once.
    seconds: Positive = 1.0  # Least time spent on repeating each measurement.


class Code(NamedTuple):
    """Of one kernel, with all functions that it calls: what a thread has, and bytes."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    parameters: int
    size: int


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark."""
    options, folder = begin(Options, arguments, "bench gpu")
    tc.Layout(options.widths, options.actions)  # refused here, and not after the other kernels have been compiled
    publish(folder / "gpu.md", _static(options) if options.static else _timed(options))


def session(options: Options, runs: int, device: str = "cpu") -> Session:
    """A run of WC-OPS that nobody logs."""
    cmdp = tc.random_cmdp(options.widths, options.actions, options.constraints, seed=options.seed).to(device)
    return session_of(cmdp, runs, options.seed)


def launched(name: str, options: Options, batch: int = 4) -> tuple[Any, tuple[Any, ...]]:
    """A kernel, and arguments like those that it is launched with."""
    if name == "episode":
        run = session(options, batch)
        blocks = Blocks(run.learner, run.env, run.tracker, run.diagnostics)
        packed, _, records = blocks.pack(1)
        return packed.face.play, blocks.gpu_arguments(packed, 1, records)
    layout = tc.Layout(options.widths, options.actions)
    entries, pairs = layout.transition_mask().numel(), layout.pair_mask().numel()
    sizes = ((entries,), (entries,), (entries,), (options.constraints, pairs))
    inputs = tuple(torch.zeros(batch, *size, dtype=torch.float64) for size in sizes)
    if name == "projection":
        return project_range, cuda.projection_arguments(layout, *inputs, Limits(1.0, 1e-11, 1))[0]
    duals = (layout.layers * layout.width, options.constraints, entries)
    return pull_range, cuda.pull_arguments(layout, (*inputs, *(inputs[0].new_zeros(batch, size) for size in duals)))[0]


def _static(options: Options) -> str:
    if importlib.util.find_spec("numba_cuda") is None:
        raise tc.InvalidInput(MISSING)
    if cuda.simulated():
        raise tc.InvalidInput("NUMBA_ENABLE_CUDASIM is set, and numba's simulator compiles nothing; unset it.")
    made, mixtures, notes = [], [], set[str]()
    pairs = [(name, one) for name in options.kernels for one in options.architectures]
    for name, architecture in bar(pairs, "compiling for GPUs", leave=False):
        kernel, arguments = launched(name, options)
        code = cuda.ptx(kernel, 4, arguments, divmod(architecture, 10))
        found = assembled(code, architecture, notes)
        cells = ["-"] * len(Code._fields) if found is None else [f"{number:,}" for number in found]
        made.append([name, f"sm_{architecture}", *cells])
        mixtures.append([name, f"sm_{architecture}", *(f"{number:,}" for number in mixture(code).values())])
    header = ["kernel", "GPU", *(field.replace("_", " ") for field in Code._fields)]
    text = "Machine code by ptxas: registers of a thread; bytes of the rest, in all functions of the kernel.\n\n"
    text += table(header, made, "machine code") + "".join(f"\n\n{note}" for note in sorted(notes))
    text += "\n\nInstructions of its PTX, as written down, not as often as they run.\n\n"
    text += table(["kernel", "GPU", *MIXTURE], mixtures, "PTX")
    if options.instances:
        text += f"\n\nWhat an instance does on average, and an episode, over {options.instances} of them in numba's simulator.\n\n"
        text += table(["kernel", *COUNTED], list(_counted(options)), "counted")
    return text


# What PTX consists of, by pattern of opcode; the first that fits.
MIXTURE = {
    "arithmetic": r"(add|sub|mul|fma|mad|neg|abs|min|max)\.(rn\.)?f64",
    "divisions, roots": r"(div|sqrt|rcp|rsqrt)\..*f64",
    "memory": r"(ld|st)\.(?!param)",
    "arguments": r"(ld|st)\.param",
    "addresses, integers": r"\w+\.(\w+\.)*[bsu]\d+$",
    "other": r"",
}


def mixture(code: str) -> dict[str, int]:
    """How many instructions of each kind PTX has."""
    found: Counter[str] = Counter()
    for opcode in re.findall(r"^\s+(?:@!?%\w+ +)?([a-z][a-z0-9]*(?:\.[a-z0-9:]+)*)[ ;\t]", code, re.MULTILINE):
        found[next(kind for kind, pattern in MIXTURE.items() if re.match(pattern, opcode))] += 1
    return {kind: found[kind] for kind in MIXTURE}


def assemblers() -> Iterator[str]:
    """Every ptxas at hand: of NVIDIA's wheels, which are as new as the compiler's, of the path, of CUDA_HOME."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from map(str, sorted(Path(folder).glob("*/bin/ptxas")))
    own = shutil.which("ptxas", path=str(Path(os.environ.get("CUDA_HOME", os.devnull)) / "bin"))
    yield from filter(None, (shutil.which("ptxas"), own))


def assembled(code: str, architecture: int, notes: set[str]) -> Code | None:
    """What ptxas makes of PTX; None without one that can, and then `notes` says why."""
    why = "ptxas is not at hand, which the wheel nvidia-cuda-nvcc and NVIDIA's toolkit have: no machine code."
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(code)
        for ptxas in assemblers():
            command = [ptxas, "-v", f"-arch=sm_{architecture}", str(source), "-o", str(result)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return told(done.stdout + done.stderr, code_size(result.read_bytes()))
            why = f"ptxas for sm_{architecture} says: {' '.join(done.stderr.split())[-160:]}"
    notes.add(why)
    return None


def told(report: str, size: int) -> Code:
    """What `ptxas -v` says of one kernel and its functions."""

    def numbers(pattern: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, report)]

    stores, loads = (numbers(rf"(\d+) bytes spill {what}") for what in ("stores", "loads"))
    stack = max([*numbers(r"(\d+) bytes cumulative stack"), *numbers(r"(\d+) bytes stack frame"), 0])
    rest = (max([*numbers(pattern), 0]) for pattern in (r"(\d+) bytes smem", r"(\d+) bytes cmem\[0\]"))
    return Code(max(numbers(r"Used (\d+) registers")), stack, sum(stores), sum(loads), *rest, size)


def code_size(cubin: bytes) -> int:
    """Bytes of instructions in machine code for a GPU, which is an ELF file of 64 bits."""
    table_at, each, count = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<HH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table_at + j * each) for j in range(count)]
    executable = 0x4
    return sum(size for _, _, flags, _, _, size in sections if flags & executable)


COUNTED = ("own loads", "own stores", "shared loads", "exp", "log", "sqrt")


def _counted(options: Options) -> Iterator[list[str]]:
    """`counts` in a process with numba's simulator."""
    command = [sys.executable, "-m", f"{__package__}.counts", json.dumps(vars(options))]
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    found = json.loads(subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout)
    for name in options.kernels:
        yield [name, *(f"{found[name].get(what, 0):,.0f}" for what in COUNTED)]


def _timed(options: Options) -> str:
    """Microseconds an instance, or a run and episode, on the GPU and on the CPU."""
    if importlib.util.find_spec("numba_cuda") is None:
        raise tc.InvalidInput(MISSING)
    if not torch.cuda.is_available() or cuda.simulated() or not cuda.usable():
        raise tc.InvalidInput(NO_GPU)
    rows = []
    for name, batch in bar([(name, batch) for name in options.kernels for batch in options.batches], "timing", leave=False):
        there, here = (_microseconds(name, batch, device, options) for device in ("cuda", "cpu"))
        rows.append([name, f"{batch:,}", f"{there:.3g}", f"{here:.3g}", f"{here / there:.1f}x"])
    text = f"Microseconds an instance, or a run and episode, on {torch.cuda.get_device_name()} and on this CPU.\n\n"
    return text + table(["kernel", "batch", "GPU", "CPU", "ratio"], rows)


def _microseconds(name: str, batch: int, device: str, options: Options) -> float:
    if name == "episode":
        run, least = session(options, batch, device), 20
        return 1e6 * median_seconds(lambda: play(run, "auto", least, 0.0), 3, options.seconds) / batch / least
    found = capture(Size(options.widths, options.actions, options.constraints), options.seed, min(batch, 1024))
    found = found.changed(lambda tensor: tensor.repeat(-(-batch // len(tensor)), *[1] * (tensor.dim() - 1))[:batch].to(device))
    target, loss = found.log_target.requires_grad_(name == "pull"), found.loss.to(device)

    def solve() -> None:
        result = tc.project(loss, None, found.safe_set, 1.0, log_reference=target)
        if name == "pull":
            torch.autograd.grad(result.occupancy.sum(), target)
        if device == "cuda":
            torch.cuda.synchronize()

    return 1e6 * median_seconds(solve, 3, options.seconds) / batch
