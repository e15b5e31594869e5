"""The loop: a learner meets a simulator for many episodes, with progress, logging, checkpoints and resumption."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from torchcmdp import plotting
from torchcmdp.errors import InvalidInput, RunFolderError
from torchcmdp.result import RunResult
from torchcmdp.session import Session
from torchcmdp.simulator import Simulator
from torchcmdp.tensorboard import ADVICE, RunFolder, brief

__all__ = ["RunResult", "run"]

POINTS = 200
BANDED = ("Regret/cumulative", "Regret/alpha", "Violation/cumulative", "Violation/positive", "Metrics/EpRet")


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
        env: The simulator to play in, or anything like it: `layout`, `constraints`, `runs`, `device`, `episode`, `rollout`,
            `state_dict`, `load_state_dict` and `config`. Where it has a method `tracker()`, what that returns measures the run in
            place of `Tracker(env)`, which needs to know the CMDP.
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
    session = Session(learner, env, int(episodes), int(log_every or max(1, episodes // POINTS)))
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


def _resume(session: Session, folder: RunFolder) -> None:
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


def _play(session: Session, folder: RunFolder | None, progress: bool, checkpoint_every: float) -> None:
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


def _log(session: Session, folder: RunFolder | None, bar: tqdm[Any]) -> None:
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
