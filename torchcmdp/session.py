"""A run in memory: who plays, what was measured, and everything that a checkpoint holds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchcmdp import theory
from torchcmdp.distributed import Crew, on_host
from torchcmdp.metrics import Tracker, mean_and_interval
from torchcmdp.result import RunResult, joined
from torchcmdp.tensorboard import HALF_WIDTH, WALL_TIME

DEFAULT_DELTA = 0.01
BANDED = ("Regret/cumulative", "Regret/alpha", "Violation/cumulative", "Violation/positive", "Metrics/EpRet")
OVER_ROOT = {"Regret/cumulative": "Regret/over_sqrt_t", "Violation/cumulative": "Violation/over_sqrt_t"}


class Tally:
    """Adds up a learner's diagnostics since the last logging point and over the run, and the episodes in which each was positive.

    Args:
        runs: How many runs report.
    """

    def __init__(self, runs: int) -> None:
        self.runs, self.window_episodes = runs, 0
        self.tags: list[str] = []
        self._window = self._total = self._positive = torch.zeros(0, runs, dtype=torch.float64)

    def add(self, diagnostics: Mapping[str, Tensor]) -> None:
        """Take in one episode's, `(runs,)` each; a tag that is missing counts as zero."""
        self.window_episodes += 1
        if not diagnostics:
            return
        like = next(iter(diagnostics.values()))
        self._make_room([tag for tag in diagnostics if tag not in self.tags], like.device)
        zero = torch.zeros((), dtype=torch.float64, device=like.device)
        values = [diagnostics.get(tag, zero).detach().to(torch.float64).expand(self.runs) for tag in self.tags]
        now = torch.stack(values)
        self._window, self._total, self._positive = self._window + now, self._total + now, self._positive + (now > 0)

    def _make_room(self, tags: list[str], device: torch.device) -> None:
        if tags:
            room = torch.zeros(len(tags), self.runs, dtype=torch.float64, device=device)
            grown = [torch.cat([sums.to(device), room]) for sums in (self._window, self._total, self._positive)]
            self._window, self._total, self._positive = grown
            self.tags = [*self.tags, *tags]

    def close_window(self) -> dict[str, Tensor]:
        """By tag, means over the episodes since this was last called, `(runs,)` each."""
        means = {tag: sums / max(self.window_episodes, 1) for tag, sums in zip(self.tags, self._window, strict=True)}
        self._window, self.window_episodes = torch.zeros_like(self._window), 0
        return means

    def means(self, episodes: int) -> dict[str, Tensor]:
        """By tag, means over `episodes` episodes, `(runs,)` each."""
        return {tag: sums / max(episodes, 1) for tag, sums in zip(self.tags, self._total, strict=True)}

    def counts(self) -> dict[str, Tensor]:
        """By tag, in how many episodes it was positive, `(runs,)` int64 each."""
        return {tag: sums.to(torch.int64) for tag, sums in zip(self.tags, self._positive, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        sums = {"window": self._window, "total": self._total, "positive": self._positive}
        return {"tags": self.tags, "window_episodes": self.window_episodes, **sums}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.tags, self.window_episodes = list(state["tags"]), int(state["window_episodes"])
        self._window, self._total, self._positive = (state[name].to(device) for name in ("window", "total", "positive"))


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

    learner: Any
    env: Any
    episodes: int
    log_every: int
    crew: Crew
    config: dict[str, Any] = field(default_factory=dict)
    played: int = 0
    seconds: float = 0.0
    rows: list[dict[str, float]] = field(default_factory=list)
    extras: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tracker = self.env.tracker() if hasattr(self.env, "tracker") else Tracker(self.env)
        self.tally = Tally(self.env.runs)
        self.first_episode = int(self.env.episode)
        self.config = self.config or full_config(self.learner, self.env, self.episodes, self.log_every)
        self._lap = (time.monotonic(), 0)

    @property
    def due(self) -> bool:
        return self.played % self.log_every == 0 or self.completed

    @property
    def completed(self) -> bool:
        return self.played == self.episodes

    @property
    def name(self) -> str:
        return str(self.config["learner"]["name"])

    @property
    def last_point(self) -> int:
        return int(self.rows[-1]["episode"]) if self.rows else 0

    @property
    def resumable(self) -> bool:
        return hasattr(self.learner, "state_dict") and hasattr(self.learner, "load_state_dict")

    def step(self) -> None:
        """One episode: play, measure, learn. Nothing here reads a tensor's value."""
        started = time.monotonic()
        policy = self.learner.policy
        trajectory = self.env.rollout(policy)
        self.tracker.update(policy, trajectory)
        self.learner.update(trajectory)
        self.tally.add(self.learner.diagnostics() if hasattr(self.learner, "diagnostics") else {})
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
        for name, bound in _bounds(self, torch.tensor([self.played], dtype=torch.float64)).items():
            row[f"Theory/{name}"] = float(bound[-1])
        return row

    def _point(self) -> dict[str, Tensor]:
        """By tag what is known by now, `(own runs,)` each, so that of a changing process the regrets are those of its past."""
        tracker = self.tracker
        point = {
            "Regret/cumulative": tracker.regret[:, -1],
            "Violation/cumulative": tracker.violation[:, -1],
            "Violation/positive": tracker.positive_violation[:, -1],
            "Regret/alpha": tracker.alpha_regret[:, -1],
            "Metrics/EpRet": tracker.episode_return[:, -1],
            "Metrics/rho": tracker.rho,
            "Metrics/alpha": tracker.alpha,
        }
        for name, by_constraint in (
            ("Violation/cumulative", tracker.violation_by_constraint),
            ("Violation/positive", tracker.positive_violation_by_constraint),
            ("Metrics/EpCost", tracker.episode_cost),
        ):
            for i in range(by_constraint.shape[-1]):
                point[f"{name}/{i}"] = by_constraint[:, -1, i]
        return {**point, **self.tally.close_window()}

    def state(self) -> dict[str, Any]:
        """All of it as plain data: continuing from this is continuing."""
        return {
            "first_episode": self.first_episode,
            "played": self.played,
            "seconds": self.seconds,
            "learner": self.learner.state_dict() if self.resumable else None,
            "env": self.env.state_dict(),
            "tracker": self.tracker.state_dict(),
            "tally": self.tally.state_dict(),
            "rows": self.rows,
            "extras": self.extras,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        if self.resumable:
            self.learner.load_state_dict(state["learner"])
        self.env.load_state_dict(state["env"])
        self.tracker.load_state_dict(state["tracker"])
        self.tally.load_state_dict(state["tally"], self.env.device)
        self.first_episode, self.played, self.seconds = state["first_episode"], state["played"], state["seconds"]
        self.rows, self.extras = list(state["rows"]), list(state["extras"])
        self._lap = (time.monotonic(), self.played)

    def result(self) -> RunResult:
        """What all runs of all processes measured."""
        own = self._own_result()
        return own if self.crew.size == 1 else joined(self.crew.tell(replace(own, **on_host(vars(own)))))

    def _own_result(self) -> RunResult:
        tracker = self.tracker
        episodes = torch.tensor([int(row["episode"]) for row in self.rows])
        return RunResult(
            episodes=episodes,
            regret=tracker.regret,
            anytime_regret=tracker.anytime_regret,
            alpha_regret=tracker.alpha_regret,
            violation=tracker.violation,
            positive_violation=tracker.positive_violation,
            violation_by_constraint=tracker.violation_by_constraint,
            positive_violation_by_constraint=tracker.positive_violation_by_constraint,
            rho=tracker.rho,
            alpha=tracker.alpha,
            safe_value=tracker.comparator_reward[:, -1] / self.last_point,
            best_value=tracker.best_reward[:, -1] / self.last_point,
            bounds=_bounds(self, episodes.to(torch.float64)),
            diagnostics=self.tally.means(self.played),
            counts=self.tally.counts(),
            config=self.config,
            completed=self.completed,
            seconds=self.seconds,
        )


def full_config(learner: Any, env: Any, episodes: int, log_every: int) -> dict[str, Any]:
    """Everything that determines the numbers of a run, as JSON holds it."""
    own = learner.config() if hasattr(learner, "config") else {}
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


def _bounds(session: Session, t: Tensor) -> dict[str, Tensor]:
    """The theorems' bounds and the trivial one at episodes `t`, for the learner's own horizon and delta where it has them."""
    layout, m = session.env.layout, session.env.constraints
    horizon = int(getattr(session.learner, "horizon", session.episodes))
    delta = float(getattr(session.learner, "delta", DEFAULT_DELTA))
    return {
        "regret": theory.regret_bound(layout, horizon, delta, t),
        "violation": theory.violation_bound(layout, m, horizon, delta, t),
        "positive_violation": theory.positive_violation_bound(layout, m, horizon, delta, t),
        "trivial": theory.trivial_bound(layout, t),
    }
