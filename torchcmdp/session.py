"""A run in memory: who plays, what was measured, and everything that a checkpoint holds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchcmdp import theory
from torchcmdp.metrics import Tracker, mean_and_interval
from torchcmdp.result import RunResult
from torchcmdp.tensorboard import HALF_WIDTH

DEFAULT_DELTA = 0.01


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

    def close_window(self) -> dict[str, float]:
        """Means over runs and over the episodes since this was last called."""
        means = {tag: float(sums.mean()) / max(self.window_episodes, 1) for tag, sums in zip(self.tags, self._window, strict=True)}
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

    Args:
        learner, env, episodes, log_every: As for `run`.
    """

    learner: Any
    env: Any
    episodes: int
    log_every: int
    played: int = 0
    seconds: float = 0.0
    rows: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tracker = self.env.tracker() if hasattr(self.env, "tracker") else Tracker(self.env)
        self.tally = Tally(self.env.runs)
        self.first_episode = int(self.env.episode)
        self.config = _config(self.learner, self.env, self.episodes, self.log_every)
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

    def record(self) -> tuple[dict[str, float], float]:
        """Close a logging point; returns its row and the episodes per second since the last one."""
        self.tracker.record(self.played)
        row = self._row()
        self.rows.append(row)
        now = time.monotonic()
        speed = (self.played - self._lap[1]) / max(now - self._lap[0], 1e-9)
        self._lap = (now, self.played)
        return row, speed

    def _row(self) -> dict[str, float]:
        """The point just recorded: what is known by now, so that of a changing process the regrets are those of its past."""
        tracker, root = self.tracker, self.played**0.5
        row: dict[str, float] = {"episode": float(self.played)}
        _put(row, "Regret/cumulative", tracker.regret[:, -1])
        _put(row, "Violation/cumulative", tracker.violation[:, -1])
        _put(row, "Violation/positive", tracker.positive_violation[:, -1])
        row["Regret/over_sqrt_t"] = row["Regret/cumulative"] / root
        row["Violation/over_sqrt_t"] = row["Violation/cumulative"] / root
        _put(row, "Regret/alpha", tracker.alpha_regret[:, -1])
        for name, by_constraint in (
            ("cumulative", tracker.violation_by_constraint),
            ("positive", tracker.positive_violation_by_constraint),
        ):
            for i in range(by_constraint.shape[-1]):
                row[f"Violation/{name}/{i}"] = float(by_constraint[:, -1, i].mean())
        _put(row, "Metrics/EpRet", tracker.episode_return[:, -1])
        episode_cost = tracker.episode_cost[:, -1]
        for i in range(episode_cost.shape[-1]):
            row[f"Metrics/EpCost/{i}"] = float(episode_cost[:, i].mean())
        row["Metrics/rho"], row["Metrics/alpha"] = float(tracker.rho.mean()), float(tracker.alpha.mean())
        for name, bound in _bounds(self, torch.tensor([self.played], dtype=torch.float64)).items():
            row[f"Theory/{name}"] = float(bound[-1])
        return {**row, **self.tally.close_window()}

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
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        if self.resumable:
            self.learner.load_state_dict(state["learner"])
        self.env.load_state_dict(state["env"])
        self.tracker.load_state_dict(state["tracker"])
        self.tally.load_state_dict(state["tally"], self.env.device)
        self.first_episode, self.played, self.seconds = state["first_episode"], state["played"], state["seconds"]
        self.rows = list(state["rows"])
        self._lap = (time.monotonic(), self.played)

    def result(self) -> RunResult:
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


def _config(learner: Any, env: Any, episodes: int, log_every: int) -> dict[str, Any]:
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


def _put(row: dict[str, float], tag: str, values: Tensor) -> None:
    """The mean over runs of `(runs,)` values and the half-width of its 95% interval."""
    mean, half = mean_and_interval(values)
    row[tag], row[tag + HALF_WIDTH] = float(mean), float(half)


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
