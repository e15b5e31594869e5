"""Mean curves with 95% bands in panels side by side: against episodes, or on logarithmic axes, where growth is a slope."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from torchcmdp.errors import InvalidInput, brief
from torchcmdp.metrics import mean_and_interval
from torchcmdp.plotting.style import GREY, SMALL, STYLES, blank, looks, name_ends, thousands, tidy, zero_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A bound is drawn when at least this share of the horizontal axis sees it; less is a stub that explains nothing.
VISIBLE_SHARE = 0.1
# On logarithmic axes nothing is shown that is smaller than the largest value by more than this.
DECADES = 1e4

Curve = tuple[ArrayLike, ArrayLike]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
        curves: Label to (episodes `(points,)`, values `(runs x points)`): drawn as the mean over runs and its 95% band, in the
            colour of the learner whose name the label begins with.
        ylabel: What the values are, and in which unit.
        title: Above the axes; best what is to be seen.
        bounds: Label to (episodes, values), both `(points,)`: grey lines, drawn only where they fit between the curves' extremes.
        sqrt_guide: Also draw c * sqrt(t) through the last point of the first curve that ends above zero.
        xlabel: What is counted.
        logarithmic: Both axes are; what is not above zero is not drawn.
        remarks: Label to what its name is followed by at the end of the curve.
        note: Small print below the axes, after how many runs there are.
        of: What the rows of the values are, if not runs: the small print says so.
    """

    curves: Mapping[str, Curve]
    ylabel: str
    title: str | None = None
    bounds: Mapping[str, Curve] = field(default_factory=dict)
    sqrt_guide: bool = False
    xlabel: str = "episode"
    logarithmic: bool = False
    remarks: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    of: str = "run"


def draw(panels: Sequence[Panel], columns: int | None = None) -> Figure:
    """Panels in one figure, side by side or so many in a row, without touching matplotlib's global state."""
    if not panels:
        raise InvalidInput("draw got no panels; it needs at least one.")
    columns = min(columns or len(panels), len(panels))
    rows = -(-len(panels) // columns)
    figure = blank(4.7 * columns, 3.7 * rows)
    for j, panel in enumerate(panels):
        draw_panel(figure.add_subplot(rows, columns, j + 1), panel)
    return figure


def draw_panel(axes: Axes, panel: Panel) -> None:
    """One panel on axes of a figure."""
    if not panel.curves:
        raise InvalidInput(f"the panel {panel.ylabel!r} has no curves; it needs at least one.")
    for kind, curves in (("curve", panel.curves), ("bound", panel.bounds)):
        for label, curve in curves.items():
            if not isinstance(curve, Sequence) or len(curve) != 2:
                shape = "(runs x points)" if kind == "curve" else "(points,)"
                raise InvalidInput(f"the {kind} {label!r} is {brief(curve)}; expected episodes (points,) and values {shape}.")
    means = {label: _summarise(label, *curve) for label, curve in panel.curves.items()}
    if panel.logarithmic:
        means = {label: (x, np.where(mean > 0, mean, np.nan), half) for label, (x, mean, half) in means.items()}
    looked = looks(means)
    for label, (x, mean, half) in means.items():
        colour, style = looked[label]
        axes.plot(x, mean, color=colour, linestyle=style, linewidth=1.7, label=label, zorder=3)
        low = np.maximum(mean - half, mean / DECADES) if panel.logarithmic else mean - half
        axes.fill_between(x, low, mean + half, color=colour, alpha=0.18, linewidth=0, zorder=2)
    limits = _scale(axes, panel, means)
    notes = [_note(panel), panel.note]
    if panel.sqrt_guide:
        _draw_guide(axes, panel, means)
    for j, (label, (episodes, values)) in enumerate(panel.bounds.items()):
        notes.append(_draw_bound(axes, label, array(episodes), array(values), limits, STYLES[1 + j % 3]))
    ends = []
    for label, (x, mean, _) in means.items():
        shown = np.flatnonzero(np.isfinite(mean))  # the regret is NaN where no policy is safe
        if len(shown):
            fallen = "(then below zero)" if panel.logarithmic and shown[-1] + 1 < len(mean) else ""
            words = " ".join(filter(None, (label, panel.remarks.get(label, ""), fallen)))
            ends.append((float(x[shown[-1]]), float(mean[shown[-1]]), words, looked[label][0]))
        else:
            notes.append(f"{label}: {'not above zero' if panel.logarithmic else 'undefined'}")
    name_ends(axes, ends)
    tidy(axes, panel.xlabel, panel.ylabel, panel.title, "; ".join(filter(None, notes)))


def _scale(axes: Axes, panel: Panel, means: Mapping[str, tuple[Array, Array, Array]]) -> tuple[float, float]:
    """Set the limits, and return those of the values: what the curves take, with room, and zero."""
    last = max(float(x[-1]) for x, _, _ in means.values())
    shown = [(mean[np.isfinite(mean)], half[np.isfinite(mean)]) for _, mean, half in means.values()]
    high = max((float((mean + half).max()) for mean, half in shown if len(mean)), default=0.0)
    if panel.logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
        top = 1.6 * high if high > 0 else 1.0
        low = min((float(mean.min()) for mean, _ in shown if len(mean)), default=top / DECADES)
        bottom = max(0.6 * low, top / DECADES)
        axes.set_xlim(min(float(x[0]) for x, _, _ in means.values()), last)
        axes.minorticks_off()
    else:
        low = min(0.0, *(float((mean - half).min()) for mean, half in shown if len(mean)), 0.0)
        margin = 0.06 * (max(high, 0.0) - low) or 1.0
        bottom, top = low - margin if low < 0 else 0.0, max(high, 0.0) + margin
        axes.set_xlim(0, last)
        thousands(axes.xaxis, 4)
        thousands(axes.yaxis)
        if low < 0:
            zero_line(axes)
    axes.set_ylim(bottom, top)
    return bottom, top


def _note(panel: Panel) -> str:
    """How many runs the curves are means of."""
    runs = {np.atleast_2d(array(values)).shape[0] for _, values in panel.curves.values()}
    if len(runs) > 1:
        return ""
    (count,) = runs
    return f"mean of {count:,} {panel.of}s, 95% band" if count > 1 else f"one {panel.of}"


def _summarise(label: str, episodes: ArrayLike, values: ArrayLike) -> tuple[Array, Array, Array]:
    """Episodes, mean and 95% half-width of one curve, each `(points,)`; a single run has no band."""
    x, y = array(episodes), np.atleast_2d(array(values))
    if x.ndim != 1 or y.ndim != 2 or y.shape[1] != x.shape[0] or x.shape[0] == 0:
        raise InvalidInput(
            f"the curve {label!r} has episodes of shape {x.shape} and values of shape {y.shape}; "
            "expected (points,) and (runs x points)."
        )
    mean, half = mean_and_interval(torch.from_numpy(y))
    return x, array(mean), np.nan_to_num(array(half), nan=0.0, posinf=0.0)


def _draw_bound(axes: Axes, label: str, x: Array, y: Array, limits: tuple[float, float], style: Any) -> str:
    """A grey line where the bound is within the limits, named where it leaves them; else what to say of it."""
    inside = np.flatnonzero((y >= limits[0]) & (y <= limits[1]))
    share = float(np.ptp(x[inside])) / float(x[-1]) if len(inside) and x[-1] > 0 else 0.0
    if share < VISIBLE_SHARE:
        return f"{label}: {_in_words(float(y[-1]))} at the end (off scale)"
    axes.plot(x, y, color=GREY, linestyle=style, linewidth=1.0, label=label, zorder=1)
    early = x[inside[-1]] < x[-1] / 2  # on the side where there is room
    look: dict[str, Any] = {"textcoords": "offset points", "fontsize": SMALL, "color": GREY, "va": "top"}
    place = (float(x[inside[-1]]), float(y[inside[-1]]))
    axes.annotate(label, place, (4 if early else -4, -2), ha="left" if early else "right", **look)
    return ""


def _draw_guide(axes: Axes, panel: Panel, means: Mapping[str, tuple[Array, Array, Array]]) -> None:
    """c sqrt(t), named at its middle."""
    ends = [(x, float(mean[-1])) for x, mean, _ in means.values() if mean[-1] > 0]
    if not ends:
        return
    x, last = ends[0]
    t = np.geomspace(x[0], x[-1], 200) if panel.logarithmic else np.linspace(0, x[-1], 200)
    axes.plot(t, last * np.sqrt(t / x[-1]), color=GREY, linestyle=":", linewidth=1.1, label=r"$\propto\sqrt{t}$", zorder=1)
    middle = t[60]
    look: dict[str, Any] = {"textcoords": "offset points", "fontsize": SMALL, "color": GREY, "ha": "center", "va": "bottom"}
    axes.annotate(r"$\propto\sqrt{t}$", (middle, last * math.sqrt(middle / x[-1])), (-4, 3), **look)


def _in_words(value: float) -> str:
    """3.2e6 rather than 3200000.0, and 840 as it is."""
    if not math.isfinite(value) or abs(value) < 1e4:
        return f"{value:,.4g}"
    exponent = math.floor(math.log10(abs(value)))
    return f"{value / 10**exponent:.1f}e{exponent}"


def array(values: ArrayLike) -> Array:
    """Numbers as matplotlib takes them, wherever they are."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    return np.asarray(values, dtype=np.float64)
