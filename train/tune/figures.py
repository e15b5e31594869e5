"""The figures of a study: how regret and violation depend on each constant, and what one costs in the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchcmdp.plotting import INK, PALETTE, SMALL, TITLE, blank
from torchcmdp.plotting.style import GREY, cross, name_ends, name_points, thousands, tidy, zero_line

from ..program import mean_and_half

MEASURED = ("regret", "positive violation")
# What the constants are called where people speak of them.
KNOWN_AS = {
    "eta_scale": "learning rate",
    "gamma_scale": "implicit exploration",
    "bonus_scale": "cost bonus",
    "radius_scale": "transition radius",
    "threshold_scale": "violation threshold",
}
# And the estimators.
ESTIMATORS_KNOWN_AS = {
    "smoothed": "smoothed",
    "PES": "smoothed, new noise in every window (PES)",
    "mixed": "through the learner, mixed (biased)",
    "pathwise": "through the learner, pathwise part (biased)",
    "sampled": "through the learner, unbiased",
}
COLUMNS = 3


def sensitivity_figure(curves: Mapping[str, Mapping[str, Sequence[Any]]], note: str) -> Figure:
    """One panel a scale: both parts of the objective an episode with their bands, and gradients as tangents with theirs."""
    rows = -(-len(curves) // COLUMNS)
    figure = blank(3.6 * COLUMNS, 3.1 * rows)
    spread = {name: float(np.ptp(np.asarray(curve["value"], dtype=float)[:, 1])) for name, curve in curves.items()}
    most, least = max(spread, key=lambda n: spread[n]), min(spread, key=lambda n: spread[n])
    finding = f"The {KNOWN_AS[most]} moves the positive violation most, by {spread[most]:.2g} an episode; {KNOWN_AS[least]} least"
    figure.suptitle(finding, x=0.01, ha="left", fontsize=TITLE + 1, color=INK)
    first: Axes | None = None
    right: tuple[Axes, list[tuple[float, float]]] | None = None  # the panel at the right end, where names take no room from another
    for j, (name, curve) in enumerate(curves.items()):
        axes = figure.add_subplot(rows, COLUMNS, j + 1, sharey=first)
        first = first or axes
        ends = [_with_tangents(axes, curve, part, colour) for part, colour in zip((0, 1), PALETTE, strict=False)]
        axes.set_xscale("log")
        axes.minorticks_off()
        zero_line(axes)
        right = (axes, ends) if j < COLUMNS else right
        unit = "" if j % COLUMNS else "regret (reward) and positive\nviolation (cost) an episode"
        tidy(axes, f"{KNOWN_AS[name]}, multiple of the paper's", unit, f"violation moves by {spread[name]:.2g}")
    if right is not None:
        named = zip(right[1], MEASURED, PALETTE, strict=False)
        name_ends(right[0], [(*end, label, colour) for end, label, colour in named])
    figure.supxlabel(note, fontsize=SMALL, color=GREY)
    return figure


def _with_tangents(axes: Axes, curve: Mapping[str, Sequence[Any]], part: int, colour: str) -> tuple[float, float]:
    """A curve in its band, and at every point a tangent in its wedge; returns where it ends."""
    x = np.asarray(curve["scale"], dtype=float)
    keys = ("value", "value_half", "slope", "slope_half")
    y, band, slope, wedge = (np.asarray(curve[key], dtype=float)[:, part] for key in keys)
    axes.fill_between(x, y - band, y + band, color=colour, alpha=0.15, linewidth=0)
    axes.plot(x, y, "o-", color=colour, markersize=3, linewidth=1, alpha=0.7)
    move = np.array([-1.0, 0.0, 1.0]) * np.log(x[1] / x[0]) / 3
    for a, b, s, w in zip(x, y, slope, wedge, strict=True):
        place, line, reach = a * np.exp(move), b + s * move, w * abs(move)
        axes.fill_between(place, line - reach, line + reach, color=colour, alpha=0.35, linewidth=0)
        axes.plot(place, line, color=colour, linewidth=2.2)
    return float(x[-1]), float(y[-1])


def front_figure(points: Mapping[str, Mapping[str, Sequence[float]]], horizon: int) -> Figure:
    """Regret against positive violation an episode on unseen instances, with 95% intervals; the tuned ones joined by weight."""
    figure = blank(6.4, 4.6)
    axes = figure.add_subplot(1, 1, 1)
    tuned: list[tuple[float, float, float]] = []
    named: list[tuple[float, float, str, str]] = []
    safest = min(points, key=lambda label: sum(points[label]["positive violation"]))
    for j, (label, measures) in enumerate(points.items()):
        numbers = (torch.tensor(measures[name], dtype=torch.float64) for name in ("positive violation", "regret"))
        (x, dx), (y, dy) = (mean_and_half(x / horizon) for x in numbers)
        colour = PALETTE[j % len(PALETTE)]
        cross(axes, x, y, dx, dy, colour)
        named.append((x, y, label, colour))
        if label.startswith("weight "):
            tuned.append((float(label.split()[1]), x, y))
    if tuned:
        _, xs, ys = zip(*sorted(tuned), strict=True)
        axes.plot(xs, ys, color=GREY, linewidth=1, zorder=1)
    zero_line(axes)
    axes.margins(0.12)
    name_points(axes, named)
    note = f"unseen instances, {horizon:,} episodes, 95% intervals; weights of the violation in the objective"
    title = f"Least positive violation on unseen instances: {safest}"
    tidy(axes, "positive violation an episode (cost)", "regret an episode (reward)", title, note)
    return figure


def budget_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """What each method would hand out, judged on held-out instances, against the run-episodes that it has played; 95% bands."""
    figure = blank(7.4, 4.4)
    axes = figure.add_subplot(1, 1, 1)
    thousands(axes.xaxis)
    curves: dict[str, list[list[float]]] = {}
    for method, spent, y, half, *_ in (row.values() for row in rows):
        curves.setdefault(method, []).append([spent, y, y - half, y + half])
    _draw_banded(axes, curves)
    ylabel = "regret + weighted violation an episode (reward)\nof what is handed out, held-out instances"
    note = "mean over repetitions, bands: 95% intervals over them; less is better"
    tidy(axes, "run-episodes played", ylabel, title, note)
    return figure


def variance_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """The variance of a sample of each estimator against the horizon, with intervals, on logarithmic axes."""
    figure = blank(7.4, 4.6)
    axes = figure.add_subplot(1, 1, 1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    curves: dict[str, list[list[float]]] = {}
    for row in rows:
        name = ESTIMATORS_KNOWN_AS.get(row["estimator"], row["estimator"])
        curves.setdefault(name, []).append([float(row[key]) for key in ("horizon", "variance", "low", "high")])
    _draw_banded(axes, curves)
    axes.minorticks_off()
    note = "95% bootstrap intervals; of regret + weighted violation an episode in the logarithms of the scales, summed over them; "
    note += "through the learner only shorter horizons are played"
    tidy(axes, "episodes of a run", "variance of one sample of the gradient (reward$^2$)", title, note)
    return figure


def _draw_banded(axes: Axes, curves: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Curves of points (x, y, low, high), named at their ends."""
    ends = []
    for (name, points), colour in zip(curves.items(), PALETTE, strict=False):
        x, y, low, high = np.asarray(points, dtype=float).T
        axes.plot(x, y, "o-", color=colour, markersize=3.5, linewidth=1.6)
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        ends.append((float(x[-1]), float(y[-1]), name, colour))
    name_ends(axes, ends)
