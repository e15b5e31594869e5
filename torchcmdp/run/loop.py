"""The loop around a session: resume, play, log, save, stop when asked to."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from tqdm import tqdm

from torchcmdp.distributed import Crew, join
from torchcmdp.errors import RunFolderError, check_folder, warn
from torchcmdp.folder import ADVICE, RunFolder, first_line
from torchcmdp.kernels.engine import using
from torchcmdp.run.door import check_counts, enter, forgotten
from torchcmdp.run.options import RunOptions
from torchcmdp.run.result import RunResult
from torchcmdp.run.session import BANDED, Session
from torchcmdp.run.stored import pack

MEETING_SECONDS = 0.5  # how long processes play before they talk: a request to stop is heard within this time


@dataclass
class Job:
    """A session, and what is written about it where."""

    session: Session
    logdir: str | os.PathLike[str] | None
    options: RunOptions
    folder: RunFolder | None = None  # in process 0, if there is a logdir
    _kept: int = 0  # the logging point up to which the curves are in the folder
    _warned: bool = False  # that the learner's state is not all that changes
    _late: int | None = None  # a signal that came with the last episode, too late to stop anything here

    def carry_out(self) -> RunResult:
        """Resume, play what is left, finish; a signal that came too late for this run is for whoever plays the next one."""
        result = self._carry_out()
        if self._late is not None:
            signal.raise_signal(self._late)
        return result

    def _carry_out(self) -> RunResult:
        session, crew = self.session, self.session.crew
        try:
            state = crew.deal(self._open)
            if state is not None:
                self._restore(state)
            if session.completed:
                return session.result()
            crew.deal(self._begin)
            with using(self.options.engine):
                session.notices.at_start(session)
                self._play()
            result = session.result()
            self._keep(result)
            if session.completed:
                if self.folder is not None:
                    self.folder.finish(result.figures if self.options.images else {}, session.played)
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
        check_folder("logdir", self.logdir)
        self.folder = RunFolder(Path(self.logdir), self.options.fresh)
        state = self.folder.checkpoint(session.config, session.lacking)
        if state is None:
            return [None] * session.crew.size
        with self._fitting():
            check_counts(session, state)
            return session.crew.divide(state, state["axes"])

    def _restore(self, state: dict[str, Any]) -> None:
        session = self.session
        for name, who in (("first_episode", "simulator"), ("first_update", "learner")):
            first, stands = state[name], getattr(session, name)
            # one that stands where the checkpoint does is the interrupted one itself, still in memory
            if stands not in (first, first + state["played"]):
                raise RunFolderError(
                    f"the run in {self.logdir} began when its {who} had played {first} episodes, but this one has played {stands}; "
                    f"{ADVICE}."
                )
        with self._fitting():
            enter(session, state)

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a foreign state dictionary makes somebody's learner raise
            raise RunFolderError(
                f"the checkpoint in {self.logdir} does not fit this learner and simulator: {first_line(error)}; {ADVICE}."
            ) from error

    def _begin(self) -> list[None]:
        """In process 0: bring the folder to where the session stands."""
        if self.folder is not None:
            if self.session.lacking:
                warn(f"{self.session.lacking}: once interrupted, the run in {self.logdir} cannot be continued.")
            self.folder.begin(self.session.config, self.session.rows, BANDED, self.session.extras)
        return [None] * self.session.crew.size

    def _play(self) -> None:
        """Play what is left of the run, until it is complete or interrupted."""
        session, crew, options = self.session, self.session.crew, self.options
        hidden = not (options.progress and crew.leads)
        bar = tqdm(total=session.episodes, initial=session.played, unit="ep", disable=hidden, dynamic_ncols=True)
        saved, meetings, stopped = time.monotonic(), _Meetings(crew, session.played), False
        with _interruptible(patient=crew.size > 1 or parent_process() is not None) as heard, bar:
            while not session.completed and not stopped:
                episodes = session.advance(min(session.until_due, self._until_saved(), meetings.until_next(session.played)))
                bar.update(episodes)
                if options.on_progress is not None:
                    options.on_progress(episodes)
                if session.due:
                    self._log(bar)
                late = time.monotonic() - saved >= options.checkpoint_every
                stopped, save = meetings.hold(session.played, bool(heard), late)
                save = save or (options.checkpoint_episodes is not None and session.played % options.checkpoint_episodes == 0)
                if (save or stopped) and not session.completed:
                    self._save()
                    saved = time.monotonic()
            if not session.due:
                self._log(bar)
        self._late = heard[0] if heard and session.completed else None

    def _until_saved(self) -> int:
        """Episodes until a checkpoint that is due by their number."""
        every = self.options.checkpoint_episodes
        return self.session.episodes if every is None else every - self.session.played % every

    def _save(self) -> None:
        """Write a checkpoint of the runs of all processes."""
        session = self.session
        if self.logdir is None or (session.lacking and not session.completed):
            return
        if session.last_point > self._kept and not session.completed:
            self._keep(session.result())
        if not session.completed and not self._warned and (missing := forgotten(session)):
            self._warned = True
            warn(f"{missing} the run in {self.logdir} cannot be continued once it is interrupted.")
        states = session.crew.collect(session.state())
        if self.folder is not None and states is not None:
            self.folder.save(join(states, states[0]["axes"]), session.config)

    def _keep(self, result: RunResult) -> None:
        """Write the curves of all runs, which change at logging points alone."""
        self._kept = self.session.last_point
        if self.folder is not None:
            self.folder.keep(pack(result))

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

    def until_next(self, played: int) -> int:
        """Episodes that may be played before the next meeting."""
        return sys.maxsize if self._crew.size == 1 else max(1, self._next - played)

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
def _interruptible(*, patient: bool) -> Iterator[list[int]]:
    """Turn Ctrl-C and SIGTERM into a request to stop after the episode, so that no state is saved half-updated: those heard so far.

    A second one of a kind has its usual effect, unless `patient`: torchrun and whoever else has started this process may send what
    it has received already, with its whole group.
    """
    heard: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield heard
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

    def request(number: int, frame: Any) -> None:
        heard.append(number)
        if not patient:
            signal.signal(number, usual[number])

    for number in previous:
        signal.signal(number, request)
    try:
        yield heard
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
