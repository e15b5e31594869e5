"""The sweep: the same seeds for every combination, chunks that change nothing, and the front."""

from __future__ import annotations

import csv

import pytest
import torch
from hedge import read
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor

import torchcmdp as tc
from torchcmdp.events import shown
from train import program, sweep
from train.__main__ import main

SMALL = ["--episodes", "40", "--widths", "1", "2", "1", "--actions", "2", "--constraints", "1"]
GRID = ["--eta", "0.1", "0.3", "--bonus-scale", "0.01", "0.1", "--seeds", "3"]


def call(logdir, *more: str) -> int:
    return main(["sweep", *SMALL, *GRID, "--logdir", str(logdir), *more])


def rows(logdir, name: str = "sweep") -> list[dict[str, str]]:
    with open(logdir / name / "sweep.csv") as file:
        return list(csv.DictReader(file))


def test_a_combination_is_what_wc_ops_does_with_it_alone(tmp_path, capsys):
    assert call(tmp_path) == 0
    found = rows(tmp_path)
    assert [(row["eta"], row["bonus_scale"]) for row in found] == [("0.1", "0.01"), ("0.1", "0.1"), ("0.3", "0.01"), ("0.3", "0.1")]
    cmdp = tc.random_cmdp((1, 2, 1), 2, 1, seed=0)
    for row in found:  # every combination with runs 0, 1, 2: the same seeds
        env = tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1), runs=3, seed=0)
        alone = tc.WCOPS(cmdp.layout, 1, 40, runs=3, eta=float(row["eta"]), bonus_scale=float(row["bonus_scale"]))
        result = tc.run(alone, env, 40, progress=False)
        for name in ("regret", "violation", "positive_violation"):
            mean, half = tc.mean_and_interval(getattr(result, name)[:, -1])
            assert float(row[name]) == pytest.approx(float(mean), abs=1e-9)
            assert float(row[f"{name}_ci95"]) == pytest.approx(float(half), abs=1e-9)


@pytest.mark.parametrize("learner", ["s-ops", "ma-ops", "dope"])
def test_a_combination_of_a_learner_with_a_baseline_is_what_it_does_alone(tmp_path, capsys, learner):
    arguments = ["sweep", *SMALL, "--learner", learner, "--radius-scale", "0.001", "1", "--bonus-scale", "0.001", "--seeds", "3"]
    assert main([*arguments, "--logdir", str(tmp_path)]) == 0
    found, cmdp = rows(tmp_path), tc.random_cmdp((1, 2, 1), 2, 1, seed=0)
    assert float(found[0]["baseline_fraction"]) < float(found[1]["baseline_fraction"])
    assert ("elastic_fraction" in found[0]) == (learner != "dope") and "cap_scale" not in found[0]
    for row in found:
        env = tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1), runs=3, seed=0)
        scales = {"radius_scale": float(row["radius_scale"]), "bonus_scale": 0.001}
        alone = tc.LEARNERS[learner].for_env(env, horizon=40, baseline=tc.baseline(cmdp), **scales)
        result = tc.run(alone, env, 40, progress=False)
        for name in ("regret", "violation", "positive_violation"):
            assert float(row[name]) == pytest.approx(float(getattr(result, name)[:, -1].mean()), abs=1e-9)
        assert float(row["baseline_fraction"]) == pytest.approx(float(result.diagnostics["Learner/on_baseline"].mean()))
    out = capsys.readouterr().out
    assert main([*arguments, "--logdir", str(tmp_path)]) == 0 and capsys.readouterr().out == out


def test_every_learner_with_settings_can_be_swept(tmp_path, capsys):
    for learner in ("uob-reps", "opt-cmdp", "opt-primal-dual", "pdb-ps"):
        arguments = ["--learner", learner, "--radius-scale", "0.1", "1", "--seeds", "2", "--name", learner]
        assert main(["sweep", *SMALL, "--episodes", "3", *arguments, "--logdir", str(tmp_path)]) == 0
        assert len(rows(tmp_path, learner)) == 2


def test_chunks_change_nothing_and_are_announced(tmp_path, capsys):
    assert call(tmp_path) == 0
    assert "= 12 runs of 40 episodes" in capsys.readouterr().err
    size = program.bytes_per_run(tc.Layout((1, 2, 1), 2), 1, sweep.POINTS)
    assert call(tmp_path, "--name", "parts", "--memory", str(5.5 * size / 2**30)) == 0
    assert "in 3 chunk(s)" in capsys.readouterr().err
    assert sorted(f.name for f in (tmp_path / "parts" / "chunks").iterdir()) == ["0-3", "4-7", "8-11"]
    for whole, parts in zip(rows(tmp_path), rows(tmp_path, "parts"), strict=True):
        assert whole.keys() == parts.keys() and whole["front"] == parts["front"]
        assert [float(whole[k] or 0) for k in whole] == pytest.approx([float(parts[k] or 0) for k in whole], abs=1e-9)


def test_an_interrupted_sweep_continues_and_a_finished_one_is_not_played_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHCMDP_ENGINE", "torch")  # which calls `update` once an episode
    assert call(tmp_path) == 0
    table, whole = capsys.readouterr().out, rows(tmp_path)
    run = tc.run_split

    def interrupted(make, *arguments, **options):
        """The chunk of run 6 is interrupted in the middle."""

        def make_mortal(runs, offset):
            learner, env = make(runs, offset)
            update = learner.update

            def stop(trajectory):
                update(trajectory)
                if env.first_run == 6 and int(learner.episode) == 20:
                    raise KeyboardInterrupt

            learner.update = stop
            return learner, env

        return run(make_mortal, *arguments, checkpoint_every=0.0, **options)

    size = str(6.5 * program.bytes_per_run(tc.Layout((1, 2, 1), 2), 1, sweep.POINTS) / 2**30)
    monkeypatch.setattr(tc, "run_split", interrupted)
    assert call(tmp_path, "--name", "cut", "--memory", size) == 130
    monkeypatch.setattr(tc, "run_split", run)
    steps = []
    update = tc.WCOPS.update
    monkeypatch.setattr(tc.WCOPS, "update", lambda self, trajectory: steps.append(1) or update(self, trajectory))
    assert call(tmp_path, "--name", "cut", "--memory", size) == 0
    assert len(steps) == 21  # the episode that was cut short, and the other half of the second chunk
    numbers = [[float(row[name]) for name in ("regret", "violation")] for row in rows(tmp_path, "cut")]
    assert numbers == [pytest.approx([float(row[name]) for name in ("regret", "violation")], abs=1e-9) for row in whole]
    steps.clear()
    capsys.readouterr()
    assert call(tmp_path) == 0
    assert capsys.readouterr().out == table and steps == []


def test_every_combination_is_an_entry_of_the_hparams_tab(tmp_path, capsys):
    assert call(tmp_path) == 0
    folders = sorted((tmp_path / "sweep" / "grid").iterdir())
    assert [f.name for f in folders][0] == "eta=0.1,bonus_scale=0.01" and len(folders) == 4
    assert list(tmp_path.glob("sweep/chunks/*/events*")) == []  # a mean over different settings would mean nothing
    for folder, row in zip(folders, rows(tmp_path), strict=True):
        events = read(folder)
        content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        hparams = HParamsPluginData.FromString(content).session_start_info.hparams
        assert hparams["eta"].number_value == float(row["eta"])
        assert hparams["bonus_scale"].number_value == float(row["bonus_scale"])
        assert events.Scalars(shown("Violation/cumulative"))[-1].value == pytest.approx(float(row["violation"]), rel=1e-5)
        assert events.Scalars(shown("Regret/cumulative"))[-1].step == 40


def dominated(points: Tensor, j: int) -> bool:
    x, y = points[j].tolist()
    return any(a <= x and b <= y and (a < x or b < y) for a, b in points.tolist())


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_the_front_is_what_no_other_beats(values):
    points = torch.tensor(values, dtype=torch.float64)
    front = sweep.pareto_front(points)
    assert sorted(front) == [j for j in range(len(points)) if not dominated(points, j)]
    assert [points[j, 1] for j in front] == sorted(points[j, 1] for j in front)


def test_a_point_without_a_regret_is_not_on_the_front():
    assert sweep.pareto_front(torch.tensor([[torch.nan, 0.0], [1.0, 1.0]])) == [1]


def test_the_front_is_printed_and_drawn(tmp_path, capsys):
    assert call(tmp_path) == 0
    out = capsys.readouterr().out
    front = [row for row in rows(tmp_path) if row["front"]]
    assert f"{len(front)} of 4 combinations" in out and "+-" in out
    assert (tmp_path / "sweep" / "front.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "arguments", [["--seeds", "1"], ["--cap-scale", "1", "2", "--gamma", "0.1", "0.2"], ["--constraints", "0"]]
)
def test_odd_sweeps_work(tmp_path, capsys, arguments):
    assert call(tmp_path, "--episodes", "5", *arguments) == 0


def test_other_settings_need_fresh_or_another_name(tmp_path, capsys):
    assert call(tmp_path, "--episodes", "5") == 0
    assert call(tmp_path, "--episodes", "5", "--delta", "0.1") == 2
    assert "delta = 0.01" in capsys.readouterr().err
    assert call(tmp_path, "--episodes", "5", "--delta", "0.1", "--fresh") == 0
    assert call(tmp_path, "--episodes", "5", "--delta", "0.1", "--memory", "1") == 0  # how it is played is not what it is


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--eta", "0.1", "--bonus-scale", "1"], "give an option several values"),
        (["--memory", "1e-9"], "too little for one run"),
        (["--eta", "0.1", "x"], "--eta got '0.1 x'; expected numbers separated by spaces."),
        (["--eta", "0.1", "-1"], "--eta is -1"),
        (["--bonus-scale", "0.1", "nan"], "--bonus-scale is nan"),
        (["--seeds", "0"], "--seeds is 0"),
        (["--learner", "opt-cmdp"], "--eta is not a setting of opt-cmdp, which takes --bonus-scale, --radius-scale."),
        (["--baseline-share", "0.5"], "--baseline-share belongs to s-ops, ma-ops and dope, and --learner is wc-ops."),
        (["--learner", "s-ops", "--baseline-share", "2"], "--baseline-share is 2; it must be greater than zero and at most 1."),
        (["--memory", "inf"], "--memory is inf; it must be a finite number."),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, capsys, arguments, sentence):
    assert call(tmp_path, *arguments) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint and complaint.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
