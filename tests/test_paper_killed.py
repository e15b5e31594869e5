"""`train paper` killed, in one process and in many: what is left is as if nothing had happened, and nobody plays on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import torchcmdp as tc
from torchcmdp.folder import RunFolder
from torchcmdp.run.blocks import Blocks
from train.paper import experiment, report


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it is done."""


def test_kills_at_any_moment_leave_no_trace_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adversarial experiment, its recording and its replays, killed again and again: every byte is as if it never was."""
    run, left = tc.run, [10**9]

    def mortal(real: Any) -> Any:
        def act(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*arguments)

        return act

    monkeypatch.setattr(Blocks, "play", mortal(Blocks.play))
    monkeypatch.setattr(tc, "run", lambda *args, **options: run(*args, **options, checkpoint_episodes=3))

    def play(name: str) -> experiment.Outcome:
        return experiment.play(experiment.Job("adversarial-1", "small", 12, 2, 2, tmp_path / name, False))

    report.write_experiment([play("whole")])
    for kills in range(1, 100):
        left[0] = (3, 2, 5, 4)[kills % 4]
        try:
            report.write_experiment([play("killed")])
            break
        except Killed:
            continue
    assert 10 < kills < 99
    files = [{path.relative_to(tmp_path / name): path for path in (tmp_path / name).rglob("*.csv")} for name in ("whole", "killed")]
    assert set(files[0]) == set(files[1]) and len(files[0]) == 8
    for name, path in files[0].items():
        assert path.read_bytes() == files[1][name].read_bytes(), name


@pytest.mark.slow
def test_the_command_killed_at_chosen_writes_is_as_if_it_never_was(tmp_path: Path) -> None:
    """`paper --quick` dies by SIGKILL in the middle of a write, again and again; its summaries are those of one that never did."""

    size = ["--instances", "2", "--runs", "2", "--episodes", "12", "--jobs", "1"]
    command = ["paper", "adversarial-1", "--quick", *size, "--logdir", str(tmp_path)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "TORCHCMDP_THREADS"), "1")
    root, writes = Path(__file__).parents[1], (4, 13, 37, 60)
    attempts = [sys.executable, "tests/kill_at.py", ",".join(map(str, (*writes, 0))), *command]
    environment = {**os.environ, **threads, "PYTHONPATH": str(root)}
    done = subprocess.run(attempts, cwd=root, env=environment, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0] + [-signal.SIGKILL] * len(writes) + [0], done.stderr

    def summaries(name: str) -> dict[str, bytes]:
        folder = tmp_path / f"{name}-quick"
        texts = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.csv")}
        return {**texts, "claims": (folder / "report-partial.md").read_bytes().partition(b"## Claims")[2]}

    whole, killed = summaries("whole"), summaries("killed")
    # in each of four families three own sequences, a recording and three replays; the summary and the claims
    assert len(whole) == 30 and whole["claims"]
    assert set(killed) == set(whole)
    assert [name for name in whole if killed[name] != whole[name]] == []


def test_workers_die_with_who_started_them(tmp_path: Path) -> None:
    """Or they would play on, and keep their folders from whoever continues."""
    command = [sys.executable, "-m", "train", "paper", "simplex-1", "--quick", "--episodes", "100000", "--jobs", "2"]
    started = subprocess.Popen([*command, "--logdir", str(tmp_path)], cwd=Path(__file__).parents[1], stderr=subprocess.PIPE)
    folder = tmp_path / "paper-quick" / "simplex-1"
    while started.poll() is None and len(list(folder.glob("*/wc-ops/config.json"))) < 2:
        time.sleep(0.1)
    started.kill()
    assert started.stderr is not None
    started.stderr.read()  # ends when nobody is left who could write to it
    assert started.wait() == -signal.SIGKILL
    for place in folder.glob("*/wc-ops"):
        RunFolder(place).close()  # nobody holds it


def test_after_sigterm_workers_save_and_begin_nothing_more(tmp_path: Path) -> None:
    """Not even what the pool has handed to them already."""
    command = [sys.executable, "-m", "train", "paper", "simplex-1", "simplex-2", "--quick", "--episodes", "3000000", "--jobs", "2"]
    root = Path(__file__).parents[1]
    started = subprocess.Popen([*command, "--logdir", str(tmp_path)], cwd=root, start_new_session=True)
    folder = tmp_path / "paper-quick"
    while started.poll() is None and len(list(folder.glob("*/*/wc-ops/metrics.csv"))) < 2:
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGTERM)
    assert started.wait() == 130
    begun = list(folder.glob("*/*/*/config.json"))
    assert len(begun) == 2
    assert all((config.parent / "checkpoint.pt").exists() for config in begun)


def play_and_hear_twice() -> None:
    """A run to which SIGTERM comes twice, one after the other."""
    env = tc.Simulator(cmdp := tc.two_path_cmdp(), tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1))
    learner = tc.Greedy.for_env(env, horizon=100)

    def heard(episodes: int) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)

    assert not tc.run(learner, env, 100, progress=False, on_progress=heard, engine="torch").completed


def test_a_process_that_somebody_started_may_hear_a_signal_twice() -> None:
    """Which its group was sent, and which who started it passes on: the second must not keep it from saving."""
    child = multiprocessing.get_context("spawn").Process(target=play_and_hear_twice)
    child.start()
    child.join()
    assert child.exitcode == 0
