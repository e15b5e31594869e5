"""A run in memory: who plays, what was measured, and everything that a checkpoint holds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from torchcmdp import theory
from torchcmdp.distributed import Crew, join, run_axes
from torchcmdp.errors import InvalidInput
from torchcmdp.events import HALF_WIDTH, WALL_TIME
from torchcmdp.metrics import Tracker, mean_and_interval
from torchcmdp.protocols import Axes, EnvironmentLike, LearnerLike, TrackerLike, first_axes
from torchcmdp.run.result import RunResult
from torchcmdp.simulator import Simulator

DEFAULT_DELTA = 0.01

# Tags of a logging point, and under which name `TrackerLike.newest` has them; the second ones have a tag for each constraint.
TAGS = {
    "Regret/cumulative": "regret",
    "Violation/cumulative": "violation",
    "Violation/positive": "positive_violation",
    "Regret/alpha": "alpha_regret",
    "Metrics/EpRet": "episode_return",
    "Metrics/rho": "rho",
    "Metrics/alpha": "alpha",
}
TAGS_BY_CONSTRAINT = {
    "Violation/cumulative": "violation_by_constraint",
    "Violation/positive": "positive_violation_by_constraint",
    "Metrics/EpCost": "episode_cost",
}
BANDED = ("Regret/cumulative", "Regret/alpha", "Violation/cumulative", "Violation/positive", "Metrics/EpRet")
OVER_ROOT = {"Regret/cumulative": "Regret/over_sqrt_t", "Violation/cumulative": "Violation/over_sqrt_t"}


class Diagnostics:
    """Adds up a learner's diagnostics since the last logging point and over the run, and the episodes in which each was positive.

    Args:
        runs: How many runs report.
        device: Where the sums continue from a state.
    """

    def __init__(self, runs: int, device: torch.device | None = None) -> None:
        self.runs, self.device, self.window_episodes = runs, device, 0
        self.tags: list[str] = []
        self._sums = dict.fromkeys(("window", "total", "positive"), torch.zeros(0, runs, dtype=torch.float64))

    def add(self, diagnostics: Mapping[str, Tensor]) -> None:
        """Take in one episode's, `(runs,)` each; a tag that is missing counts as zero."""
        self.window_episodes += 1
        if not diagnostics:
            return
        device = next(iter(diagnostics.values())).device
        if new := [tag for tag in diagnostics if tag not in self.tags]:
            room = torch.zeros(len(new), self.runs, dtype=torch.float64, device=device)
            self._sums = {name: torch.cat([sums.to(device), room]) for name, sums in self._sums.items()}
            self.tags = [*self.tags, *new]
        zero = torch.zeros((), dtype=torch.float64, device=device)
        values = [diagnostics.get(tag, zero).detach().to(torch.float64).expand(self.runs) for tag in self.tags]
        now = torch.stack(values)
        terms = {"window": now, "total": now, "positive": now > 0}
        self._sums = {name: sums + terms[name] for name, sums in self._sums.items()}

    def close_window(self) -> dict[str, Tensor]:
        """By tag, means over the episodes since this was last called, `(runs,)` each."""
        means = self._by_tag("window", self.window_episodes)
        self._sums["window"], self.window_episodes = torch.zeros_like(self._sums["window"]), 0
        return means

    def means(self, episodes: int) -> dict[str, Tensor]:
        """By tag, means over `episodes` episodes, `(runs,)` each."""
        return self._by_tag("total", episodes)

    def counts(self) -> dict[str, Tensor]:
        """By tag, in how many episodes it was positive, `(runs,)` int64 each."""
        return {tag: sums.to(torch.int64) for tag, sums in self._by_tag("positive", 1).items()}

    def _by_tag(self, name: str, episodes: int) -> dict[str, Tensor]:
        return {tag: sums / max(episodes, 1) for tag, sums in zip(self.tags, self._sums[name], strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """The tags and the sums, `(tags x runs)` each."""
        return {"tags": self.tags, "window_episodes": self.window_episodes, **self._sums}

    def state_axes(self) -> Axes:
        """Where the runs are in each entry."""
        return {"tags": None, "window_episodes": None, **dict.fromkeys(self._sums, 1)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.tags, self.window_episodes = list(state["tags"]), int(state["window_episodes"])
        self._sums = {name: state[name].to(device=self.device) for name in self._sums}


@dataclass
class Session:
    """A learner and an environment in the middle of a run.

    Attributes:
        played: Episodes so far.
        seconds: Time spent playing them.
        rows: The logging points: means over all runs, of all processes.
        extras: Of each point, what is not the same in every repetition: when it was made, and how fast.

    Args:
        learner, env, episodes, log_every: As for `run`.
        crew: The processes that share the runs; `learner` and `env` have this one's.
        config: Everything that determines the numbers of all runs; that of `learner` and `env` by default.
    """

    learner: LearnerLike
    env: EnvironmentLike
    episodes: int
    log_every: int
    crew: Crew
    config: dict[str, Any] = field(default_factory=dict)
    played: int = 0
    seconds: float = 0.0
    rows: list[dict[str, float]] = field(default_factory=list)
    extras: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        learner, env = self.learner, self.env
        if not hasattr(learner, "policy") or not callable(getattr(learner, "update", None)):
            raise InvalidInput(f"the learner is a {type(learner).__name__}; it needs a `policy` and a method `update(trajectory)`.")
        # who has no tracker of its own is a simulator, or has all that one has
        self.tracker: TrackerLike = env.tracker() if hasattr(env, "tracker") else Tracker(cast(Simulator, env))
        self.diagnostics = Diagnostics(env.runs, env.device)
        self.resumable = hasattr(learner, "state_dict") and hasattr(learner, "load_state_dict")
        learners: dict[str, Any] = {"learner": learner} if self.resumable else {}
        self._parts = {**learners, "env": env, "tracker": self.tracker, "diagnostics": self.diagnostics}
        self.first_episode = int(env.episode)
        self.config = self.config or full_config(learner, env, self.episodes, self.log_every)
        self._lap = (time.monotonic(), 0)

    @property
    def due(self) -> bool:
        """Whether this episode is a logging point."""
        return self.played % self.log_every == 0 or self.completed

    @property
    def completed(self) -> bool:
        """Whether every episode was played."""
        return self.played == self.episodes

    @property
    def name(self) -> str:
        """What the learner is called."""
        return str(self.config["learner"]["name"])

    @property
    def last_point(self) -> int:
        """The episode of the last logging point, 0 before the first."""
        return int(self.rows[-1]["episode"]) if self.rows else 0

    def step(self) -> None:
        """One episode: play, measure, learn. Nothing here reads a tensor's value."""
        started = time.monotonic()
        policy = self.learner.policy
        trajectory = self.env.rollout(policy)
        self.tracker.update(policy, trajectory)
        self.learner.update(trajectory)
        self.diagnostics.add(getattr(self.learner, "diagnostics", dict)())
        self.played += 1
        self.seconds += time.monotonic() - started

    def record(self) -> tuple[dict[str, float], dict[str, float]]:
        """Close a logging point; returns its row and what else there is to say about it."""
        self.tracker.record(self.played)
        now = time.monotonic()
        speed = (self.played - self._lap[1]) / max(now - self._lap[0], 1e-9)
        self._lap = (now, self.played)
        self.rows.append(self._row())
        self.extras.append({"Time/episodes_per_second": speed, WALL_TIME: time.time()})
        return self.rows[-1], self.extras[-1]

    def _row(self) -> dict[str, float]:
        """Means over the runs of all processes, in the order of the runs, so that they do not depend on who played which."""
        point = self._point()
        values = self.crew.stack(torch.stack([value.to(torch.float64) for value in point.values()], dim=1)).cpu()
        means, halves = (x.tolist() for x in mean_and_interval(values))
        row: dict[str, float] = {"episode": float(self.played)}
        for tag, mean, half in zip(point, means, halves, strict=True):
            row[tag] = mean
            if tag in BANDED:
                row[tag + HALF_WIDTH] = half
            if tag in OVER_ROOT:
                row[OVER_ROOT[tag]] = mean / self.played**0.5
        for name, bound in self._bounds(torch.tensor([self.played], dtype=torch.float64)).items():
            row[f"Theory/{name}"] = float(bound[-1])
        return row

    def _point(self) -> dict[str, Tensor]:
        """By tag what is known by now, `(own runs,)` each, so that of a changing process the regrets are those of its past."""
        newest = self.tracker.newest()
        point = {tag: newest[name] for tag, name in TAGS.items()}
        for tag, name in TAGS_BY_CONSTRAINT.items():
            point.update({f"{tag}/{i}": cost for i, cost in enumerate(newest[name].unbind(-1))})
        return {**point, **self.diagnostics.close_window()}

    def state(self) -> dict[str, Any]:
        """All of it as plain data, with the axis of the runs in each entry: continuing from this is continuing."""
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {
            **{name: getattr(self, name) for name in ("first_episode", "played", "seconds", "rows", "extras")},
            **parts,
            "axes": {name: run_axes(part, parts[name]) for name, part in self._parts.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.first_episode, self.played, self.seconds = state["first_episode"], state["played"], state["seconds"]
        self.rows, self.extras = list(state["rows"]), list(state["extras"])
        self._lap = (time.monotonic(), self.played)

    def result(self) -> RunResult:
        """What all runs of all processes measured."""
        curves = self.tracker.curves()
        own: dict[str, Any] = {
            **{name: curve for name, curve in curves.items() if name in RunResult.__dataclass_fields__},
            "safe_value": curves["comparator_reward"][:, -1] / self.last_point,
            "best_value": curves["best_reward"][:, -1] / self.last_point,
            "diagnostics": self.diagnostics.means(self.played),
            "counts": self.diagnostics.counts(),
            "seconds": self.seconds,
        }
        episodes = torch.tensor([int(row["episode"]) for row in self.rows])
        return RunResult(
            **join(self.crew.tell(own), first_axes(own)),
            episodes=episodes,
            bounds=self._bounds(episodes.to(torch.float64)),
            config=self.config,
            completed=self.completed,
        )

    def _bounds(self, t: Tensor) -> dict[str, Tensor]:
        """The theorems' bounds and the trivial one at episodes `t`, for the learner's own horizon and delta where it has them."""
        layout, m = self.env.layout, self.env.constraints
        horizon = int(getattr(self.learner, "horizon", self.episodes))
        delta = float(getattr(self.learner, "delta", DEFAULT_DELTA))
        return {
            "regret": theory.regret_bound(layout, horizon, delta, t),
            "violation": theory.violation_bound(layout, m, horizon, delta, t),
            "positive_violation": theory.positive_violation_bound(layout, m, horizon, delta, t),
            "trivial": theory.trivial_bound(layout, t),
        }


def full_config(learner: LearnerLike, env: EnvironmentLike, episodes: int, log_every: int) -> dict[str, Any]:
    """Everything that determines the numbers of a run, as JSON holds it."""
    own: dict[str, Any] = getattr(learner, "config", dict)()
    name = getattr(learner, "name", None) or type(learner).__name__
    config = {"learner": {**own, "name": name}, "env": env.config(), "episodes": episodes, "log_every": log_every}
    return {key: _plain(value) for key, value in config.items()}


def _plain(value: Any) -> Any:
    """The value as JSON holds it."""
    if isinstance(value, Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
