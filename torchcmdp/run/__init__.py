"""A learner meets an environment for many episodes, with progress, logging, checkpoints and resumption."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Unpack

from torchcmdp.distributed import Crew
from torchcmdp.errors import InvalidInput, check_kind
from torchcmdp.protocols import EnvironmentLike, LearnerLike
from torchcmdp.run.loop import Job
from torchcmdp.run.options import RunKeywords, RunOptions
from torchcmdp.run.result import RunResult
from torchcmdp.run.session import Session, check_environment, full_config
from torchcmdp.run.stored import load

__all__ = ["RunOptions", "RunResult", "load", "run", "run_split"]


def run(
    learner: LearnerLike,
    env: EnvironmentLike,
    episodes: int,
    logdir: str | os.PathLike[str] | None = None,
    log_every: int | None = None,
    **options: Unpack[RunKeywords],
) -> RunResult:
    """Play `episodes` episodes and measure them; with a folder, log them and resume what the folder holds.

    Ctrl-C and SIGTERM end the run after the episode under way, write a checkpoint and return a result that is not `completed`.
    A process that is killed loses what it played since the last checkpoint; played again, it gives the same numbers.

    Args:
        learner: Anything with a `policy` `(runs x L x S x A)` and an `update(trajectory)`; `LearnerLike` says what else is used.
        env: The simulator to play in, or anything like it (`EnvironmentLike`).
        episodes: How many episodes this run has.
        logdir: Folder for TensorBoard events, `config.json`, `metrics.csv`, `curves.npz` (what `load` reads) and `checkpoint.pt`. A
            folder with a checkpoint of the same settings is resumed bit for bit, a finished one returns its result, one of other
            settings raises `RunFolderError`.
        log_every: Episodes between logging points; about 200 points by default.
        options: `progress`, `fresh`, `checkpoint_every` (seconds), `checkpoint_episodes`, `images` and `engine`, as in
            `RunOptions`.
    """
    chosen = RunOptions(log_every, **options)
    spacing = chosen.spacing(episodes)
    check_environment(env)
    session = Session(learner, env, int(episodes), spacing, Crew(env.runs, alone=True))
    return Job(session, logdir, chosen).carry_out()


def run_split(
    make: Callable[[int, int], tuple[LearnerLike, EnvironmentLike]],
    runs: int,
    episodes: int,
    logdir: str | os.PathLike[str] | None = None,
    log_every: int | None = None,
    **options: Unpack[RunKeywords],
) -> RunResult:
    """`run` with the runs divided over the processes that torchrun started; without torchrun, in this process alone.

    Every process calls this and gets the whole result. Process 0 alone writes the folder, which is the one that `run` would have
    written, and can be resumed by any number of processes. The numbers are the same, since every run has its own random stream.

    Args:
        make: `make(runs, first_run)` returns a learner of that many runs and a simulator of the runs from `first_run` on. Of
            hyperparameters, CMDPs and processes with an axis of runs it takes that slice. It is called for this process's runs,
            and in process 0 once for all runs, to learn the settings. Tensors in the state of a learner or a simulator of your own
            must have the runs on their first axis, or a method `state_axes` must say where else.
        runs: How many runs there are, over all processes.
        episodes, logdir, log_every, options: As for `run`.
    """
    chosen, crew = RunOptions(log_every, **options), Crew(runs)
    spacing = chosen.spacing(episodes)
    check_kind("make", make, Callable, "a function of a number of runs and of the first one")
    learner, env = make(crew.own_runs, crew.first_run)
    check_environment(env)
    if env.runs != crew.own_runs:
        raise InvalidInput(
            f"make({crew.own_runs}, {crew.first_run}) gave a simulator of {env.runs} runs; expected {crew.own_runs}."
        )
    config: dict[str, Any] = {}
    if crew.size > 1:
        config = crew.deal(lambda: [full_config(*make(crew.runs, 0), int(episodes), spacing)] * crew.size)
    return Job(Session(learner, env, int(episodes), spacing, crew, config), logdir, chosen).carry_out()
