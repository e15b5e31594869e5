"""Who plays: compiled code where it can, on the CPU or on a GPU, or torch alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from torchcmdp.errors import choice

ENGINES = ("auto", "compiled", "cuda", "torch")
VARIABLE = "TORCHCMDP_ENGINE"

_chosen: ContextVar[str | None] = ContextVar("engine", default=None)


def engine() -> str:
    """The engine in force: that of the `using` around it, else that of the environment variable, else "auto"."""
    return _chosen.get() or choice(f"the environment variable {VARIABLE}", os.environ.get(VARIABLE, "auto"), ENGINES)


def wants_gpu(device: torch.device) -> bool:
    """Whether the engine in force would have kernels on a GPU play what lies on this device."""
    return engine() == "cuda" or (engine() == "auto" and device.type == "cuda")


@contextmanager
def using(name: str | None) -> Iterator[None]:
    """Everything inside is played by this engine; None changes nothing."""
    if name is not None:
        choice("engine", name, ENGINES)
    token = _chosen.set(name or _chosen.get())
    try:
        yield
    finally:
        _chosen.reset(token)
