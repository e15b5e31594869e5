"""A batch divided over torchrun's processes: the same bits and the same files as in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hedge import assert_same, curves, equal
from split_worker import KINDS, MAIN_JOB, RUNS, play

import torchcmdp as tc
from torchcmdp.distributed import Crew, join, local_device, process_rank, run_axes
from torchcmdp.errors import InvalidInput
from torchcmdp.run import run_split
from train.__main__ import main as train

# with constants small enough to leave a baseline within 20 episodes, what was seen may refute its bounds
pytestmark = pytest.mark.filterwarnings("ignore:what was seen refutes:UserWarning")
ROOT = Path(__file__).parents[1]
HERE = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHCMDP_THREADS": "1", "PYTHONPATH": str(ROOT)}
HERE["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # with it --max-restarts works (pytorch/pytorch#135712)


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    return subprocess.run(command, cwd=ROOT, env=HERE, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Path:
    """The folders that `split_worker` writes with two processes; it finds runs that one process has begun."""
    folder = tmp_path_factory.mktemp("split")
    for kind in KINDS:
        assert not play(kind, folder / kind / "moved", at=7).completed
    done = torchrun("tests/split_worker.py", str(folder))
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    return folder


def same_files(one: Path, two: Path) -> None:
    for name in ("metrics.csv", "config.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert curves(one) == curves(two)
    states = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (one, two)]
    assert all(equal(states[0][key], states[1][key]) for key in states[0] if key not in ("seconds", "extras", "checksum"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_write_what_one_writes(split, tmp_path, kind):
    whole = play(kind, tmp_path / "one")
    for name in ("whole", "stopped-twice", "moved"):  # the last was begun by one process
        same_files(split / kind / name, tmp_path / "one")
    for name in ("whole", "stopped"):  # and one process continues what two have begun
        assert_same(play(kind, split / kind / name), whole)
    same_files(split / kind / "stopped", tmp_path / "one")
    second = torch.load(split / kind / "second.pt", weights_only=True)
    assert torch.equal(second["regret"], whole.regret) and torch.equal(second["rho"], whole.rho)
    assert equal(second["counts"], whole.counts)


@pytest.mark.slow
def test_all_processes_are_told_that_a_folder_is_refused(split):
    sentences = [(split / f"refused-{rank}").read_text() for rank in range(2)]
    assert sentences[0] == sentences[1] and "holds a run with" in sentences[0]


@pytest.mark.slow
def test_a_killed_process_ends_the_job_and_a_restart_resumes(tmp_path):
    done = torchrun("--max-restarts", "1", "tests/split_worker.py", "killed", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    assert "has lost touch with the others" in done.stderr and "continues from the last checkpoint" in done.stderr
    play("own-cmdps", tmp_path / "one")
    same_files(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_the_main_job_under_torchrun(split):
    assert train([*MAIN_JOB, "--logdir", str(split / "main-job"), "--name", "one"]) == 0
    same_files(split / "main-job" / "two" / "wc-ops", split / "main-job" / "one" / "wc-ops")
    assert (split / "stdout").read_text().count("after episode") == 1  # one process speaks for all
    pictures = {f"{name}.{kind}" for name in ("curves", "growth", "balance") for kind in ("png", "pdf")}
    written = {file.name for file in (split / "main-job" / "two").iterdir() if not file.name.startswith("events.")}
    assert written == {*pictures, "summary.txt", "wc-ops"}


def test_without_torchrun_one_process_plays_all(tmp_path):
    crew = Crew(RUNS)
    assert (crew.rank, crew.size, crew.first_run, crew.own_runs, crew.leads) == (0, 1, 0, RUNS, True)
    values = torch.arange(6.0).view(3, 2)
    assert (
        torch.equal(crew.stack(values), values) and crew.tell(3) == [3] and crew.collect(3) == [3] and crew.deal(lambda: [4]) == 4
    )
    assert process_rank() == 0 and local_device("cuda") == "cuda"


def test_shares_are_consecutive_and_differ_by_one_at_most(monkeypatch):
    for runs, size in ((5, 2), (7, 3), (8, 4), (3, 3)):
        crews = []
        for rank in range(size):
            monkeypatch.setattr("torchcmdp.distributed.under_torchrun", lambda: True)
            monkeypatch.setattr("torchcmdp.distributed._connect", lambda rank=rank, size=size: (rank, size))
            crews.append(Crew(runs))
        played = [run for crew in crews for run in range(crew.first_run, crew.first_run + crew.own_runs)]
        assert played == list(range(runs)) and max(c.own_runs for c in crews) - min(c.own_runs for c in crews) <= 1
    with pytest.raises(InvalidInput, match="2 runs cannot be divided over 3 processes"):
        Crew(2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_divided_and_joined_is_the_same(tmp_path, monkeypatch, kind):
    play(kind, tmp_path, at=10)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    monkeypatch.setattr("torchcmdp.distributed.under_torchrun", lambda: True)
    monkeypatch.setattr("torchcmdp.distributed._connect", lambda: (0, 2))
    crew = Crew(RUNS)
    parts = crew.divide(state, state["axes"])
    assert equal(join(parts, state["axes"]), state)
    assert [part["learner"]["visits"].shape[0] for part in parts] == [3, 2]
    assert [part["tracker"]["points"].shape[1] for part in parts] == [3, 2]


class Sideways:
    """A part of a run whose state has the runs on its second axis."""

    def state_dict(self):
        return {"scores": torch.arange(10.0).view(2, 5), "seen": torch.arange(3)}

    def state_axes(self):
        return {"scores": 1, "seen": None}


def test_a_part_says_where_its_runs_are(monkeypatch):
    monkeypatch.setattr("torchcmdp.distributed.under_torchrun", lambda: True)
    monkeypatch.setattr("torchcmdp.distributed._connect", lambda: (0, 2))
    state = Sideways().state_dict()
    axes = run_axes(Sideways(), state)
    parts = Crew(RUNS).divide(state, axes)
    assert [part["scores"].tolist() for part in parts] == [[[0, 1, 2], [5, 6, 7]], [[3, 4], [8, 9]]]
    assert equal(join(parts, axes), state)
    assert run_axes(object(), state) == {"scores": 0, "seen": 0}  # who does not say has them first
    with pytest.raises(InvalidInput, match=r"state_axes of Sideways has \['scores', 'seen'\]; its state has \['scores'\]"):
        run_axes(Sideways(), {"scores": state["scores"]})


def test_an_occupancy_does_not_depend_on_its_place_in_the_batch():
    for widths in ((1, 2, 3, 1), (1, 3, 7, 2, 1), (1, 20, 20, 1)):
        cmdp = tc.random_cmdp(widths, 3, 1, seed=0)
        weights = torch.rand(13, *cmdp.layout.pair_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        policy = weights / weights.sum(-1, keepdim=True) * cmdp.layout.pair_mask()
        whole = tc.pair_occupancy_of(policy, cmdp.transitions)
        for start in range(13):
            assert torch.equal(tc.pair_occupancy_of(policy[start:], cmdp.transitions), whole[start:])
            assert torch.equal(tc.pair_occupancy_of(policy[start : start + 1], cmdp.transitions), whole[start : start + 1])


def test_make_must_give_the_runs_it_is_asked_for():
    with pytest.raises(InvalidInput, match=r"make\(4, 0\) gave a simulator of 3 runs; expected 4"):
        run_split(lambda runs, first_run: KINDS["own-cmdps"](3, 0), 4, 10)
