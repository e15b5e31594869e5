"""What is installed here: versions, devices, solvers, compiled kernels, and whether a GPU would be used."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import torchcmdp as tc
from torchcmdp.kernels import cuda
from torchcmdp.kernels.threads import available

from .program import IN_A_CLONE, parse, spoken, table

PACKAGES = (
    *("torchcmdp", "torch", "numpy", "scipy", "numba", "cvxpy", "cvxpylayers", "tensorboard", "matplotlib", "tyro"),
    *("moreau", "gymnasium", "torchrl", "numba-cuda"),
)
# What is missing without a package that is no requirement.
OPTIONAL = {
    "moreau": 'solver="cvxpy" uses DIFFCP',
    "gymnasium": "no Gymnasium environments: pip install torchcmdp[gym]",
    "torchrl": "no TorchRL environments: pip install torchcmdp[torchrl]",
    "numba-cuda": "no kernels on a GPU: pip install torchcmdp[cuda]",
}
KERNELS = ("kernels", "optimistic")


@dataclass
class Options:
    """Print what a report of a problem should say: versions, devices, solvers, where compiled kernels are kept.

    Examples:
      python -m train doctor
      python -m train doctor --json
    """


def main(arguments: Sequence[str]) -> int:
    """Look around; returns the exit code: 1 if the projection does not work here."""
    parse(Options, arguments, prog=f"{IN_A_CLONE} doctor")
    rows = [*_versions(), *_devices(), *_solvers(), *_cache()]
    print(table(["what", "here", "remark"], rows))
    return 0 if not any("FAILS" in row[1] for row in rows) else 1


def _versions() -> Iterator[list[str]]:
    yield ["Python", platform.python_version(), platform.platform()]
    for name in PACKAGES:
        try:
            yield [name, metadata.version(name), ""]
        except metadata.PackageNotFoundError:
            here = tc.__version__ if name == "torchcmdp" else "not installed"
            yield [name, here, "from a folder, not installed" if name == "torchcmdp" else OPTIONAL.get(name, "needed")]


def _devices() -> Iterator[list[str]]:
    threads = f"torch {torch.get_num_threads()}, kernels {available()}"
    yield ["CPU", platform.machine(), f"{os.cpu_count()} cores; threads here: {threads}"]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for j in range(count):
        memory = torch.cuda.get_device_properties(j).total_memory / 2**30
        yield [f"cuda:{j}", torch.cuda.get_device_name(j), f"{memory:.3g} GiB"]
    told = "used with --device cuda, by default the CPU is" if count else "PyTorch finds none; everything runs on the CPU"
    yield ["GPU", "yes" if count else "no", told]
    why = cuda.obstacle(torch.device("cuda")) if count else "there is no GPU that PyTorch finds"
    told = f"{why}; the CPU has its own" if not count else f"{why}; torch does it" if why else "they project, and play episodes"
    yield ["kernels on a GPU", "not used" if why else "used", told]


def _solvers() -> Iterator[list[str]]:
    cmdp = tc.two_path_cmdp()
    problem = tc.SafeSet(cmdp.layout, cmdp.transitions, cmdp.transitions, cmdp.costs)
    found = tc.project(1 - cmdp.rewards, tc.uniform_occupancy(cmdp.layout), problem, 0.5, solver=tc.Newton(backend="torch"))
    works = float(found.gap.abs().max()) < 1e-8
    yield ["newton", "works" if works else "FAILS", f"our own; duality gap {float(found.gap.abs().max()):.0e} on a small problem"]
    import cvxpy

    installed = [name for name in cvxpy.installed_solvers() if name in ("CLARABEL", "SCS", "MOREAU", "HIGHS")]
    yield ["cvxpy", ", ".join(installed) or "none", 'behind solver="cvxpy", which checks the other']


def _cache() -> Iterator[list[str]]:
    """Where numba keeps what it compiled: beside the files, or where NUMBA_CACHE_DIR says, or else in the user's own cache."""
    package = Path(tc.__file__).parent
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    beside = [package / room / "__pycache__" for room in KERNELS]
    own = Path.home() / ".cache" / "numba"
    places = [Path(chosen)] if chosen else [*beside, own]
    found = [file for place in places for file in place.rglob("*.nbc")]
    kept = [file for file in found if chosen or own not in file.parents or "torchcmdp" in str(file)]
    size = sum(file.stat().st_size for file in kept) / 2**20
    where = str(Path(chosen)) if chosen else str(beside[0]) if os.access(package / KERNELS[0], os.W_OK) else str(own)
    remark = "compiled on their first use, which takes about a minute and is said" if not kept else f"{size:.1f} MiB"
    yield ["compiled kernels", f"{len(kept)} kept", f"{remark}; in {where}"]
    yield ["engine", os.environ.get("TORCHCMDP_ENGINE", "auto"), spoken("who plays episodes: compiled code where it can")]
