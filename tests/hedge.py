"""A small learner for tests of the loop, runs of it, and how to read what they leave behind."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import IMAGES, SCALARS, TENSORS, EventAccumulator
from torch import Tensor, nn

from torchcmdp.events import shown
from torchcmdp.instances import random_cmdp
from torchcmdp.processes import Bernoulli
from torchcmdp.run import RunResult, run
from torchcmdp.simulator import Simulator
from torchcmdp.trajectory import Trajectory

RUNS = 3
CURVES = (
    "regret",
    "anytime_regret",
    "alpha_regret",
    "violation",
    "positive_violation",
    "unsafe_share",
    "violation_by_constraint",
    "positive_violation_by_constraint",
    "rho",
    "alpha",
    "safe_value",
    "best_value",
)


class Killed(Exception):
    """Stands for a process that dies."""


class Hedge(nn.Module):
    """A learner whose policy depends on everything it has seen, with diagnostics; raises or signals at a chosen episode."""

    name = "Hedge"

    def __init__(self, layout, rate=0.1, at=None, action=None):
        super().__init__()
        self.layout, self.rate, self.at, self.action = layout, rate, at, action
        self.register_buffer("scores", torch.zeros(RUNS, *layout.pair_shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @property
    def policy(self) -> Tensor:
        return self.scores.softmax(-1) * self.layout.pair_mask()

    def update(self, trajectory: Trajectory) -> None:
        if self.action is not None and int(self.count) + 1 == self.at:
            self.action()
        runs, layers = trajectory.states.shape
        index = (torch.arange(runs)[:, None], torch.arange(layers), trajectory.states, trajectory.actions)
        self.scores = self.scores.index_put(index, self.rate * trajectory.rewards, accumulate=True)
        self.count = self.count + 1

    def diagnostics(self) -> dict[str, Tensor]:
        parity = (self.count % 2).to(torch.float64).expand(RUNS)
        return {"Solver/iterations": self.count.to(torch.float64).expand(RUNS), "Solver/elastic": parity}

    def config(self) -> dict[str, object]:
        return {"rate": self.rate}


def make_env(seed: int = 0) -> Simulator:
    cmdp = random_cmdp((1, 2, 3, 1), 2, 2, seed=1)
    return Simulator(cmdp, Bernoulli(cmdp.rewards), Bernoulli(cmdp.costs, low=-1), runs=RUNS, seed=seed)


def play(logdir=None, *, episodes=20, log_every=4, env=None, at=None, action=None, rate=0.1, **options) -> RunResult:
    env = env or make_env()
    return run(Hedge(env.cmdp.layout, rate, at, action), env, episodes, logdir, log_every, progress=False, images=False, **options)


def kill() -> None:
    raise Killed


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def table(folder) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def assert_same(one: RunResult, two: RunResult) -> None:
    assert one.episodes.tolist() == two.episodes.tolist()
    for name in CURVES:
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    for tag, value in one.diagnostics.items():
        assert torch.equal(value, two.diagnostics[tag]), tag
        assert torch.equal(one.counts[tag], two.counts[tag]), tag


def equal(one: object, two: object) -> bool:
    """Whether two states are the same to the last bit."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    return torch.equal(one, two) if isinstance(one, Tensor) and isinstance(two, Tensor) else one == two


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All curves as TensorBoard shows them, but for the speed, which is not the same twice."""
    events = read(folder)
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("Time/")]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def read(folder) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0, TENSORS: 0, IMAGES: 0})
    events.Reload()
    return events


def steps(events: EventAccumulator, tag: str) -> list[int]:
    return [event.step for event in events.Scalars(shown(tag))]
