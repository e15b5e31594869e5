"""The figures of a study: how regret and violation depend on each constant, and what one costs in the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from torchcmdp.metrics import mean_and_interval
from torchcmdp.plotting import INK, PALETTE
from train.figures import GREY, blank

PARTS = ("regret", "positive violation")


def sensitivity_figure(curves: Mapping[str, Mapping[str, Sequence[Any]]]) -> Figure:
    """One panel a scale: both parts of the objective an episode, and at every point its gradient as a tangent."""
    figure = blank(3.6 * len(curves), 3.4)
    for j, (name, curve) in enumerate(curves.items()):
        axes = figure.add_subplot(1, len(curves), j + 1)
        x = np.asarray(curve["scale"], dtype=float)
        for part, (label, colour) in enumerate(zip(PARTS, PALETTE, strict=False)):
            y, slope = (np.asarray(curve[key], dtype=float)[:, part] for key in ("value", "slope"))
            axes.plot(x, y, "o-", color=colour, markersize=3, linewidth=1, alpha=0.6, label=label)
            reach = np.log(x[1] / x[0]) / 3
            for a, b, s in zip(x, y, slope, strict=True):
                axes.plot(a * np.exp([-reach, reach]), [b - s * reach, b + s * reach], color=colour, linewidth=2.2)
        axes.set_xscale("log")
        axes.set_xlabel(name, color=INK)
        axes.grid(True, color="#E5E5E5", linewidth=0.7)
        if j == 0:
            axes.set_ylabel("an episode", color=INK)
            axes.legend(fontsize=8, edgecolor="none")
    return figure


def front_figure(points: Mapping[str, Mapping[str, Sequence[float]]], horizon: int) -> Figure:
    """Regret against positive violation an episode on unseen instances, with 95% intervals; the tuned ones joined by weight."""
    figure = blank(6.4, 4.6)
    axes = figure.add_subplot(1, 1, 1)
    tuned: list[tuple[float, float, float]] = []
    for j, (label, measures) in enumerate(points.items()):
        (x, dx), (y, dy) = (_per_episode(measures[name], horizon) for name in ("positive violation", "regret"))
        axes.errorbar(x, y, xerr=dx, yerr=dy, fmt="o", color=PALETTE[j % len(PALETTE)], capsize=2, label=label)
        if label.startswith("weight "):
            tuned.append((float(label.split()[1]), x, y))
    if tuned:
        _, xs, ys = zip(*sorted(tuned), strict=True)
        axes.plot(xs, ys, color=GREY, linewidth=1, zorder=1)
    axes.set_xlabel("positive violation an episode", color=INK)
    axes.set_ylabel("regret an episode", color=INK)
    axes.grid(True, color="#E5E5E5", linewidth=0.7)
    axes.legend(fontsize=9, edgecolor="none")
    return figure


def _per_episode(values: Sequence[float], horizon: int) -> tuple[float, float]:
    mean, half = mean_and_interval(torch.tensor(values, dtype=torch.float64) / horizon)
    return float(mean), float(half)
