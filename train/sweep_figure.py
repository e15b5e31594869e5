"""The figure of a sweep: every combination in the plane of violation and regret, and the front of those that none beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from torchcmdp.plotting.style import GREY, INK, PALETTE, SMALL, blank, cross, thousands, tidy, zero_line

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


def front_figure(rows: Sequence[Mapping[str, Any]], front: Sequence[int], swept: Sequence[str], words: str) -> Figure:
    """Means and 95% intervals; colours stand for the first hyperparameter swept, shapes for the second, numbers for the front.

    A row is a combination, with "regret", "violation" and their "..._ci95"; `words` say in small print who played, and how much.
    """
    figure = blank(7.6, 4.8)
    axes = figure.add_subplot()
    colours, markers = (_codes(rows, name, codes) for name, codes in zip([*swept, None, None][:2], (PALETTE, MARKERS), strict=True))
    for j, row in enumerate(rows):
        colour, marker = colours[row.get(swept[0])], markers[row.get(swept[1]) if len(swept) > 1 else None]
        look = {"fmt": marker, "markersize": 7 if j in front else 5, "alpha": 1.0 if j in front else 0.55}
        place = (row["violation"], row["regret"], row["violation_ci95"], row["regret_ci95"])
        cross(axes, *place, colour, **look, zorder=4 if j in front else 3)
    _draw_front(axes, rows, front)
    axes.margins(0.08)
    for axis in (axes.xaxis, axes.yaxis):
        thousands(axis, 6)
    if axes.get_ylim()[0] < 0:
        zero_line(axes)
    handles = [Line2D([], [], color=GREY, linewidth=1.2, drawstyle="steps-post", label="Pareto front")]
    for name, codes in zip(swept[:2], (colours, markers), strict=False):
        for value, code in codes.items():
            look = {"color": code, "marker": "o"} if codes is colours else {"color": GREY, "marker": code}
            handles.append(Line2D([], [], linestyle="none", markersize=6, label=f"{name.replace('_', ' ')} {value:g}", **look))
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=SMALL, frameon=False, labelcolor=INK)
    title = f"{len(front)} of {len(rows)} combinations are beaten by no other in both regret and violation"
    tidy(axes, "cumulative violation (cost)", "cumulative regret (reward)", title, words)
    return figure


def _codes(rows: Sequence[Mapping[str, Any]], name: str | None, codes: Sequence[str]) -> dict[Any, str]:
    """A colour or shape for every value of a hyperparameter, used again where there are more values."""
    values = list(dict.fromkeys(row[name] for row in rows)) if name else [None]
    return {value: codes[j % len(codes)] for j, value in enumerate(values)}


def _draw_front(axes: Axes, rows: Sequence[Mapping[str, Any]], front: Sequence[int]) -> None:
    """The staircase that bounds what some combination reaches, and the numbers of its corners."""
    x, y = [rows[j]["violation"] for j in front], [rows[j]["regret"] for j in front]
    axes.step(x, y, where="post", color=GREY, linewidth=1.2, zorder=2)
    for number, (a, b) in enumerate(zip(x, y, strict=True)):
        look: dict[str, Any] = {"fontsize": 9, "color": INK, "fontweight": "bold", "zorder": 5}
        axes.annotate(str(number + 1), (a, b), (6, 6), textcoords="offset points", **look)
