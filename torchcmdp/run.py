"""The loop: a learner meets a simulator for many episodes, with progress, logging, checkpoints and resumption."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from torchcmdp import plotting, theory
from torchcmdp.errors import InvalidInput, RunFolderError
from torchcmdp.metrics import Tracker, mean_and_interval
from torchcmdp.simulator import Simulator
from torchcmdp.tensorboard import ADVICE, HALF_WIDTH, RunFolder, brief

POINTS = 200
DEFAULT_DELTA = 0.01
BANDED = ("Regret/cumulative", "Violation/cumulative", "Violation/positive", "Metrics/EpRet")


@dataclass(frozen=True, eq=False)
class RunResult:
    """What a run measured.

    Attributes:
        episodes: Episodes played at each logging point, `(points,)`.
        regret, violation, positive_violation: Cumulative, `(runs x points)`.
        violation_by_constraint, positive_violation_by_constraint: `(runs x points x m)`.
        bounds: The theorems' bounds at the same episodes and the trivial one, `(points,)` each: keys "regret", "violation",
            "positive_violation", "trivial".
        diagnostics: Mean over all episodes of each of the learner's diagnostics, `(runs,)` each.
        config: Everything that determined the numbers.
        completed: False when the run was interrupted.
        seconds: Time spent playing, over all sittings.
    """

    episodes: Tensor
    regret: Tensor
    violation: Tensor
    positive_violation: Tensor
    violation_by_constraint: Tensor
    positive_violation_by_constraint: Tensor
    bounds: dict[str, Tensor]
    diagnostics: dict[str, Tensor]
    config: dict[str, Any]
    completed: bool
    seconds: float

    @property
    def elastic_fraction(self) -> float:
        """The share of projections that were elastic; NaN for a learner that does not say."""
        return self._mean("Solver/elastic")

    @property
    def mean_iterations(self) -> float:
        """Solver iterations per projection; NaN where the learner or its solver does not say."""
        mean = self._mean("Solver/iterations")
        return mean if mean >= 0 else float("nan")  # a solver that does not count reports -1

    @property
    def elastic_count(self) -> int | None:
        """How many projections were elastic, over all runs; None for a learner that does not say."""
        fraction = self.elastic_fraction
        return None if fraction != fraction else round(fraction * int(self.episodes[-1]) * self.regret.shape[0])

    def _mean(self, tag: str) -> float:
        return float(self.diagnostics[tag].mean()) if tag in self.diagnostics else float("nan")


def run(
    learner: Any,
    env: Simulator,
    episodes: int,
    logdir: str | os.PathLike[str] | None = None,
    log_every: int | None = None,
    *,
    progress: bool = True,
    fresh: bool = False,
    checkpoint_every: float = 30.0,
    images: bool = True,
) -> RunResult:
    """Play `episodes` episodes and measure them; with a folder, log them and resume what the folder holds.

    Ctrl-C ends the run after the episode under way, writes a checkpoint and returns a result that is not `completed`.

    Args:
        learner: Anything with a `policy` `(runs x L x S x A)` and an `update(trajectory)`. Where it also has `state_dict` and
            `load_state_dict` the run can be resumed; `diagnostics()` is logged and `config()` recorded where they exist.
        env: The simulator to play in.
        episodes: How many episodes this run has.
        logdir: Folder for TensorBoard events, `config.json`, `metrics.csv` and `checkpoint.pt`. A folder with a checkpoint of the
            same settings is resumed bit for bit, a finished one returns its result, one of other settings raises `RunFolderError`.
        log_every: Episodes between logging points; about 200 points by default. The last episode is always one.
        progress: Show a progress bar.
        fresh: Forget what the folder holds and start over.
        checkpoint_every: Seconds between checkpoints.
        images: Put the final figures in TensorBoard's Images tab.
    """
    _check_arguments(learner, episodes, log_every)
    session = _Session(learner, env, int(episodes), int(log_every or max(1, episodes // POINTS)))
    folder = None if logdir is None else RunFolder(Path(logdir), fresh)
    if folder is not None:
        _resume(session, folder)
    if session.completed:
        return session.result()
    try:
        if folder is not None:
            purge = session.last_point + 1 if session.played > 0 else None
            folder.begin(session.config, session.rows, BANDED, purge_step=purge)
        _play(session, folder, progress, checkpoint_every)
        result = session.result()
        if folder is not None and session.completed:
            folder.finish(plotting.figures({session.name: result}) if images else {}, session.played)
            folder.save(session.state(), session.config)  # last of all: this says that the run is finished
    finally:
        if folder is not None:
            folder.close()
    return result


def _resume(session: _Session, folder: RunFolder) -> None:
    """Continue from the folder's checkpoint, if it has one."""
    state = folder.checkpoint(session.config)
    if state is None:
        return
    first = state["first_episode"]
    # a simulator that stands where the checkpoint does is the interrupted one itself, still in memory
    if session.first_episode not in (first, first + state["played"]):
        raise RunFolderError(
            f"the run in {folder.path} began when its simulator had played {first} episodes, but this one has played "
            f"{session.first_episode}; {ADVICE}."
        )
    try:
        session.restore(state)
    except Exception as error:  # whatever a foreign state dictionary makes somebody's learner raise
        raise RunFolderError(f"the checkpoint in {folder.path} does not fit this learner and simulator: {brief(error)}.") from error


def _check_arguments(learner: Any, episodes: int, log_every: int | None) -> None:
    if not hasattr(learner, "policy") or not callable(getattr(learner, "update", None)):
        raise InvalidInput(f"the learner is a {type(learner).__name__}; it needs a `policy` and a method `update(trajectory)`.")
    if int(episodes) < 1:
        raise InvalidInput(f"episodes is {episodes}; a run needs at least one.")
    if log_every is not None and int(log_every) < 1:
        raise InvalidInput(f"log_every is {log_every}; there must be at least one episode between logging points.")


def _play(session: _Session, folder: RunFolder | None, progress: bool, checkpoint_every: float) -> None:
    """Play what is left of the run, until it is complete or interrupted."""
    saved = time.monotonic()
    bar = tqdm(total=session.episodes, initial=session.played, unit="ep", disable=not progress, dynamic_ncols=True)
    with _interruptible() as stop, bar:
        while not session.completed and not stop.is_set():
            session.step()
            bar.update()
            if session.due:
                _log(session, folder, bar)
            if folder is not None and session.resumable and time.monotonic() - saved >= checkpoint_every:
                folder.save(session.state(), session.config)
                saved = time.monotonic()
        if session.completed:
            return
        if folder is not None and session.resumable:
            folder.save(session.state(), session.config)
        if not session.due:  # after the checkpoint, since an uninterrupted run would not have this point
            _log(session, folder, bar)


def _log(session: _Session, folder: RunFolder | None, bar: tqdm[Any]) -> None:
    row, speed = session.record()
    bar.set_postfix_str(f"regret {row['Regret/cumulative']:,.1f}, violation {row['Violation/cumulative']:,.1f}", refresh=False)
    if folder is not None:
        folder.append(row, {"Time/episodes_per_second": speed})


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into a request to stop after the episode, so that no state is saved half-updated; raise a second."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield stop
        return
    previous = signal.getsignal(signal.SIGINT)

    def request(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, request)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


@dataclass
class _Session:
    """A run in memory: who plays, what was measured, and everything a checkpoint holds."""

    learner: Any
    env: Simulator
    episodes: int
    log_every: int
    played: int = 0
    seconds: float = 0.0
    window: dict[str, Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)
    window_episodes: int = 0
    rows: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tracker = Tracker(self.env)
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
        if hasattr(self.learner, "diagnostics"):
            for tag, value in self.learner.diagnostics().items():
                value = value.detach().to(torch.float64)
                self.window[tag] = self.window[tag] + value if tag in self.window else value
                self.totals[tag] = self.totals[tag] + value if tag in self.totals else value
        self.played += 1
        self.window_episodes += 1
        self.seconds += time.monotonic() - started

    def record(self) -> tuple[dict[str, float], float]:
        """Close a logging point; returns its row and the episodes per second since the last one."""
        self.tracker.record(self.played)
        row = self._row()
        self.rows.append(row)
        self.window, self.window_episodes = {}, 0
        now = time.monotonic()
        speed = (self.played - self._lap[1]) / max(now - self._lap[0], 1e-9)
        self._lap = (now, self.played)
        return row, speed

    def _row(self) -> dict[str, float]:
        tracker, root = self.tracker, self.played**0.5
        row: dict[str, float] = {"episode": float(self.played)}
        for tag, values in zip(BANDED, (tracker.regret, tracker.violation, tracker.positive_violation), strict=False):
            _put(row, tag, values[..., -1])
        row["Regret/over_sqrt_t"] = row["Regret/cumulative"] / root
        row["Violation/over_sqrt_t"] = row["Violation/cumulative"] / root
        for name, by_constraint in (
            ("cumulative", tracker.violation_by_constraint),
            ("positive", tracker.positive_violation_by_constraint),
        ):
            for i in range(by_constraint.shape[-1]):
                row[f"Violation/{name}/{i}"] = float(by_constraint[:, -1, i].mean())
        _put(row, "Metrics/EpRet", tracker.episode_return[..., -1])
        for i in range(tracker.episode_cost.shape[-1]):
            row[f"Metrics/EpCost/{i}"] = float(tracker.episode_cost[:, -1, i].mean())
        for name, bound in _bounds(self, torch.tensor([self.played], dtype=torch.float64)).items():
            row[f"Theory/{name}"] = float(bound[-1])
        for tag, total in self.window.items():
            row[tag] = float(total.mean()) / self.window_episodes
        return row

    def state(self) -> dict[str, Any]:
        """All of it as plain data: continuing from this is continuing."""
        return {
            "first_episode": self.first_episode,
            "played": self.played,
            "seconds": self.seconds,
            "learner": self.learner.state_dict() if self.resumable else None,
            "env": self.env.state_dict(),
            "tracker": self.tracker.state_dict(),
            "window": self.window,
            "window_episodes": self.window_episodes,
            "totals": self.totals,
            "rows": self.rows,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        if self.resumable:
            self.learner.load_state_dict(state["learner"])
        self.env.load_state_dict(state["env"])
        self.tracker.load_state_dict(state["tracker"])
        device = self.env.cmdp.device
        self.window = {tag: value.to(device) for tag, value in state["window"].items()}
        self.totals = {tag: value.to(device) for tag, value in state["totals"].items()}
        self.first_episode, self.played, self.seconds = state["first_episode"], state["played"], state["seconds"]
        self.window_episodes, self.rows = state["window_episodes"], list(state["rows"])
        self._lap = (time.monotonic(), self.played)

    def result(self) -> RunResult:
        tracker = self.tracker
        episodes = torch.tensor([int(row["episode"]) for row in self.rows])
        return RunResult(
            episodes,
            tracker.regret,
            tracker.violation,
            tracker.positive_violation,
            tracker.violation_by_constraint,
            tracker.positive_violation_by_constraint,
            _bounds(self, episodes.to(torch.float64)),
            {tag: total / max(self.played, 1) for tag, total in self.totals.items()},
            self.config,
            self.completed,
            self.seconds,
        )


def _config(learner: Any, env: Simulator, episodes: int, log_every: int) -> dict[str, Any]:
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


def _bounds(session: _Session, t: Tensor) -> dict[str, Tensor]:
    """The theorems' bounds and the trivial one at episodes `t`, for the learner's own horizon and delta where it has them."""
    layout, m = session.env.cmdp.layout, session.env.cmdp.constraints
    horizon = int(getattr(session.learner, "horizon", session.episodes))
    delta = float(getattr(session.learner, "delta", DEFAULT_DELTA))
    return {
        "regret": theory.regret_bound(layout, horizon, delta, t),
        "violation": theory.violation_bound(layout, m, horizon, delta, t),
        "positive_violation": theory.positive_violation_bound(layout, m, horizon, delta, t),
        "trivial": theory.trivial_bound(layout, t),
    }
