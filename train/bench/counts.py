"""Run by `bench gpu` in numba's CUDA simulator: what kernels load, store and call, as JSON on standard output."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from torchcmdp.kernels import cuda
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.projection import Limits, project_range
from torchcmdp.kernels.pull import pull_range
from torchcmdp.projection import Newton

from .gpu import launched
from .projection import Size, capture

counted: Counter[str] = Counter()


class Counted(np.ndarray):
    """An array that counts what is read from it and written to it, a number at a time."""

    whose = "own"

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if not isinstance(found, np.ndarray):
            counted[f"{self.whose} loads"] += 1
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        counted[f"{self.whose} stores"] += 1
        super().__setitem__(index, value)


class Shared(Counted):
    """One that all threads read at the same place."""

    whose = "shared"


def watched(value: Any, kind: type[Counted] = Counted) -> Any:
    """Arguments of a launch with arrays that count."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return value.view(kind)
    if not isinstance(value, tuple):
        return value
    parts = [watched(part, Shared if isinstance(part, Geometry) else kind) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def launch(kernel: Any, batch: int, arguments: tuple[Any, ...], instances: int) -> dict[str, float]:
    """What a launch did, by instance."""
    counted.clear()
    arguments = watched(arguments)
    cuda.grid_of(kernel, arguments)[1, batch](batch, arguments)
    return {what: number / instances for what, number in counted.items()}


def counting(name: str) -> Any:
    """A function of `math` that counts its calls."""
    function = getattr(math, name)

    def call(x: float) -> float:
        counted[name] += 1
        return float(function(x))

    return call


def main() -> None:
    """Count for the options that are the first argument."""
    options: Any = SimpleNamespace(**json.loads(sys.argv[1]))
    options.widths = tuple(options.widths)
    found, many = {}, options.instances
    instances = capture(Size(options.widths, options.actions, options.constraints), options.seed, many)
    inputs = [tensor.flatten(2 if j == 3 else 1).contiguous() for j, tensor in enumerate(instances.tensors)]
    layout, usual = instances.safe_set.layout, Newton()
    plays, played = launched("episode", options, 1)
    for name in ("exp", "log", "sqrt"):
        setattr(math, name, counting(name))
    limits = Limits(usual.multiplier_cap, usual.tolerance, usual.max_iterations)
    arguments, outputs = cuda.projection_arguments(layout, *inputs, limits)
    found["projection"] = launch(project_range, many, arguments, many)
    duals = (outputs.potentials, outputs.multipliers, torch.ones_like(inputs[0]))
    found["pull"] = launch(pull_range, many, cuda.pull_arguments(layout, (*inputs, *duals))[0], many)
    found["episode"] = launch(plays, 1, (many, *played[1:]), many)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
