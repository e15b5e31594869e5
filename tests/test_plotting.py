"""Figures: what is drawn, what is left out and said in words instead, and what is refused."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.text import Text

from torchcmdp.errors import InvalidInput
from torchcmdp.learners import LEARNERS
from torchcmdp.plotting import Panel, balance, draw, figures, growth_panels, overview, panels, plot_curves, save
from torchcmdp.plotting.style import COLOURS, GREY, PALETTE, SMALL, blank, fill, learner_of, looks, name_points

EPISODES = np.arange(10, 1010, 10)
VALUES = np.sqrt(EPISODES) * np.array([[1.0], [2.0], [3.0]])


def words(figure) -> str:
    """All that is written inside and below the first axes."""
    return " ".join(" ".join(text.get_text().split()) for text in figure.axes[0].texts)


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
    assert "near" in words(figure) and "far: 3.2e6 at the end (off scale)" in words(figure)
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
    assert any(list(line.get_ydata()) == [0, 0] for line in axes.get_lines())  # against a zero line
    assert "none: undefined" in words(axes.figure)


def test_the_guide_meets_the_last_point():
    axes = draw([Panel({"a": (EPISODES, VALUES)}, "y", sqrt_guide=True)]).axes[0]
    guide = next(line for line in axes.get_lines() if "sqrt" in str(line.get_label()))
    assert guide.get_ydata()[-1] == pytest.approx(VALUES[:, -1].mean())


def test_numbers_have_thousands_separators_and_curves_their_own_colours():
    axes = draw([Panel({"a": (EPISODES * 100, VALUES), "b": (EPISODES * 100, 2 * VALUES)}, "y", title="t")]).axes[0]
    assert axes.xaxis.get_major_formatter()(20000, 0) == "20,000"
    assert [line.get_color() for line in axes.get_lines()][:2] == list(PALETTE[:2])
    assert axes.get_title(loc="left") == "t" and axes.get_xlabel() == "episode" and axes.get_ylabel() == "y"


def test_an_image_is_written_without_pyplot(tmp_path):
    pyplot_before = "matplotlib.pyplot" in sys.modules
    plot_curves(tmp_path / "a.png", {"a": (torch.from_numpy(EPISODES), torch.from_numpy(VALUES))}, "y")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    assert ("matplotlib.pyplot" in sys.modules) == pyplot_before


def result_of(regret, unsafe=VALUES):
    bounds = dict.fromkeys(("regret", "violation", "positive_violation", "trivial"), 1e9 * np.ones(len(EPISODES)))
    share = np.full_like(unsafe, 0.5)
    return SimpleNamespace(
        episodes=EPISODES, regret=regret, violation=unsafe, positive_violation=unsafe, unsafe_share=share, bounds=bounds
    )


def test_no_figure_has_regret_without_violation():
    for drawn in figures({"WC-OPS": result_of(VALUES), "OptCMDP": result_of(-VALUES)}).values():
        named = " ".join(axes.get_xlabel() + axes.get_ylabel() for axes in drawn.axes)
        assert "regret" in named and "positive violation" in named


def test_an_overview_names_its_points_and_curves_and_has_no_legend():
    drawn = overview({"WC-OPS": result_of(VALUES), "OptCMDP": result_of(-VALUES, 2 * VALUES)}, "a problem")
    assert "regret" in drawn.axes[0].get_ylabel() and "positive violation" in drawn.axes[0].get_xlabel()
    assert [axes.get_ylabel().split(" (")[0] for axes in drawn.axes[1:]] == ["cumulative regret", "cumulative positive violation"]
    for axes in drawn.axes:
        assert axes.get_legend() is None and {"WC-OPS", "OptCMDP"} <= {text.get_text() for text in axes.texts}


def test_what_is_never_above_zero_is_said_to_be_so_once():
    safe = {"WC-OPS": result_of(VALUES), "S-OPS with a baseline": result_of(VALUES, 0 * VALUES)}
    (note,) = [text.get_text() for text in draw(growth_panels(safe)[2:]).axes[0].texts if "mean of" in text.get_text()]
    assert note.count("S-OPS with a baseline") == 1 and "S-OPS with a baseline: not above zero" in " ".join(note.split())


def test_titles_state_what_the_numbers_say():
    first, second, third = draw(panels({"WC-OPS": result_of(VALUES), "OptCMDP": result_of(-VALUES, 3 * VALUES)})).axes
    assert " ".join(first.get_title(loc="left").split()) == "Regret of OptCMDP: \u221263, the least, for 190 of positive violation"
    assert " ".join(second.get_title(loc="left").split()) == "Violation of WC-OPS: 63, the least"
    growth = growth_panels({"WC-OPS": result_of(VALUES), "OptCMDP": result_of(-VALUES, EPISODES * VALUES)})
    assert growth[0].title == "Least exponent of regret: WC-OPS, $t^{0.50}$, for positive violation $t^{0.50}$"
    assert growth[1].title == "Least exponent of violation: WC-OPS, $t^{0.50}$"
    assert growth[1].remarks["OptCMDP"] == "$t^{1.50}$"
    drawn = draw(growth).axes[0]
    assert "OptCMDP: not above zero" in words(drawn.figure)
    mixed = growth_panels({"WC-OPS": result_of(VALUES), "OptCMDP": result_of(EPISODES * VALUES * np.array([[1.0], [1.0], [-0.5]]))})
    assert mixed[0].remarks["OptCMDP"] == "$t^{1.50}$", "the slope of the mean, which is what is drawn"
    assert growth_panels({"WC-OPS": result_of(-VALUES)})[0].title == "Regret: not above zero"
    assert drawn.get_title(loc="left").count("\n") < 2
    assert "Beaten by nobody in both: a, c" in balance(
        {"a": result_of(VALUES), "b": result_of(2 * VALUES, 2 * VALUES), "c": result_of(-VALUES, 3 * VALUES)}
    ).axes[0].get_title(loc="left")


def test_a_learner_has_its_colour_wherever_it_is_drawn():
    assert set(COLOURS) >= {learner.name for learner in LEARNERS.values()} and len(set(COLOURS.values())) == len(COLOURS)
    alone, among = looks(["OptCMDP"]), looks(["a", "PDB-PS (reconstruction)", "OptCMDP, literal radii", "OptCMDP, matched radii"])
    assert alone["OptCMDP"][0] == among["OptCMDP, literal radii"][0] == COLOURS["OptCMDP"]
    assert among["OptCMDP, literal radii"][1] != among["OptCMDP, matched radii"][1]  # variants differ in style
    assert among["PDB-PS (reconstruction)"][0] == COLOURS["PDB-PS"] and learner_of("WC-OPS practical") == "WC-OPS practical"
    assert among["a"][0] not in (COLOURS["OptCMDP"], COLOURS["PDB-PS"]) and learner_of("WC-OPSX") is None


def test_names_stand_beside_their_curves_and_not_over_each_other():
    curves = {f"curve {j}": (EPISODES, VALUES * (1 + 0.001 * j)) for j in range(6)}
    figure = draw([Panel(curves, "y")])
    figure.canvas.draw()
    axes = figure.axes[0]
    middles = sorted(text.xyann[1] for text in axes.texts if text.get_text().startswith("curve"))
    high = axes.get_window_extent().height * 72 / figure.dpi  # in points
    assert len(middles) == 6 and min(b - a for a, b in itertools.pairwise(middles)) * high > 0.9 * SMALL
    assert axes.get_legend() is None


def test_names_beside_points_do_not_overlap():
    """Neither those of neighbours nor those of a neighbour's neighbours."""
    axes = blank(6, 4).add_subplot()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    name_points(axes, [(0.45, 0.9, "first", GREY), (0.74, 0.1, "second", GREY), (0.76, 0.11, "third", GREY)])
    axes.figure.canvas.draw()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without their arrows
    assert len(boxes) == 3 and not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_names_cover_neither_points_nor_what_else_is_drawn_and_stay_inside():
    """A cloud to the right, a line above, and the corner of the axes: each name goes where there is room, and its leader clear."""
    axes = blank(6, 4).add_subplot()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    crowd = np.stack([0.3 + 0.4 * np.arange(20) / 20, np.full(20, 0.5)])
    axes.plot(*crowd, ".")
    axes.plot([0.5, 1.0], [0.95, 0.85])
    named = [(0.1, 0.3, "the first name", GREY), (0.26, 0.36, "the second name", GREY), (0.36, 0.5, "a third", GREY)]
    named += [(0.75, 0.9, "a fourth", GREY), (0.99, 0.01, "the fifth", GREY)]
    name_points(axes, named)
    axes.figure.canvas.draw()
    drawn = np.concatenate([crowd.T, np.linspace([0.5, 0.95], [1.0, 0.85], 50), [point[:2] for point in named]])
    for text in axes.texts:
        box = Text.get_window_extent(text)
        assert not any(box.contains(*place) for place in axes.transData.transform(drawn)), text.get_text()
        assert axes.get_window_extent().padded(1).containsx(box.x0) and axes.get_window_extent().padded(1).containsx(box.x1)
        begin, end = axes.transData.transform(text.xy), axes.transAxes.transform(text.xyann)
        others = [place for place in axes.transData.transform([point[:2] for point in named]) if not np.allclose(place, begin)]
        leader = np.linspace(begin, end, 50)
        assert min(np.linalg.norm(other - leader, axis=1).min() for other in others) > 5, text.get_text()


def test_a_formula_is_not_broken():
    assert fill(r"time grows as (runs)$^{1.05 \pm 0.02}$", 20).splitlines()[-1].endswith(r"(runs)$^{1.05 \pm 0.02}$")


def test_logarithmic_axes_show_what_is_above_zero_and_say_what_is_not():
    curves = {"up": (EPISODES, VALUES), "down": (EPISODES, -VALUES)}
    axes = draw([Panel(curves, "y", logarithmic=True, sqrt_guide=True)]).axes[0]
    assert axes.get_xscale() == axes.get_yscale() == "log" and axes.get_ylim()[0] > 0
    assert "down: not above zero" in words(axes.figure)


def test_wrong_shapes_and_places_get_a_sentence(tmp_path):
    with pytest.raises(InvalidInput, match=r"'a' has episodes of shape \(100,\) and values of shape \(3, 99\)"):
        draw([Panel({"a": (EPISODES, VALUES[:, 1:])}, "y")])
    with pytest.raises(InvalidInput, match="no curves"):
        draw([Panel({}, "y")])
    with pytest.raises(InvalidInput, match="no panels"):
        draw([])
    with pytest.raises(InvalidInput, match="cannot be written"):
        save(tmp_path / "nowhere" / "a.png", draw([Panel({"a": (EPISODES, VALUES)}, "y")]))
