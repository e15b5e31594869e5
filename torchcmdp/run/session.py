"""A run in memory: who plays, what was measured, and everything that a checkpoint holds."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchcmdp import theory
from torchcmdp.distributed import Crew, join, run_axes
from torchcmdp.errors import InvalidInput, brief
from torchcmdp.events import HALF_WIDTH, WALL_TIME
from torchcmdp.identity import attributes_of, config_of, has_attributes
from torchcmdp.kernels.engine import engine
from torchcmdp.metrics import Tracker, mean_and_interval
from torchcmdp.processes.base import stateless
from torchcmdp.protocols import EnvironmentLike, LearnerLike, TrackerLike, first_axes, measured
from torchcmdp.run.blocks import Blocks, obstacle
from torchcmdp.run.diagnostics import Diagnostics
from torchcmdp.run.notices import NO_SAFE_POLICY, PAST_HORIZON, Notices
from torchcmdp.run.result import RunResult
from torchcmdp.simulator import Simulator
from torchcmdp.units import units_of

DEFAULT_DELTA = 0.01
BLOCK_SECONDS = 0.1  # how long episodes are played without a look at the clock
SPEED = "Time/episodes_per_second"

# Tags of a logging point, and under which name `TrackerLike.newest` has them; the second ones have a tag for each constraint.
TAGS = {
    "Regret/cumulative": "regret",
    "Violation/cumulative": "violation",
    "Violation/positive": "positive_violation",
    "Violation/realised": "realised_violation",
    "Violation/unsafe_share": "unsafe_share",
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
BANDED = (
    *("Regret/cumulative", "Regret/alpha", "Violation/cumulative", "Violation/positive", "Violation/unsafe_share"),
    "Metrics/EpRet",
)
OVER_ROOT = {"Regret/cumulative": "Regret/over_sqrt_t", "Violation/cumulative": "Violation/over_sqrt_t"}
# What a state has beside those of the parts.
OWN = ("first_episode", "first_update", "played", "seconds", "rows", "extras")
# What an environment must have to be played in.
MEMBERS = ("episode", "layout", "constraints", "runs", "device", "rollout", "config")


@dataclass
class Session:
    """A learner and an environment in the middle of a run.

    Attributes:
        played: Episodes so far.
        seconds: Time spent playing them.
        rows: The logging points: means over all runs, of all processes.
        extras: Of each point, what is not the same in every repetition: when it was made, and how fast.
        lacking: Why the run cannot be continued once it is interrupted, as a clause; empty where it can.

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
        parts = {"learner": learner, "env": env, "tracker": self.tracker, "diagnostics": self.diagnostics}
        self._parts: dict[str, Any] = {name: part for name, part in parts.items() if _keeps_state(part)}
        self.lacking = _lacking(learner, env)
        self.first_episode, self.first_update = int(env.episode), _updates(learner)
        self.notices = Notices(silent=not self.crew.leads)
        self.config = self.config or self._config()
        self._begun_with = self._attributes()
        self._lap = (time.monotonic(), 0)
        self._blocks: Blocks | None = None
        self._pace = 1  # episodes of the next block

    @property
    def until_due(self) -> int:
        """Episodes until the next logging point."""
        return min(self.log_every - self.played % self.log_every, self.episodes - self.played)

    def _config(self) -> dict[str, Any]:
        return full_config(self.learner, self.env, self.episodes, self.log_every)

    @property
    def due(self) -> bool:
        """Whether this episode is a logging point."""
        return self.played % self.log_every == 0 or self.completed

    @property
    def completed(self) -> bool:
        """Whether every episode was played."""
        return self.played == self.episodes

    @property
    def last_point(self) -> int:
        """The episode of the last logging point, 0 before the first."""
        return int(self.rows[-1]["episode"]) if self.rows else 0

    @property
    def obstacle(self) -> str:
        """Why the next episode is played in torch, a step at a time; empty where a compiled block can be."""
        return 'engine is "torch"' if engine() == "torch" else obstacle(self.learner, self.env, self.tracker)

    def advance(self, most: int) -> int:
        """Play episodes, as many as take a tenth of a second and no more than `most`; returns how many."""
        started = time.monotonic()
        why = self.obstacle
        if why:
            if (chosen := engine()) in ("compiled", "cuda"):
                raise InvalidInput(f'engine is "{chosen}", but {why}; expected what kernels can play, or engine "auto".')
            episodes = 1
            self._step()
        else:
            if self._blocks is None:
                self._blocks = Blocks(*cast(Any, (self.learner, self.env, self.tracker, self.diagnostics)))
            episodes = int(min(most, self._pace, self._blocks.env.episodes_left))
            self._blocks.play(episodes)
        seconds = time.monotonic() - started
        # no more than eight times as many as before: the first block may have been played while kernels were compiled
        self._pace = max(1, min(8 * episodes, int(episodes * BLOCK_SECONDS / max(seconds, 1e-9))))
        self.played += episodes
        self.seconds += seconds
        return episodes

    def _step(self) -> None:
        """One episode: play, measure, learn. Nothing here reads a tensor's value."""
        shown = measured(self.learner, self.tracker)
        trajectory = self.env.rollout(self.learner.policy)
        self.tracker.update(shown, trajectory)
        self.learner.update(trajectory)
        self.diagnostics.add(getattr(self.learner, "diagnostics", dict)())

    def _late(self, played: int) -> int:
        """How many of so many episodes were past the learner's horizon."""
        return max(0, played - (self.horizon - self.first_update))

    @property
    def horizon(self) -> int:
        """T, for which the learner was made; the length of the run where it does not say."""
        return int(getattr(self.learner, "horizon", self.episodes + self.first_update))

    def record(self) -> tuple[dict[str, float], dict[str, float]]:
        """Close a logging point; returns its row and what else there is to say about it."""
        self.tracker.record(self.played)
        now = time.monotonic()
        speed = (self.played - self._lap[1]) / max(now - self._lap[0], 1e-9)
        self._lap = (now, self.played)
        self.rows.append(self._row())
        self.extras.append({SPEED: speed, WALL_TIME: time.time()})
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
        place = list(point)
        unsafe = values[:, place.index("Regret/cumulative")].isnan() & ~values[:, place.index("Metrics/rho")].isnan()
        row[NO_SAFE_POLICY] = float(unsafe.double().mean())
        if self._late(self.episodes):
            late = self._late(self.played) - self._late(self.last_point)
            row[PAST_HORIZON] = late / max(1, self.played - self.last_point)
        self.notices.at_point(row)
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

    @property
    def points(self) -> list[int]:
        """At which episodes the logging points so far are."""
        points = list(range(self.log_every, self.played + 1, self.log_every))
        return [*points, self.played] if self.completed and points[-1:] != [self.played] else points

    def row_names(self) -> set[str]:
        """What every logging point has, besides the learner's diagnostics."""
        each = {f"{tag}/{i}" for tag in TAGS_BY_CONSTRAINT for i in range(self.env.constraints)}
        bounds = {f"Theory/{name}" for name in self._bounds(torch.ones(1, dtype=torch.float64))}
        return {"episode", *TAGS, *each, *(tag + HALF_WIDTH for tag in BANDED), *OVER_ROOT.values(), NO_SAFE_POLICY, *bounds}

    def state(self) -> dict[str, Any]:
        """All of it as plain data, with the axis of the runs in each entry: continuing from this is continuing."""
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {
            **{name: getattr(self, name) for name in OWN},
            **parts,
            # attributes that define somebody's learner may also be its state: it is known by these as well, while in memory
            "standing": json.dumps(self._config()) if has_attributes(self.config) and self.crew.size == 1 else "",
            "attributes": self.changed_attributes(),
            "axes": {name: run_axes(part, parts[name]) for name, part in self._parts.items()},
        }

    def changed_attributes(self) -> dict[str, dict[str, Any]]:
        """Of what is somebody's own, by class the attributes that are not what they were when the run began, with their values.

        Their values tell whether its state is all that changes.
        """
        found = {}
        for kind, now in self._attributes().items():
            before = self._begun_with.get(kind, {})
            found[kind] = {name: value for name, value in now.items() if name not in before or before[name] != value}
        return {kind: changed for kind, changed in found.items() if changed}

    def _attributes(self) -> dict[str, dict[str, Any]]:
        if self.crew.size > 1:  # each has some of the runs, and none has the attributes of all
            return {}
        parts = (self.learner, self.env, getattr(self.env, "rewards", None), getattr(self.env, "costs", None))
        return {type(part).__name__: told for part in parts if (told := attributes_of(part))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        for name in OWN:
            setattr(self, name, state[name])
        self.config = json.loads(state["config"])
        for kind, names in state["attributes"].items():  # also of a learner that has been in memory all the time
            self._begun_with[kind] = {n: v for n, v in self._begun_with.get(kind, {}).items() if n not in names}
        self._lap = (time.monotonic(), self.played)

    def result(self) -> RunResult:
        """What all runs of all processes measured."""
        curves, counts = self.tracker.curves(), self.diagnostics.counts()
        if self._late(self.episodes):
            counts[PAST_HORIZON] = torch.full((self.env.runs,), self._late(self.played), device=self.env.device)
        own: dict[str, Any] = {
            **{name: curve for name, curve in curves.items() if name in RunResult.__dataclass_fields__},
            "safe_value": curves["comparator_reward"][:, -1] / self.last_point,
            "best_value": curves["best_reward"][:, -1] / self.last_point,
            "diagnostics": self.diagnostics.means(self.played),
            "counts": counts,
            "units": self._scales(),
            "seconds": self.seconds,
        }
        episodes = torch.tensor([int(row["episode"]) for row in self.rows])
        told: dict[str, Any] = {"episodes": episodes, "bounds": self._bounds(episodes.to(torch.float64)), "config": self.config}
        return RunResult(**join(self.crew.tell(own), first_axes(own)), **told, completed=self.completed)

    def _bounds(self, t: Tensor) -> dict[str, Tensor]:
        """The trivial bound at episodes `t`, and those of the theorems that the learner says are its own (`theorems`)."""
        layout, m = self.env.layout, self.env.constraints
        horizon = int(getattr(self.learner, "horizon", self.episodes))
        delta = float(getattr(self.learner, "delta", DEFAULT_DELTA))
        bounds = {
            "regret": lambda: theory.regret_bound(layout, horizon, delta, t),
            "violation": lambda: theory.violation_bound(layout, m, horizon, delta, t),
            "positive_violation": lambda: theory.positive_violation_bound(layout, m, horizon, delta, t),
        }
        own = getattr(self.learner, "theorems", ())
        found = {**{name: bound() for name, bound in bounds.items() if name in own}, "trivial": theory.trivial_bound(layout, t)}
        scales = self._scales()
        if not scales:
            return found
        # of runs with different units the widest holds for all
        reward, cost = (float(scales[name].max()) if scales[name].numel() else 1.0 for name in ("reward_scale", "cost_scale"))
        shown = {name: bound * (cost if "violation" in name else reward) for name, bound in found.items()}
        return {**shown, "trivial_violation": found["trivial"] * cost}

    def _scales(self) -> dict[str, Tensor]:
        """Of the user's units what leads back to the normal form, `(own runs [x m])` each; empty without units."""
        units = units_of(self.env)
        if units is None:
            return {}
        names, runs = ("reward_scale", "reward_offset", "cost_scale"), self.env.runs
        return {
            name: getattr(units, name).expand(runs, *getattr(units, name).shape[-1:] * (name == "cost_scale")) for name in names
        }


def check_environment(env: object) -> None:
    """Refuse what cannot be played in."""
    lacks = [name for name in MEMBERS if not hasattr(env, name)]
    if lacks or isinstance(env, type):
        what = f"it has no {', '.join(lacks)}" if lacks else "it is a class"
        raise InvalidInput(f"env is {brief(env)}; it must be a Simulator, or anything like it (EnvironmentLike): {what}.")


def _updates(learner: LearnerLike) -> int:
    """How many episodes a learner has learned from, as far as it says."""
    episode = getattr(learner, "episode", 0)
    known = isinstance(episode, int) or (isinstance(episode, Tensor) and episode.numel() == 1 and episode.device.type != "meta")
    return max(int(episode), 0) if known else 0


def _keeps_state(part: object) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _lacking(learner: LearnerLike, env: EnvironmentLike) -> str:
    """What keeps a run of these from being continued, as a clause; empty where nothing does."""
    wanted = "state_dict and load_state_dict"
    for part in (learner, env):
        if not _keeps_state(part):
            return f"{type(part).__name__} has no {wanted}"
    if isinstance(learner, nn.Module) and type(learner).state_dict is nn.Module.state_dict and not learner.state_dict():
        return f"{type(learner).__name__} has nothing in its state_dict: register its state as buffers, or write {wanted}"
    for process in (getattr(env, "rewards", None), getattr(env, "costs", None)):
        found = None if process is None else stateless(process)
        if found is not None:
            return f"{type(found).__name__} changes and has no {wanted} of its own (it needs none where stationary is True)"
    return ""


def full_config(learner: LearnerLike, env: EnvironmentLike, episodes: int, log_every: int) -> dict[str, Any]:
    """Everything that determines the numbers of a run, as JSON holds it."""
    name = getattr(learner, "name", None) or type(learner).__name__
    config = {"learner": {**config_of(learner), "name": name}, "env": env.config(), "episodes": episodes, "log_every": log_every}
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
