"""The figures of a study: how regret and violation depend on each constant, and what one costs in the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchcmdp.metrics import mean_and_interval
from torchcmdp.plotting import GREY, PALETTE, blank, cross, name_ends, name_points, thousands, tidy, zero_line

PARTS = ("regret", "positive violation")


def sensitivity_figure(curves: Mapping[str, Mapping[str, Sequence[Any]]]) -> Figure:
    """One panel a scale: both parts of the objective an episode, and at every point its gradient as a tangent."""
    figure = blank(3.9 * len(curves), 3.5)
    spread = {name: float(np.ptp(np.asarray(curve["value"], dtype=float)[:, 1])) for name, curve in curves.items()}
    first: Axes | None = None
    for j, (name, curve) in enumerate(curves.items()):
        axes = figure.add_subplot(1, len(curves), j + 1, sharey=first)
        first = first or axes
        x, ends = np.asarray(curve["scale"], dtype=float), []
        for part, (label, colour) in enumerate(zip(PARTS, PALETTE, strict=False)):
            y, slope = (np.asarray(curve[key], dtype=float)[:, part] for key in ("value", "slope"))
            axes.plot(x, y, "o-", color=colour, markersize=3, linewidth=1, alpha=0.6)
            reach = np.log(x[1] / x[0]) / 3
            for a, b, s in zip(x, y, slope, strict=True):
                axes.plot(a * np.exp([-reach, reach]), [b - s * reach, b + s * reach], color=colour, linewidth=2.2)
            ends.append((float(x[-1]), float(y[-1]), label, colour))
        axes.set_xscale("log")
        zero_line(axes)
        if j + 1 == len(curves):
            name_ends(axes, ends)
        moves = f"violation moves by {spread[name]:.2g}" + (", the most" if name == max(spread, key=lambda n: spread[n]) else "")
        tidy(axes, f"{name.replace('_', ' ')} (multiple of the paper's)", "" if j else "an episode (reward, cost)", moves)
    return figure


def front_figure(points: Mapping[str, Mapping[str, Sequence[float]]], horizon: int) -> Figure:
    """Regret against positive violation an episode on unseen instances, with 95% intervals; the tuned ones joined by weight."""
    figure = blank(6.4, 4.6)
    axes = figure.add_subplot(1, 1, 1)
    tuned: list[tuple[float, float, float]] = []
    named: list[tuple[float, float, str, str]] = []
    safest = min(points, key=lambda label: sum(points[label]["positive violation"]))
    for j, (label, measures) in enumerate(points.items()):
        (x, dx), (y, dy) = (_per_episode(measures[name], horizon) for name in ("positive violation", "regret"))
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


def budget_figure(curves: Mapping[str, Sequence[tuple[float, float, float]]], title: str) -> Figure:
    """What each method would hand out, judged on held-out instances, against the run-episodes that it has played; 95% bands."""
    figure = blank(7.4, 4.4)
    axes = figure.add_subplot(1, 1, 1)
    ends = []
    for (name, points), colour in zip(curves.items(), PALETTE, strict=False):
        x, y, half = np.asarray(points, dtype=float).T
        axes.plot(x, y, "o-", color=colour, markersize=3, linewidth=1.6)
        axes.fill_between(x, y - half, y + half, color=colour, alpha=0.12, linewidth=0)
        ends.append((float(x[-1]), float(y[-1]), name, colour))
    thousands(axes.xaxis)
    name_ends(axes, ends)
    note = "mean over repetitions, bands: 95% intervals over them; in both parts of the objective less is better"
    tidy(axes, "run-episodes played", "objective on held-out instances, an episode", title, note)
    return figure


def _per_episode(values: Sequence[float], horizon: int) -> tuple[float, float]:
    mean, half = mean_and_interval(torch.tensor(values, dtype=torch.float64) / horizon)
    return float(mean), float(half)
