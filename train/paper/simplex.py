"""The trajectory of the policy on the simplex of three actions, with the safe set shaded and the best safe policy marked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

import torchcmdp as tc
from torchcmdp.plotting import INK, PALETTE, SMALL, TITLE, blank

CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]])
Points = NDArray[np.float64]


def draw(cmdp: tc.LayeredCMDP, policies: Mapping[str, Tensor]) -> Figure:
    """One triangle a trajectory.

    Args:
        cmdp: One state, one step, three actions.
        policies: Title to the policies at the logging points, `(points x runs x 1 x 1 x 3)`.
    """
    figure = blank(5.2 * len(policies) + 0.8, 4.6)
    for j, (title, trajectory) in enumerate(policies.items()):
        axes = figure.add_subplot(1, len(policies), j + 1)
        _triangle(axes, cmdp)
        line = _trajectory(axes, trajectory[..., 0, 0, :].numpy())
        axes.set_title(title, fontsize=TITLE, color=INK, loc="left")
    # beside the triangle: in it they would lie over trajectories
    figure.axes[0].legend(loc="upper left", fontsize=SMALL, frameon=False, labelcolor=INK, borderaxespad=0, markerscale=0.6)
    bar = figure.colorbar(line, ax=figure.axes, shrink=0.7, pad=0.01, ticks=[0, 1], label="episode")
    bar.ax.set_yticklabels(["first", "last"])
    return figure


def safe_polygon(costs: Points) -> Points:
    """The corners of {p on the simplex : <costs_i, p> <= 0 for all i}, `(n x 3)`: the triangle cut by one half-plane after another.

    Args:
        costs: `(m x 3)`.
    """
    polygon = list(np.eye(3))
    for cost in costs:
        cut: list[Points] = []
        for here, there in zip(polygon, [*polygon[1:], *polygon[:1]], strict=True):
            a, b = float(cost @ here), float(cost @ there)
            if a <= 0:
                cut.append(here)
            if (a < 0 < b) or (b < 0 < a):
                cut.append(here + (there - here) * a / (a - b))
        polygon = cut
    return np.array(polygon).reshape(-1, 3)


def _triangle(axes: Axes, cmdp: tc.LayeredCMDP) -> None:
    axes.fill(*CORNERS.T, facecolor="none", edgecolor=INK, linewidth=1.2)
    safe = safe_polygon(cmdp.costs[:, 0, 0].numpy()) @ CORNERS
    axes.fill(*safe.T, facecolor="#D55E00", alpha=0.22, linewidth=0, label="safe policies")
    best = tc.safe_optimum(cmdp).occupancy[0, 0, :, 0].numpy() @ CORNERS
    star: dict[str, Any] = {"marker": "*", "markersize": 17, "color": PALETTE[0], "markeredgecolor": "white", "linestyle": ""}
    axes.plot(*best, **star, zorder=5, label="best safe policy")
    rewards = cmdp.rewards[0, 0].tolist()
    for a, (corner, shift, side) in enumerate(zip(CORNERS, ((-8, -6), (8, -6), (0, 8)), ("right", "left", "center"), strict=True)):
        label = f"action {a + 1}\nreward {rewards[a]:.2f}"
        place: dict[str, Any] = {"textcoords": "offset points", "ha": side, "va": "bottom" if a == 2 else "top"}
        axes.annotate(label, corner, shift, **place, color=INK, fontsize=9)
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_xlim(-0.25, 1.25)
    axes.set_ylim(-0.16, 1.06)


def _trajectory(axes: Axes, policies: Points) -> LineCollection:
    """Every run as a line whose colour is time: their mean would be a policy that nobody played."""
    places = policies @ CORNERS
    paths = [np.stack([path[:-1], path[1:]], axis=1) for path in np.moveaxis(places, 1, 0)]
    line = LineCollection(list(np.concatenate(paths)), cmap="viridis", linewidths=1.6, alpha=0.85, zorder=4)
    line.set_array(np.tile(np.linspace(0, 1, len(places) - 1), len(paths)))
    line.set_clim(0, 1)  # also where there is a single step
    axes.add_collection(line)
    axes.plot(*places[0, 0], marker="o", markersize=5, color=INK, zorder=5)
    return line
