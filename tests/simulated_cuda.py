"""Run by `test_kernels_cuda.py` in numba's CUDA simulator: project the instances of a file, play episodes, keep what comes out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts import parts

import torchcmdp as tc
from torchcmdp.kernels import cuda
from torchcmdp.kernels.engine import using
from torchcmdp.kernels.projection import Limits
from torchcmdp.layout import Layout
from torchcmdp.run.session import Session
from train.bench.fuzz import derivatives_disagree

EPISODES = 5
PARTS = ("learner", "env", "tracker", "diagnostics")


def after_episodes(engine: str, learner: str, process: str) -> dict[str, Any]:
    """The state of everything after a few episodes, of which all but the first are one block."""
    session = Session(*parts(learner, process), EPISODES, EPISODES, tc.distributed.Crew(3, alone=True))
    with using(engine):
        session.advance(1)
        session._pace = EPISODES - 1
        assert session.advance(EPISODES - 1) == EPISODES - 1
    return {name: session.state()[name] for name in PARTS}


def projected(given: Any, most: int) -> dict[str, torch.Tensor]:
    layout = Layout(tuple(given["widths"].tolist()), int(given["actions"]))
    inputs = [torch.from_numpy(given[name]) for name in ("target", "lower", "upper", "costs")]
    found = cuda.project_batch(layout, *inputs, Limits(200.0, 1e-11, most))
    pulled = cuda.pull_batch(layout, (*inputs, found.potentials, found.multipliers, torch.from_numpy(given["grad"])))
    answered = cuda.respond_batch(layout, (*inputs, found.potentials, found.multipliers))
    columns = torch.from_numpy(given["columns"].copy())
    cuda.solve_batch(layout, answered[0], answered[1], answered[3], columns)
    parts = {"pulled": pulled, "answered": (*answered, columns)}
    return {**found._asdict(), **{f"{name} {j}": tensor for name, part in parts.items() for j, tensor in enumerate(part)}}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    assert cuda.usable()
    given, games = np.load(folder / "in.npz"), json.loads(sys.argv[2])
    torch.save(
        {
            "disagreeing": derivatives_disagree(3, 20, "cuda"),
            "projected": {most: projected(given, most) for most in (500, 1)},
            "played": {tuple(game): after_episodes("cuda", *game) for game in games},
        },
        folder / "out.pt",
    )
