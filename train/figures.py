"""What the figures of programs have in common."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torchcmdp.plotting import INK

GREY = "#777777"


def blank(width: float, height: float) -> Figure:
    """An empty figure, in inches, without touching matplotlib's global state."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def grid(axes: Axes) -> None:
    """Light lines behind the curves."""
    axes.grid(True, color="#E5E5E5", linewidth=0.7)
    axes.set_axisbelow(True)


def tidy(axes: Axes, labelsize: float) -> None:
    """A grid, quiet ticks, and a frame that is open above and to the right."""
    axes.tick_params(labelsize=labelsize, colors=INK)
    grid(axes)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
