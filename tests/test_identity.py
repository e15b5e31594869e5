"""What is recorded of learners and processes that have no `config()`, and what cannot be resumed for want of a `state_dict`."""

from __future__ import annotations

import json
import math
import random
import warnings
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hedge import RUNS, Hedge, Killed, assert_same, interrupt, kill, make_env
from torch import Tensor, nn

import torchcmdp as tc
from torchcmdp.errors import RunFolderError
from torchcmdp.identity import UNTOLD, config_of, untold
from torchcmdp.run import run
from torchcmdp.trajectory import Trajectory


class Constant:
    """A learner of somebody's own without `config()`; what it is given changes nothing, which is not for us to know."""

    def __init__(self, layout: tc.Layout, **settings: Any) -> None:
        self.policy = tc.uniform_policy(layout).expand(RUNS, *layout.pair_shape)
        vars(self).update(settings)

    def update(self, trajectory: Trajectory) -> None:
        pass


class Wave(tc.Process):
    """A process of somebody's own that changes, with neither `config()` nor a state."""

    def __init__(self, mean: Tensor, speed: float = 0.1) -> None:
        self.mean, self.speed, self.t = mean, speed, 0

    @property
    def values(self) -> Tensor:
        return self.mean * (1 + math.cos(self.speed * self.t)) / 2

    def advance(self, policy: Tensor) -> None:
        self.t += 1


class KeptWave(Wave):
    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t}

    def load_state_dict(self, state: Any) -> None:
        self.t = state["t"]


class Shade(tc.Bernoulli):
    """A process that inherits a `config()`, which does not know of the shade."""

    def __init__(self, mean: Tensor, shade: float, **options: Any) -> None:
        super().__init__(mean, **options)
        self.shade = shade


class Tilted(tc.WCOPS):
    """A learner that inherits a `config()`, which does not know of the tilt."""

    def __init__(self, *args: Any, tilt: float = 0.0, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.tilt = tilt


@dataclass
class Setting:
    size: int
    weight: Tensor


class Colour(Enum):
    RED = 1
    BLUE = 2


def numbers(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(2, 2)


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "float": (0.1, 0.2),
    "int": (1, 2),
    "bool": (True, False),
    "none": (None, 0),
    "str": ("a", "b"),
    "list": ([1, [2, 3]], [1, [2, 4]]),
    "tuple": ((1, 2), (1, 3)),
    "dict": ({"a": {"b": 1}}, {"a": {"b": 2}}),
    "set": ({1, 2}, {1, 3}),
    "bytes": (b"a", b"b"),
    "tensor": (torch.zeros(3), torch.tensor([0.0, 0.0, 1e-9])),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "dtype": (torch.float32, torch.float64),
    "array": (np.zeros(2), np.ones(2)),
    "scalar": (np.float64(0.1), np.float64(0.2)),
    "path": (Path("a"), Path("b")),
    "enum": (Colour.RED, Colour.BLUE),
    "record": (Setting(1, torch.zeros(1)), Setting(1, torch.ones(1))),
    "layout": (tc.Layout((1, 2, 1), 2), tc.Layout((1, 3, 1), 2)),
    "torch generator": (torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)),
    "numpy generator": (numbers(0), numbers(1)),
    "random": (random.Random(0), random.Random(1)),
    "network": (linear(0), linear(1)),
    "process": (tc.Fixed(torch.zeros(1, 1, 1)), tc.Fixed(torch.ones(1, 1, 1))),
}


def play(folder: Path | None, learner: Any = None, env: tc.Simulator | None = None, **options: Any) -> tc.RunResult:
    env = env or make_env()
    learner = learner or Hedge(env.layout)
    return run(learner, env, 6, folder, 2, progress=False, images=False, **options)


def with_rewards(process: tc.Process) -> tc.Simulator:
    env = make_env()
    return tc.Simulator(env.cmdp, process, env.costs, runs=RUNS)


@pytest.mark.filterwarnings("ignore:Constant has no state_dict")
@pytest.mark.parametrize("kind", DIFFERENT)
def test_a_learner_with_other_attributes_does_not_reuse_a_folder(tmp_path: Path, kind: str) -> None:
    one, other = DIFFERENT[kind]
    layout = make_env().layout
    first = play(tmp_path, Constant(layout, knob=one))
    assert_same(play(tmp_path, Constant(layout, knob=one)), first)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(RunFolderError, match=r"learner\.attributes\.knob.* = .*, and this one has .*--fresh"):
        play(tmp_path, Constant(layout, knob=other))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.filterwarnings("ignore:Constant has no state_dict")
@pytest.mark.parametrize(
    "value",
    [lambda t: t, print, object(), Wave, [1, lambda: 2], open(__file__), np.array([object()])],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_compared_is_not_reused(tmp_path: Path, value: Any) -> None:
    layout = make_env().layout
    play(tmp_path, Constant(layout, knob=value))
    with pytest.raises(
        RunFolderError, match=r"cannot be told, since learner\.attributes\.knob.* is a.*; write a method config\(\)"
    ) as caught:
        play(tmp_path, Constant(layout, knob=value))
    assert "another folder" in str(caught.value) and "\n" not in str(caught.value)
    assert play(tmp_path, Constant(layout, knob=value), fresh=True).completed


class Speaking(Constant):
    """Speaks for itself, whatever with."""

    def config(self) -> dict[str, Any]:
        return {"knob": self.knob}


@pytest.mark.filterwarnings("ignore:Speaking has no state_dict")
def test_what_a_config_says_is_compared_by_its_content_or_not_reused(tmp_path: Path) -> None:
    layout = make_env().layout
    for kind in ("tensor", "list", "record", "enum", "array"):
        one, other = DIFFERENT[kind]
        first = play(tmp_path / kind, Speaking(layout, knob=one))
        assert_same(play(tmp_path / kind, Speaking(layout, knob=one)), first)
        with pytest.raises(RunFolderError, match=r"learner\.knob.* = .*, and this one has .*--fresh"):
            play(tmp_path / kind, Speaking(layout, knob=other))
    play(tmp_path / "object", Speaking(layout, knob=object()))
    with pytest.raises(RunFolderError, match=r"cannot be told, since learner\.knob is a"):
        play(tmp_path / "object", Speaking(layout, knob=object()))


def test_a_class_attribute_and_slots_count() -> None:
    class Slotted:
        __slots__ = ("rate",)
        power = 2

        def __init__(self, rate: float) -> None:
            self.rate = rate

    assert config_of(Slotted(0.1)) == {"attributes": {"power": 2, "rate": 0.1}}


def test_what_holds_itself_is_not_followed_for_ever() -> None:
    thing = Constant(make_env().layout, knob=[])
    thing.knob.append(thing.knob)
    assert [name for name, _ in untold(config_of(thing))] == ["attributes.knob.0"]


@pytest.mark.parametrize("inside", [False, True])
def test_a_process_with_other_attributes_does_not_reuse_a_folder(tmp_path: Path, inside: bool) -> None:
    mean = make_env().cmdp.rewards

    def env(speed: float) -> tc.Simulator:
        wave = KeptWave(mean, speed)
        return with_rewards(tc.Recorder(wave, 3) if inside else wave)

    first = play(tmp_path, env=env(0.1))
    assert_same(play(tmp_path, env=env(0.1)), first)
    with pytest.raises(RunFolderError, match=r"env\.rewards\.(process\.)?attributes\.speed = 0\.1, and this one has 0\.2"):
        play(tmp_path, env=env(0.2))


def test_subclasses_that_inherit_config_are_told_apart(tmp_path: Path) -> None:
    env = make_env()

    def again(shade: float, tilt: float) -> tc.RunResult:
        return play(tmp_path, Tilted(env.layout, 2, 6, runs=RUNS, tilt=tilt), with_rewards(Shade(env.cmdp.rewards, shade)))

    assert_same(again(0.5, 0.0), again(0.5, 0.0))
    with pytest.raises(RunFolderError, match=r"env\.rewards\.attributes\.shade = 0\.5, and this one has 0\.7"):
        again(0.7, 0.0)
    with pytest.raises(RunFolderError, match=r"learner\.attributes\.tilt = 0\.0, and this one has 1\.0"):
        again(0.5, 1.0)


def test_our_own_classes_and_those_with_a_config_record_no_attributes() -> None:
    env = make_env()
    assert "attributes" not in json.dumps([env.config(), config_of(tc.WCOPS(env.layout, 2, 6)), config_of(Hedge(env.layout))])
    tilted = config_of(Tilted(env.layout, 2, 6, tilt=1.0))["attributes"]
    assert tilted["tilt"] == 1.0 and not {"layout", "_derived", "_last", "solver"} & set(tilted)
    assert UNTOLD not in json.dumps(tilted)


class Counting(nn.Module):
    """Its setting is its state as well, and it has no `config()`."""

    def __init__(self, layout: tc.Layout, at: int = 0) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.policy = tc.uniform_policy(layout).expand(RUNS, *layout.pair_shape)
        self.at = at

    def update(self, trajectory: Trajectory) -> None:
        self.count = self.count + 1
        if int(self.count) == 3 == self.at:
            interrupt()


def test_an_interrupted_learner_without_config_continues_in_memory(tmp_path: Path) -> None:
    env = make_env()
    learner = Counting(env.layout, at=3)
    assert not play(tmp_path, learner, env).completed
    assert play(tmp_path, learner, env).completed and int(learner.count) == 6
    with pytest.raises(RunFolderError, match=r"learner\.attributes\.at = 3"):
        play(tmp_path, Counting(env.layout))
    warm = Counting(env.layout, at=3)
    warm.count = warm.count + 1
    with pytest.raises(RunFolderError, match=r"learner\.attributes\.count = "):
        play(tmp_path, warm)


class Dying(Constant):
    def __init__(self, layout: tc.Layout) -> None:
        super().__init__(layout)
        self._left = 3

    def update(self, trajectory: Trajectory) -> None:
        self._left -= 1
        if not self._left:
            interrupt()


class DyingHedge(Hedge):
    def config(self) -> dict[str, object]:
        return {}


def lacking(kind: str) -> tuple[Any, tc.Simulator, str]:
    env = make_env()
    mean = env.cmdp.rewards
    hedge = DyingHedge(env.layout, at=3, action=interrupt)
    if kind == "learner":
        return Dying(env.layout), env, "Dying has no state_dict and load_state_dict"
    if kind == "process":
        return hedge, with_rewards(Wave(mean)), "Wave changes and has no state_dict and load_state_dict of its own"
    if kind == "recorded":
        return hedge, with_rewards(tc.Recorder(Wave(mean), 3)), "Wave changes and has no state_dict"
    if kind == "module":

        class Empty(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.policy, self.seen = tc.uniform_policy(env.layout).expand(RUNS, *env.layout.pair_shape), 0

            def update(self, trajectory: Trajectory) -> None:
                self.seen += 1
                if self.seen == 3:
                    interrupt()

        return Empty(), env, "Empty has nothing in its state_dict"

    class Faster(KeptWave):
        def advance(self, policy: Tensor) -> None:
            super().advance(policy)
            self.speed *= 1.1

    return hedge, with_rewards(Faster(mean)), "Faster changes and has no state_dict"


@pytest.mark.parametrize("kind", ["learner", "process", "recorded", "module", "inherited"])
def test_what_keeps_no_state_is_not_resumed_and_says_so_at_the_start(tmp_path: Path, kind: str) -> None:
    learner, env, sentence = lacking(kind)
    with pytest.warns(UserWarning, match=f"{sentence}.*once interrupted, the run in .* cannot be continued") as caught:
        assert not play(tmp_path, learner, env).completed
    assert len(caught) == 1
    learner, env, sentence = lacking(kind)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(RunFolderError, match=f"interrupted and cannot be continued, since {sentence}.*--fresh"):
        play(tmp_path, learner, env)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_finished_run_without_state_returns_its_result(tmp_path: Path) -> None:
    mean = make_env().cmdp.rewards
    with pytest.warns(UserWarning, match="Wave changes"):
        first = play(tmp_path, env=with_rewards(Wave(mean)))
    assert_same(play(tmp_path, env=with_rewards(Wave(mean))), first)


def test_a_process_that_keeps_its_state_resumes_bit_for_bit_and_without_a_word(tmp_path: Path) -> None:
    mean = make_env().cmdp.rewards
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = play(tmp_path / "whole", env=with_rewards(KeptWave(mean)))
        with pytest.raises(Killed):
            learner = DyingHedge(make_env().layout, at=4, action=kill)
            play(tmp_path / "killed", learner, with_rewards(KeptWave(mean)), checkpoint_every=0)
        assert_same(play(tmp_path / "killed", DyingHedge(make_env().layout), with_rewards(KeptWave(mean))), whole)
        play(None, Constant(make_env().layout))  # nobody wants to resume what has no folder
        play(tmp_path / "stationary", env=with_rewards(tc.Fixed(mean)))
