"""Results: what they show, what is kept of them on disk, and how they come back."""

from __future__ import annotations

import io
import sys
import zipfile
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hedge import RUNS, Hedge, Killed, assert_same, interrupt, kill, make_env, play
from torch import Tensor

import torchcmdp as tc
from torchcmdp.run.stored import pack


def assert_equal(one: tc.RunResult, two: tc.RunResult) -> None:
    """To the last bit, and with the same types."""
    for field in fields(tc.RunResult):
        mine, other = getattr(one, field.name), getattr(two, field.name)
        if isinstance(mine, Tensor):
            assert mine.dtype == other.dtype and torch.equal(mine.nan_to_num(7), other.nan_to_num(7)), field.name
        elif field.name in ("bounds", "diagnostics", "counts"):
            assert mine.keys() == other.keys() and all(torch.equal(mine[tag], other[tag]) for tag in mine), field.name
        else:
            assert mine == other, field.name


def wcops(folder: Path | None = None, horizon: int = 6) -> tc.RunResult:
    env = make_env()
    return tc.run(tc.WCOPS.for_env(env, horizon=horizon), env, 6, folder, 2, progress=False, images=False)


def test_a_repr_is_one_short_line_with_the_numbers() -> None:
    result = play()
    shown = repr(result)
    assert len(shown) < 200 and "\n" not in shown and "tensor" not in shown
    assert "Hedge: 3 runs of 20 episodes, 5 points" in shown and f"regret {result.regret[:, -1].mean():,.4g} ±" in shown
    assert "interrupted" not in shown and "interrupted" in repr(play(at=6, action=interrupt))


def test_a_summary_has_the_three_numbers_with_intervals_and_the_statuses() -> None:
    result = play()
    lines = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in result.summary().splitlines()}
    for name in ("regret", "violation", "positive_violation"):
        mean, half = tc.mean_and_interval(getattr(result, name)[:, -1])
        assert lines[name.replace("_", " ")] == f"{mean:,.4g} ± {half:,.2g}"
    assert lines["learner"] == "Hedge" and lines["after episode"] == "20"
    assert lines["episodes with Solver/elastic"] == "30 of 60" and "episodes with Solver/iterations" not in lines
    assert "of episodes" in play(at=6, action=interrupt).summary()


@pytest.mark.filterwarnings("ignore:WCOPS was made for a horizon")
def test_a_summary_counts_what_went_wrong() -> None:
    assert "episodes with Learner/past_horizon   6 of 18" in wcops(horizon=4).summary()
    assert "episodes with Solver/max_iterations" in wcops().summary() and "past_horizon" not in wcops().summary()


def test_a_plot_has_three_panels_and_goes_to_a_file(tmp_path: Path) -> None:
    figure = play().plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    titles = [axes.get_ylabel() for axes in figure.axes]
    assert [title.partition(" (")[0] for title in titles] == [
        "cumulative regret", "cumulative violation", "cumulative positive violation",
    ]  # fmt: skip
    assert play().plot().axes


@pytest.mark.parametrize("kind", ["one", "several", "by label"])
def test_plot_curves_takes_results(tmp_path: Path, kind: str) -> None:
    result = play()
    tc.plot_curves(tmp_path / "a.png", {"one": result, "several": [result, play(rate=0.5)], "by label": {"a": result}}[kind])
    assert (tmp_path / "a.png").exists()


def test_plot_curves_says_what_it_wants(tmp_path: Path) -> None:
    for wrong in (None, [], [1], "text"):
        with pytest.raises(tc.InvalidInput, match="expected results of runs, or curves or results by label"):
            tc.plot_curves(tmp_path / "a.png", wrong)
    with pytest.raises(tc.InvalidInput, match="without a ylabel"):
        tc.plot_curves(tmp_path / "a.png", {"a": (np.arange(3), np.ones(3))})


def test_a_table_for_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in, which need not be installed to be called."""
    pandas: Any = ModuleType("pandas")
    pandas.DataFrame = lambda columns, index: (columns, index)
    pandas.MultiIndex = type("MultiIndex", (), {"from_product": staticmethod(lambda axes, names: (list(map(list, axes)), names))})
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    result = play()
    columns, index = result.to_pandas()
    assert index == ([[0, 1, 2], [4, 8, 12, 16, 20]], ["run", "episode"])
    assert columns["regret"].reshape(RUNS, 5).tolist() == result.regret.tolist()
    assert columns["violation_1"].reshape(RUNS, 5).tolist() == result.violation_by_constraint[..., 1].tolist()
    assert {len(values) for values in columns.values()} == {15}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(tc.TorchCMDPError, match=r"needs pandas, which is not installed: pip install 'torchcmdp\[pandas\]'"):
        result.to_pandas()


def test_a_finished_run_comes_back_from_its_folder(tmp_path: Path) -> None:
    result = wcops(tmp_path)
    assert_equal(tc.load(tmp_path), result)
    assert_equal(tc.load(str(tmp_path)), result)


def test_an_interrupted_run_comes_back_as_it_was_left(tmp_path: Path) -> None:
    part = play(tmp_path / "asked", at=6, action=interrupt)
    assert not part.completed
    assert_equal(tc.load(tmp_path / "asked"), part)
    with pytest.raises(Killed):
        play(tmp_path / "killed", at=15, action=kill, checkpoint_episodes=9)
    found = tc.load(tmp_path / "killed")
    assert found.episodes.tolist() == [4, 8] and not found.completed
    whole = play()
    assert torch.equal(found.regret, whole.regret[:, :2])
    play(tmp_path / "killed")
    assert_same(tc.load(tmp_path / "killed"), whole)


def test_a_folder_without_a_checkpoint_or_with_a_damaged_one_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        play(tmp_path / "young", at=3, action=kill)
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "young"):
        with pytest.raises(tc.RunFolderError, match="holds no run that has come to a checkpoint"):
            tc.load(folder)
    play(tmp_path)
    path = tmp_path / "curves.npz"
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], content[:500] + b"x" + content[501:]):
        path.write_bytes(damaged)
        with pytest.raises(tc.RunFolderError, match="cannot be read") as caught:
            tc.load(tmp_path)
        assert "\n" not in str(caught.value)


def test_starting_over_forgets_the_curves(tmp_path: Path) -> None:
    play(tmp_path)
    with pytest.raises(Killed):
        play(tmp_path, at=2, action=kill, fresh=True)
    assert not (tmp_path / "curves.npz").exists()


def test_curves_are_compressed() -> None:
    with zipfile.ZipFile(io.BytesIO(pack(play()))) as archive:
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_DEFLATED}


BOUNDS = {"regret", "violation", "positive_violation"}


@pytest.mark.parametrize(
    ("kind", "own"), [(tc.WCOPS, BOUNDS), (tc.UOBREPS, {"regret"}), (tc.OptCMDP, set()), (tc.PDBPS, set()), (tc.Greedy, set())]
)
def test_a_theorem_is_drawn_for_those_who_have_it(tmp_path: Path, kind: Any, own: set[str]) -> None:
    env = make_env()
    learner = kind.for_env(env, horizon=3)
    result = tc.run(learner, env, 3, tmp_path, 1, progress=False, images=False)
    assert set(result.bounds) == {"trivial", *own}
    columns = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {name for name in columns if name.startswith("Theory/")} == {f"Theory/{name}" for name in ("trivial", *own)}
    drawn = [any("theorem" in text.get_text() for text in axes.texts) for axes in result.plot().axes]
    assert drawn == [name in own for name in ("regret", "violation", "positive_violation")]


def test_where_only_some_have_a_theorem_the_figure_says_who() -> None:
    from torchcmdp.plotting import bounds_of

    ours, other = wcops(), play(episodes=6, log_every=2)
    assert list(bounds_of({"a": ours}, "regret")) == ["trivial bound", "theorem's bound"]
    assert list(bounds_of({"b": other, "a": ours}, "regret")) == ["trivial bound", "theorem's bound for a"]
    assert list(bounds_of({"b": other}, "regret")) == ["trivial bound"]


def test_a_learner_of_somebodys_own_may_declare_a_theorem() -> None:
    class Proven(Hedge):
        theorems = ("violation",)

    env = make_env()
    assert set(tc.run(Proven(env.layout), env, 2, progress=False).bounds) == {"trivial", "violation"}
