"""The loop: a learner meets a simulator for many episodes, with progress, logging, checkpoints and resumption."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from torchcmdp.distributed import Crew
from torchcmdp.errors import InvalidInput, RunFolderError
from torchcmdp.result import RunResult
from torchcmdp.session import BANDED, Session, full_config
from torchcmdp.simulator import Simulator
from torchcmdp.tensorboard import ADVICE, RunFolder, brief

__all__ = ["RunResult", "run", "run_split"]

POINTS = 200
MOST_POINTS = 10_000
MEETING_SECONDS = 0.5  # how long processes play before they talk: a request to stop is heard within this time


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
    checkpoint_episodes: int | None = None,
    images: bool = True,
) -> RunResult:
    """Play `episodes` episodes and measure them; with a folder, log them and resume what the folder holds.

    Ctrl-C and SIGTERM end the run after the episode under way, write a checkpoint and return a result that is not `completed`.
    A process that is killed loses what it played since the last checkpoint; played again, it gives the same numbers.

    Args:
        learner: Anything with a `policy` `(runs x L x S x A)` and an `update(trajectory)`. Where it also has `state_dict` and
            `load_state_dict` the run can be resumed; `diagnostics()` is logged and `config()` recorded where they exist.
        env: The simulator to play in, or anything like it: `layout`, `constraints`, `runs`, `device`, `episode`, `rollout`,
            `state_dict`, `load_state_dict` and `config`. Where it has a method `tracker()`, what that returns measures the run in
            place of `Tracker(env)`, which needs to know the CMDP.
        episodes: How many episodes this run has.
        logdir: Folder for TensorBoard events, `config.json`, `metrics.csv` and `checkpoint.pt`. A folder with a checkpoint of the
            same settings is resumed bit for bit, a finished one returns its result, one of other settings raises `RunFolderError`.
        log_every: Episodes between logging points; about 200 points by default, and never more than 10,000: of a smaller number
            the least that gives no more is taken, with a warning. The last episode is always a point.
        progress: Show a progress bar.
        fresh: Forget what the folder holds and start over.
        checkpoint_every: Seconds between checkpoints.
        checkpoint_episodes: Episodes between checkpoints, besides those that the time asks for; none by default.
        images: Put the final figures in TensorBoard's Images tab.
    """
    spacing = _check_arguments(learner, episodes, log_every, checkpoint_episodes)
    session = Session(learner, env, int(episodes), spacing, Crew(env.runs, alone=True))
    return _Job(session, logdir, fresh, progress, checkpoint_every, checkpoint_episodes, images).carry_out()


def run_split(
    make: Callable[[int, int], tuple[Any, Simulator]],
    runs: int,
    episodes: int,
    logdir: str | os.PathLike[str] | None = None,
    log_every: int | None = None,
    *,
    progress: bool = True,
    fresh: bool = False,
    checkpoint_every: float = 30.0,
    checkpoint_episodes: int | None = None,
    images: bool = True,
) -> RunResult:
    """`run` with the runs divided over the processes that torchrun started; without torchrun, in this process alone.

    Every process calls this and gets the whole result. Process 0 alone writes the folder, which is the one that `run` would have
    written, and can be resumed by any number of processes. The numbers are the same, since every run has its own random stream.

    Args:
        make: `make(runs, first_run)` returns a learner of that many runs and a simulator of the runs from `first_run` on. Of
            hyperparameters, CMDPs and processes with an axis of runs it takes that slice. It is called for this process's runs,
            and in process 0 once for all runs, to learn the settings. Tensors in the state of a learner or a simulator of your own
            must have the runs on their first axis.
        runs: How many runs there are, over all processes.
        episodes, logdir, log_every, progress, fresh, checkpoint_every, checkpoint_episodes, images: As for `run`.
    """
    crew = Crew(runs)
    learner, env = make(crew.own_runs, crew.first_run)
    spacing = _check_arguments(learner, episodes, log_every, checkpoint_episodes)
    if env.runs != crew.own_runs:
        raise InvalidInput(
            f"make({crew.own_runs}, {crew.first_run}) gave a simulator of {env.runs} runs; expected {crew.own_runs}."
        )
    config: dict[str, Any] = {}
    if crew.size > 1:
        config = crew.deal(lambda: [full_config(*make(crew.runs, 0), int(episodes), spacing)] * crew.size)
    session = Session(learner, env, int(episodes), spacing, crew, config)
    return _Job(session, logdir, fresh, progress, checkpoint_every, checkpoint_episodes, images).carry_out()


def _check_arguments(learner: Any, episodes: int, log_every: int | None, checkpoint_episodes: int | None) -> int:
    """Refuse what cannot be run; returns the episodes between logging points."""
    if not hasattr(learner, "policy") or not callable(getattr(learner, "update", None)):
        raise InvalidInput(f"the learner is a {type(learner).__name__}; it needs a `policy` and a method `update(trajectory)`.")
    if int(episodes) < 1:
        raise InvalidInput(f"episodes is {episodes}; a run needs at least one.")
    if log_every is not None and int(log_every) < 1:
        raise InvalidInput(f"log_every is {log_every}; there must be at least one episode between logging points.")
    if checkpoint_episodes is not None and int(checkpoint_episodes) < 1:
        raise InvalidInput(f"checkpoint_episodes is {checkpoint_episodes}; there must be at least one episode between checkpoints.")
    if log_every is None:
        return max(1, int(episodes) // POINTS)
    least = math.ceil(int(episodes) / MOST_POINTS)
    if int(log_every) < least:
        points = int(episodes) // int(log_every)
        warnings.warn(
            f"log_every is {log_every}, which would make {points:,} logging points; every {least} episodes are logged instead, so "
            f"that there are at most {MOST_POINTS:,}.",
            stacklevel=3,
        )
    return max(int(log_every), least)


@dataclass
class _Job:
    """A session, and what is written about it where."""

    session: Session
    logdir: str | os.PathLike[str] | None
    fresh: bool
    progress: bool
    checkpoint_every: float
    checkpoint_episodes: int | None
    images: bool
    folder: RunFolder | None = None  # in process 0, if there is a logdir

    def carry_out(self) -> RunResult:
        """Resume, play what is left, finish."""
        session, crew = self.session, self.session.crew
        try:
            state = crew.deal(self._open)
            if state is not None:
                self._restore(state)
            if session.completed:
                return session.result()
            crew.deal(self._begin)
            self._play()
            result = session.result()
            if session.completed:
                if self.folder is not None:
                    self.folder.finish(result.figures if self.images else {}, session.played)
                self._save()  # last of all: this says that the run is finished
            return result
        finally:
            if self.folder is not None:
                self.folder.close()

    def _open(self) -> list[dict[str, Any] | None]:
        """In process 0: for every process the state that its runs continue from, None for a new run."""
        session = self.session
        if self.logdir is None:
            return [None] * session.crew.size
        self.folder = RunFolder(Path(self.logdir), self.fresh)
        state = self.folder.checkpoint(session.config)
        return [None] * session.crew.size if state is None else session.crew.divide(state)

    def _restore(self, state: dict[str, Any]) -> None:
        session, first = self.session, state["first_episode"]
        # a simulator that stands where the checkpoint does is the interrupted one itself, still in memory
        if session.first_episode not in (first, first + state["played"]):
            raise RunFolderError(
                f"the run in {self.logdir} began when its simulator had played {first} episodes, but this one has played "
                f"{session.first_episode}; {ADVICE}."
            )
        try:
            session.restore(state)
        except Exception as error:  # whatever a foreign state dictionary makes somebody's learner raise
            raise RunFolderError(
                f"the checkpoint in {self.logdir} does not fit this learner and simulator: {brief(error)}."
            ) from error

    def _begin(self) -> list[None]:
        """In process 0: bring the folder to where the session stands."""
        if self.folder is not None:
            self.folder.begin(self.session.config, self.session.rows, BANDED, self.session.extras)
        return [None] * self.session.crew.size

    def _play(self) -> None:
        """Play what is left of the run, until it is complete or interrupted."""
        session, crew = self.session, self.session.crew
        bar = tqdm(
            total=session.episodes,
            initial=session.played,
            unit="ep",
            disable=not (self.progress and crew.leads),
            dynamic_ncols=True,
        )
        saved, meetings, stopped = time.monotonic(), _Meetings(crew, session.played), False
        with _interruptible(patient=crew.size > 1) as stop, bar:
            while not session.completed and not stopped:
                session.step()
                bar.update()
                if session.due:
                    self._log(bar)
                late = time.monotonic() - saved >= self.checkpoint_every
                stopped, save = meetings.hold(session.played, stop.is_set(), late)
                save = save or (self.checkpoint_episodes is not None and session.played % self.checkpoint_episodes == 0)
                if (save or stopped) and not session.completed:
                    self._save()
                    saved = time.monotonic()
            if not session.due:
                self._log(bar)

    def _save(self) -> None:
        """Write a checkpoint of the runs of all processes."""
        session = self.session
        if self.logdir is None or not (session.resumable or session.completed):
            return
        states = session.crew.collect(session.state())
        if self.folder is not None and states is not None:
            self.folder.save(session.crew.join(states), session.config)

    def _log(self, bar: tqdm[Any]) -> None:
        row, extra = self.session.record()
        bar.set_postfix_str(f"regret {row['Regret/cumulative']:,.1f}, violation {row['Violation/cumulative']:,.1f}", refresh=False)
        if self.folder is not None and self.session.due:
            self.folder.append(row, extra)
        elif self.folder is not None:  # where a run was interrupted: an uninterrupted one has no such point in its curves
            self.folder.append_row(row)


class _Meetings:
    """When processes that share a batch talk: all at the same episode, so that they stop and save together."""

    def __init__(self, crew: Crew, played: int) -> None:
        self._crew, self._next, self._last = crew, played + 1, (time.monotonic(), played)

    def hold(self, played: int, stop: bool, save: bool) -> tuple[bool, bool]:
        """Whether all stop, which any of them may ask for, and whether all save, which process 0 says."""
        if self._crew.size == 1:
            return stop, save
        if played < self._next:
            return False, False
        now = time.monotonic()
        pace = (played - self._last[1]) / max(now - self._last[0], 1e-9)
        self._last = (now, played)
        said = self._crew.tell((stop, save, max(1, int(pace * MEETING_SECONDS))))
        self._next = played + said[0][2]
        return any(stops for stops, _, _ in said), said[0][1]


@contextmanager
def _interruptible(*, patient: bool) -> Iterator[threading.Event]:
    """Turn Ctrl-C and SIGTERM into a request to stop after the episode, so that no state is saved half-updated.

    A second one of a kind has its usual effect, unless `patient`: torchrun may send what its workers have received already.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield stop
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

    def request(number: int, frame: Any) -> None:
        stop.set()
        if not patient:
            signal.signal(number, usual[number])

    for number in previous:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
