"""Figures: what is drawn, what is left out and said in words instead, and what is refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from torchcmdp.errors import InvalidInput
from torchcmdp.plotting import PALETTE, Panel, draw, figures, plot_curves, save

EPISODES = np.arange(10, 1010, 10)
VALUES = np.sqrt(EPISODES) * np.array([[1.0], [2.0], [3.0]])


def labels(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_the_line_is_the_mean_and_the_band_its_interval():
    axes = draw([Panel({"a": (EPISODES, VALUES)}, "y")]).axes[0]
    line = next(line for line in axes.get_lines() if line.get_label() == "a")
    np.testing.assert_allclose(line.get_ydata(), 2 * np.sqrt(EPISODES))
    half = 4.302653 / 3**0.5 * np.sqrt(EPISODES)  # the runs' standard deviation is sqrt(t); Student's t with two degrees of freedom
    top = axes.collections[0].get_datalim(axes.transData).y1
    assert top == pytest.approx(float((2 * np.sqrt(EPISODES) + half)[-1]), rel=1e-6)


def test_a_single_run_has_a_line_and_no_band():
    axes = draw([Panel({"a": (EPISODES, VALUES[0])}, "y")]).axes[0]
    box = axes.collections[0].get_datalim(axes.transData)
    assert np.isfinite([box.y0, box.y1]).all() and axes.get_ylim()[1] < 1.1 * VALUES[0].max()


def test_a_bound_that_fits_is_drawn_and_one_that_does_not_is_told():
    bounds = {"near": (EPISODES, 1.5 * np.sqrt(EPISODES)), "far": (EPISODES, 1e5 * np.sqrt(EPISODES))}
    figure = draw([Panel({"a": (EPISODES, VALUES)}, "y", bounds=bounds)])
    assert "near" in labels(figure) and "far: 3.2e6 at the end (off scale)" in labels(figure)
    drawn = [line.get_label() for line in figure.axes[0].get_lines() if len(line.get_xdata())]
    assert "near" in drawn and not any(label.startswith("far") for label in drawn)


def test_bounds_do_not_move_the_axes():
    bounds = {"far": (EPISODES, 1e5 * np.sqrt(EPISODES)), "leaving": (EPISODES, 0.5 * EPISODES)}
    with_bounds = draw([Panel({"a": (EPISODES, VALUES)}, "y", bounds=bounds)]).axes[0]
    without = draw([Panel({"a": (EPISODES, VALUES)}, "y")]).axes[0]
    assert with_bounds.get_ylim() == without.get_ylim() and with_bounds.get_xlim() == without.get_xlim()


def test_negative_curves_and_curves_without_a_value_are_shown():
    axes = draw([Panel({"a": (EPISODES, -VALUES), "none": (EPISODES, np.full_like(VALUES, np.nan))}, "y")]).axes[0]
    low, high = axes.get_ylim()
    assert low < -VALUES.mean(0).max() and 0 < high < -low


def test_the_guide_meets_the_last_point():
    axes = draw([Panel({"a": (EPISODES, VALUES)}, "y", sqrt_guide=True)]).axes[0]
    guide = next(line for line in axes.get_lines() if "sqrt" in str(line.get_label()))
    assert guide.get_ydata()[-1] == pytest.approx(VALUES[:, -1].mean())


def test_numbers_have_thousands_separators_and_curves_their_own_colours():
    axes = draw([Panel({"a": (EPISODES * 100, VALUES), "b": (EPISODES * 100, 2 * VALUES)}, "y", title="t")]).axes[0]
    assert axes.xaxis.get_major_formatter()(20000, 0) == "20,000"
    assert [line.get_color() for line in axes.get_lines()] == list(PALETTE[:2])
    assert axes.get_title(loc="left") == "t" and axes.get_xlabel() == "episode" and axes.get_ylabel() == "y"


def test_an_image_is_written_without_pyplot(tmp_path):
    pyplot_before = "matplotlib.pyplot" in sys.modules
    plot_curves(tmp_path / "a.png", {"a": (torch.from_numpy(EPISODES), torch.from_numpy(VALUES))}, "y")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == pyplot_before


def test_figures_have_one_curve_a_result():
    ones = np.ones(len(EPISODES))
    bounds = dict.fromkeys(("regret", "violation", "positive_violation", "trivial"), 1e9 * ones)
    result = SimpleNamespace(episodes=EPISODES, regret=VALUES, violation=-VALUES, positive_violation=VALUES, bounds=bounds)
    both = figures({"one": result, "two": result})
    assert set(both) == {"regret", "violation"} and len(both["violation"].axes) == 2
    assert labels(both["regret"])[:2] == ["one, 3 runs", "two, 3 runs"]


def test_wrong_shapes_and_places_get_a_sentence(tmp_path):
    with pytest.raises(InvalidInput, match=r"'a' has episodes of shape \(100,\) and values of shape \(3, 99\)"):
        draw([Panel({"a": (EPISODES, VALUES[:, 1:])}, "y")])
    with pytest.raises(InvalidInput, match="no curves"):
        draw([Panel({}, "y")])
    with pytest.raises(InvalidInput, match="no panels"):
        draw([])
    with pytest.raises(InvalidInput, match="cannot be written"):
        save(tmp_path / "nowhere" / "a.png", draw([Panel({"a": (EPISODES, VALUES)}, "y")]))
