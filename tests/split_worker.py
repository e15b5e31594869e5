"""What `test_distributed` runs under torchrun: divided runs, whole, interrupted, and continued from where one process stopped."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from helpers import SMALL_JOB

import torchcmdp as tc
from torchcmdp.distributed import process_rank
from torchcmdp.run import run_split
from train.__main__ import main as train

RUNS, EPISODES, LOG_EVERY = 5, 20, 4
WIDTHS = (1, 2, 3, 1)
MAIN_JOB = [*SMALL_JOB, "--episodes", "30", "--runs", "3"]


class Stopping:
    """A learner that asks its own process to stop, or kills it, at a chosen episode."""

    at, number = 0, signal.SIGTERM

    def update(self, trajectory: tc.Trajectory) -> None:
        super().update(trajectory)  # type: ignore[misc]
        if int(self.episode) == self.at:  # type: ignore[attr-defined]
            os.kill(os.getpid(), self.number)


def stopping(kind: type[tc.Learner]) -> Any:
    """The learner as one that stops."""
    return type(kind.__name__, (Stopping, kind), {"config": kind.config})  # when it stops is no setting


def own_cmdps(runs: int, first_run: int) -> tuple[Any, tc.Simulator]:
    """For every run its own CMDP and step size."""
    cmdps = [tc.random_cmdp(WIDTHS, 2, 2, seed=run) for run in range(first_run, first_run + runs)]
    cmdp = tc.stack_cmdps(cmdps)
    env = tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1), runs=runs, seed=3, first_run=first_run)
    eta = torch.linspace(0.05, 0.5, RUNS, dtype=torch.float64)[first_run : first_run + runs]
    return stopping(tc.WCOPS)(cmdp.layout, 2, EPISODES, runs=runs, eta=eta, bonus_scale=0.1, radius_scale=0.1), env


def adversarial(runs: int, first_run: int) -> tuple[Any, tc.Simulator]:
    """One CMDP, and recorded processes with an axis of runs that is not there at first."""
    cmdp = tc.random_cmdp(WIDTHS, 2, 2, seed=1)
    rewards = tc.Recorder(tc.OGDAdversary(cmdp.rewards, sign=-1, step=0.3), 8)
    costs = tc.Recorder(tc.OGDAdversary(cmdp.costs, sign=1, step=0.3, low=-1, high=tc.safe_caps(cmdp, 0.2)), EPISODES)
    env = tc.Simulator(cmdp, rewards, costs, runs=runs, seed=3, first_run=first_run)
    return stopping(tc.WCOPS)(cmdp.layout, 2, EPISODES, runs=runs, eta=0.2, bonus_scale=0.1, radius_scale=0.1), env


def guarded(kind: type[tc.Learner], **settings: float) -> Any:
    """A learner with a baseline for every run, which soon leaves it: its coins are those of its runs, wherever they are played."""

    def make(runs: int, first_run: int) -> tuple[Any, tc.Simulator]:
        cmdps = [tc.random_cmdp(WIDTHS, 2, 2, seed=run, feasibility="strict") for run in range(first_run, first_run + runs)]
        cmdp = tc.stack_cmdps(cmdps)
        rewards, costs = tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1)
        env = tc.Simulator(cmdp, rewards, costs, runs=runs, seed=3, first_run=first_run)
        return stopping(kind).for_env(env, horizon=EPISODES, baseline=tc.baseline(cmdp), **settings), env

    return make


KINDS = {
    "own-cmdps": own_cmdps,
    "adversarial": adversarial,
    "s-ops": guarded(tc.SOPS, bonus_scale=0.01, radius_scale=0.01),
    "ma-ops": guarded(tc.MAOPS, bonus_scale=0.001, radius_scale=0.001),
    "dope": guarded(tc.DOPE, bonus_scale=0.001, radius_scale=0.0001),
}


def play(kind: str, folder: Path, *, at: int = 0, rank: int = 0, number: int = signal.SIGTERM, **options) -> tc.RunResult:
    """A run of that kind, in which process `rank` is sent a signal in episode `at`."""

    def make(runs: int, first_run: int) -> tuple[Any, tc.Simulator]:
        learner, env = KINDS[kind](runs, first_run)
        learner.at, learner.number = (at if process_rank() == rank else 0), number
        return learner, env

    return run_split(make, RUNS, EPISODES, folder, LOG_EVERY, progress=False, images=False, **options)


def main(folder: Path) -> None:
    for kind in KINDS:
        result = play(kind, folder / kind / "whole")
        assert not play(kind, folder / kind / "stopped", at=6, rank=1).completed
        play(kind, folder / kind / "stopped-twice", at=5, rank=1)
        play(kind, folder / kind / "stopped-twice", at=11, rank=0)
        assert play(kind, folder / kind / "stopped-twice").completed
        assert play(kind, folder / kind / "moved").completed
        if process_rank() == 1:
            torch.save({"regret": result.regret, "counts": result.counts, "rho": result.rho}, folder / kind / "second.pt")
    try:
        play("adversarial", folder / "own-cmdps" / "whole")
    except tc.RunFolderError as error:
        (folder / f"refused-{process_rank()}").write_text(str(error))
    assert train([*MAIN_JOB, "--logdir", str(folder / "main-job"), "--name", "two"]) == 0


if __name__ == "__main__":
    # they talk after every episode: these runs last no half second
    importlib.import_module("torchcmdp.run.loop").MEETING_SECONDS = 0.0
    if sys.argv[1] == "killed":  # the first time round process 1 dies without a word
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        play("own-cmdps", Path(sys.argv[2]), at=9 if first else 0, rank=1, number=signal.SIGKILL, checkpoint_episodes=6)
    else:
        main(Path(sys.argv[1]))
