"""Learners of somebody's own with attributes that change beside their state: named, and not resumed unless they come back."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hedge import RUNS, Hedge, assert_same, interrupt, make_env
from torch import nn

import torchcmdp as tc
from torchcmdp.errors import RunFolderError
from torchcmdp.run import run
from torchcmdp.trajectory import Trajectory


def play(folder: Path, learner: Any, env: tc.Simulator | None = None) -> tc.RunResult:
    return run(learner, env or make_env(), 6, folder, 2, progress=False, images=False)


class Restless(Hedge):
    """A module with buffers, and beside them something that changes, which its state may or may not bring back."""

    def __init__(self, layout: tc.Layout, kind: str, at: int = 0) -> None:
        super().__init__(layout, at=at or None, action=interrupt)
        self.kind, self.noise, self.first = kind, torch.rand(RUNS, generator=torch.Generator().manual_seed(1)), None
        self.weight = nn.Parameter(torch.zeros(2))
        things: dict[str, Any] = {
            "number": 0.0, "tensor": torch.zeros(2), "list": [], "numpy": np.random.default_rng(0), "random": random.Random(0),
            "generator": torch.Generator().manual_seed(0), "optimiser": torch.optim.SGD([self.weight], lr=0.1, momentum=0.9),
        }  # fmt: skip
        self.thing: Any = things.get(kind)

    def update(self, trajectory: Trajectory) -> None:
        super().update(trajectory)
        match self.kind:
            case "list":
                self.thing.append(1)
            case "numpy" | "random":
                self.thing.random()
            case "generator":
                torch.rand(1, generator=self.thing)
            case "optimiser":
                self.weight.sum().backward()
                self.thing.step()
            case "number" | "tensor":
                self.thing = self.thing + 0.1

    def config(self) -> dict[str, object]:
        return {"kind": self.kind}


@pytest.mark.parametrize("kind", ["number", "tensor", "list", "numpy", "random", "generator", "optimiser"])
def test_an_attribute_that_changes_beside_the_state_is_named_and_not_resumed(tmp_path: Path, kind: str) -> None:
    env = make_env()
    sentence = (
        r"Restless\.thing changes and is not in the state_dict; register it as a buffer, or the run in .* cannot be continued"
    )
    with pytest.warns(UserWarning, match=sentence) as caught:
        assert not play(tmp_path, Restless(env.layout, kind, at=3), env).completed
    assert len(caught) == 1
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(
        RunFolderError, match=r"Restless\.thing changed while it was played, and load_state_dict does not bring it back"
    ):
        play(tmp_path, Restless(env.layout, kind))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


class Mindful(Restless):
    """Writes its own state, and computes something from it again."""

    config = Restless.config

    def update(self, trajectory: Trajectory) -> None:
        super().update(trajectory)
        self.first = self.thing * 2

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {**super().state_dict(*args, **options), "thing": self.thing}

    def load_state_dict(self, state: Any, *args: Any, **options: Any) -> None:  # type: ignore[override]
        super().load_state_dict({name: value for name, value in state.items() if name != "thing"})
        self.thing = state["thing"]
        self.first = self.thing * 2


def test_what_comes_back_with_the_state_resumes_bit_for_bit_and_without_a_word(tmp_path: Path) -> None:
    layout = make_env().layout
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind, learner in (("tensor", Mindful), ("still", Restless)):
            whole = play(tmp_path / f"whole {kind}", learner(layout, kind))
            assert not play(tmp_path / kind, learner(layout, kind, at=3)).completed
            resumed = play(tmp_path / kind, learner(layout, kind))
            assert_same(resumed, whole)


def test_a_finished_run_with_an_attribute_that_changes_returns_its_result(tmp_path: Path) -> None:
    layout = make_env().layout
    first = play(tmp_path, Restless(layout, "number"))
    assert_same(play(tmp_path, Restless(layout, "number")), first)
