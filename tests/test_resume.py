"""What a run survives: SIGKILL at any moment, SIGTERM, full disks, strange files; and what it costs to run for long."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hedge import Killed, assert_same, curves, equal, kill, play, read, steps, table
from helpers import SMALL_JOB

from torchcmdp.errors import RunFolderError
from torchcmdp.events import EVENTS
from torchcmdp.folder import RunFolder
from torchcmdp.run.options import MOST_POINTS, RunOptions
from train.program import experiment_folder

ROOT = Path(__file__).parents[1]
HERE = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHCMDP_THREADS": "1", "PYTHONPATH": str(ROOT)}
SMALL = [*SMALL_JOB, "--episodes", "600", "--runs", "2", "--log-every", "30"]


def python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=HERE, capture_output=True, text=True, **options)


@pytest.mark.slow
def test_a_run_killed_many_times_is_as_if_it_never_was(tmp_path):
    kills = 22
    done = python("tests/kill_often.py", str(tmp_path), str(kills), *SMALL, "--checkpoint-episodes", "7")
    assert done.returncode == 0, done.stderr
    safe = json.loads(done.stdout.splitlines()[-1])
    assert len(safe) == kills and len(set(safe)) >= 5  # they died in different places
    whole, killed = tmp_path / "whole" / "wc-ops", tmp_path / "killed" / "wc-ops"
    for name in ("metrics.csv", "config.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert curves(killed) == curves(whole)
    assert steps(read(killed), "Time/episodes_per_second") == list(range(30, 601, 30))
    one, two = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (whole, killed))
    assert all(equal(one[key], two[key]) for key in one if key not in ("seconds", "extras", "checksum"))
    summaries = [(tmp_path / name / "summary.txt").read_text().splitlines()[:-1] for name in ("whole", "killed")]
    assert summaries[0] == summaries[1]  # the last line is the time
    assert sorted(file.name for file in killed.iterdir() if not file.match(EVENTS)) == [
        "checkpoint.pt",
        "config.json",
        "curves.npz",
        "metrics.csv",
    ]
    assert len(list(killed.glob(EVENTS))) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_writes_a_last_checkpoint(tmp_path, number):
    before = signal.getsignal(number)
    part = play(tmp_path, at=6, action=lambda: os.kill(os.getpid(), number))
    assert signal.getsignal(number) is before and not part.completed
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["played"] == 6
    assert_same(play(tmp_path), play())


def test_checkpoints_are_written_every_so_many_episodes(tmp_path):
    with pytest.raises(Killed):
        play(tmp_path, at=15, action=kill, checkpoint_episodes=6)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["played"] == 12
    assert_same(play(tmp_path, checkpoint_episodes=5), play())


def test_curves_are_whole_although_the_events_were_damaged_or_lost(tmp_path):
    play(tmp_path / "whole")
    for j, damage in enumerate((lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-5]))):
        folder = tmp_path / str(j)
        with pytest.raises(Killed):
            play(folder, at=15, action=kill, checkpoint_episodes=13)
        (events,) = folder.glob(EVENTS)
        damage(events)
        (folder / f"{EVENTS[:-1]}9999999999.elsewhere.1").write_bytes(
            events.read_bytes() if events.exists() else b""
        )  # a clock ahead
        play(folder)
        assert curves(folder) == curves(tmp_path / "whole")


def test_two_processes_do_not_share_a_folder(tmp_path):
    with pytest.raises(Killed):
        play(tmp_path, at=6, action=kill, checkpoint_every=0)
    first = RunFolder(tmp_path)
    with pytest.raises(RunFolderError, match="in use by another process"):
        play(tmp_path)
    first.close()
    assert_same(play(tmp_path), play())


class FullDisk:
    """`open` for files of one name on a disk that is full: the first few bytes still fit."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, path, mode="r", *arguments, **options):
        file = open(path, mode, *arguments, **options)
        return Full(file) if self.name in str(path) and "r" not in mode else file


class Full:
    def __init__(self, file) -> None:
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.file.close()

    def write(self, content) -> None:
        self.file.write(bytes(content)[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["checkpoint.pt", "metrics.csv", ".events.out", "tfevents", "config.json"])
def test_a_full_disk_gets_a_sentence_and_what_was_saved_stays(tmp_path, monkeypatch, name):
    with pytest.raises(Killed):
        play(tmp_path, at=15, action=kill, checkpoint_episodes=13)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with monkeypatch.context() as patch, pytest.raises(RunFolderError) as caught:
        patch.setattr("torchcmdp.files.open", FullDisk(name), raising=False)
        play(tmp_path, checkpoint_every=0)
    sentence = str(caught.value)
    assert "No space left on device" in sentence and "the same command continues" in sentence and "\n" not in sentence
    assert str(tmp_path) in sentence
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["played"]
    assert saved == 13 if name != "tfevents" else saved == 15  # the events fail at the point of episode 16
    assert (tmp_path / "metrics.csv").read_bytes()[:200] == before["metrics.csv"][:200]
    assert not list(tmp_path.glob(".*.tmp"))
    assert_same(play(tmp_path), play())
    assert [row["episode"] for row in table(tmp_path)] == ["4", "8", "12", "16", "20"]
    assert steps(read(tmp_path), "Regret/cumulative") == [4, 8, 12, 16, 20]


@pytest.mark.slow
def test_the_command_line_says_in_one_sentence_that_the_disk_is_full(tmp_path):
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, -1)); "
    limited += "from train.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = python("-c", limited, *SMALL, "--logdir", str(tmp_path), "--checkpoint-episodes", "7")
    (sentence,) = [line for line in done.stderr.splitlines() if not line.startswith("WC-OPS, ")]
    assert done.returncode == 2 and done.stdout == ""
    assert "cannot be written (File too large)" in sentence and str(tmp_path / "alone" / "wc-ops") in sentence


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("zipped", [True, False])
def test_reading_a_folder_executes_no_code(tmp_path, zipped):
    play(tmp_path / "run")
    path, proof = tmp_path / "run" / "checkpoint.pt", tmp_path / "executed"
    content = {**torch.load(path, weights_only=True), "learner": Malicious(proof)}
    if zipped:
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    with pytest.raises(RunFolderError, match="cannot be read"):
        play(tmp_path / "run")
    assert not proof.exists()
    torch.load(path, weights_only=False) if zipped else pickle.loads(path.read_bytes())
    assert proof.exists()  # that would have executed it


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../b", "/etc", "a\\b", "a\0b"])
def test_a_name_does_not_lead_out_of_the_log_directory(tmp_path, name):
    with pytest.raises(ValueError, match="must be one plain folder name"):
        experiment_folder(str(tmp_path), name)
    assert experiment_folder(str(tmp_path), "plain").parent == tmp_path


def test_points_are_thinned_to_a_stated_number():
    with pytest.warns(UserWarning, match=r"log_every is 1, .* 1,000,000 logging points; every 100 episodes"):
        assert RunOptions(log_every=1).spacing(1_000_000) == 100
    for episodes in (1, 199, 200, 399, 20_000, 1_000_003):
        assert episodes / RunOptions().spacing(episodes) < 400
    assert RunOptions(log_every=1).spacing(MOST_POINTS) == 1


MEMORY = """
import resource, sys, tempfile
import torchcmdp as tc

cmdp = tc.random_cmdp((1, 2, 1), 2, 1, seed=0)

def peak(episodes):
    env = tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1), runs=256)
    learner, folder = tc.WCOPS(cmdp.layout, 1, 10_000, runs=256), tempfile.mkdtemp(dir=sys.argv[1])
    tc.run(learner, env, episodes, folder, episodes // 20, progress=False, images=False, checkpoint_episodes=episodes // 10)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

peak(60)
print(peak(60), peak(1200))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_episodes(tmp_path):
    done = python("-c", MEMORY, str(tmp_path))
    assert done.returncode == 0, done.stderr
    short, long = map(int, done.stdout.split())  # kB
    # the trajectories of 1,140 more episodes would be 256 runs x 2 layers x 5 numbers x 8 bytes each, 23 MB
    assert long - short < 10_000
