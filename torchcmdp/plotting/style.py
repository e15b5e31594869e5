"""The house style of every figure: a learner's colour, quiet axes, names beside curves, and the files that a figure is saved to."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchcmdp.errors import InvalidInput, check_kind

if TYPE_CHECKING:  # matplotlib is slow to import: only those who draw wait for it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette without its yellow, which is too light for a line: distinct under the common kinds of colour blindness.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
# What a learner looks like in every figure. A curve's name begins with its learner's; what follows tells variants apart.
COLOURS: Mapping[str, str] = {
    "WC-OPS": "#0072B2",
    "WC-OPS practical": "#56B4E9",
    "OptCMDP": "#D55E00",
    "OptPrimalDual": "#009E73",
    "PDB-PS": "#CC79A7",
    "Greedy": "#E69F00",
    "UOB-REPS": "#000000",
    "S-OPS": "#7A5195",
    "MA-OPS": "#8C564B",
    "DOPE": "#6B8E23",
}
STYLES: Sequence[Any] = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
INK, GREY, RULE = "#333333", "#777777", "#E5E5E5"
SMALL, TEXT, TITLE = 8.0, 9.5, 10.5  # points

# The files of a figure: the one that was asked for, and beside every picture of pixels one of lines.
VECTOR = ".pdf"


def learner_of(label: str) -> str | None:
    """The learner whose curve this is, by the beginning of its name; None where it is nobody's."""
    own = [name for name in COLOURS if label == name or label.startswith((f"{name},", f"{name} "))]
    return max(own, key=len, default=None)


def looks(labels: Iterable[str]) -> dict[str, tuple[str, Any]]:
    """Colour and line style of each: a learner's own colour, variants told apart by style; others in the palette's order."""
    names = list(labels)
    taken = {COLOURS[learner] for learner in map(learner_of, names) if learner}
    free = [colour for colour in PALETTE if colour not in taken] or list(PALETTE)
    found: dict[str, tuple[str, Any]] = {}
    others = 0
    for name in names:
        learner = learner_of(name)
        colour = COLOURS[learner] if learner else free[others % len(free)]
        others += learner is None
        used = [colour for colour, _ in found.values()].count(colour)
        found[name] = (colour, STYLES[used % len(STYLES)])
    return found


def darker(colour: str) -> str:
    """The colour of words about what is drawn in this one: nearer to ink, since thin letters need more contrast than lines."""
    parts = [int(colour[j : j + 2], 16) for j in (1, 3, 5)]
    return "#" + "".join(f"{int(0.7 * part):02x}" for part in parts)


def blank(width: float, height: float) -> Figure:
    """An empty figure, in inches, without touching matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)  # words reach to the margin
    figure = Figure(figsize=(width, height), dpi=150, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes, xlabel: str = "", ylabel: str = "", title: str | None = None, note: str = "") -> None:
    """A thin grid, quiet ticks, a frame open above and to the right; what is measured in which unit, the finding, small print."""
    axes.tick_params(labelsize=SMALL + 0.5, colors=INK, length=3, width=0.7)
    axes.grid(True, which="major", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
        spine.set_linewidth(0.7)
    axes.set_xlabel(xlabel, fontsize=TEXT, color=INK)
    axes.set_ylabel(ylabel, fontsize=TEXT, color=INK)
    columns = 14 * _inches(axes)[0]
    if title:
        axes.set_title(fill(title, int(columns)), fontsize=TITLE, color=INK, loc="left", pad=8)
    if note:
        place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top", "fontsize": SMALL}
        axes.annotate(fill(note, int(1.4 * columns)), (0, 0), (0, -32), color=GREY, **place)


def fill(text: str, columns: int) -> str:
    """The text in lines of so many letters, with no break inside a formula or at a hyphen."""
    whole = re.sub(r"\$[^$]*\$", lambda found: found[0].replace(" ", "\0"), text)
    return textwrap.fill(whole, columns, break_on_hyphens=False, break_long_words=False).replace("\0", " ")


def thousands(axis: Any, ticks: int = 5) -> None:
    """20,000 rather than 20000, and few of them."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_formatter(FuncFormatter(lambda value, _: minus(f"{value:,.10g}")))
    axis.set_major_locator(MaxNLocator(ticks))


def minus(text: str) -> str:
    """A number with a sign that is one, where a hyphen stands for it."""
    return re.sub(r"-(?=[\d.])", "\u2212", text)


def zero_line(axes: Axes, axis: str = "y") -> None:
    """What lies below zero is seen to."""
    (axes.axhline if axis == "y" else axes.axvline)(0, color=INK, linewidth=0.8, zorder=1.5)


def name_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names to the right of where curves end, moved apart where they would overlap; call it when the limits stand.

    Of each end the place in the data, its name and colour.
    """
    if not ends:
        return
    to_axes = axes.transData + axes.transAxes.inverted()
    # formulas have letters that are not seen
    lines = [name if len(re.sub(r"[${}^]", "", name)) <= 28 else fill(name, 18) for _, _, name, _ in ends]
    line = 1.25 * SMALL / (72 * _inches(axes)[1])  # height of a line as a share of the axes
    wanted = [float(np.clip(to_axes.transform((x, y))[1], 0, 1)) for x, y, _, _ in ends]
    places = _apart(wanted, [line * (1 + text.count("\n")) for text in lines])
    for (x, y, _, colour), text, place in zip(ends, lines, places, strict=True):
        # from the left edge of the name: to cut a line off at a name's frame takes as long as all the rest of a figure
        begin: dict[str, Any] = {"relpos": (0, 0.5), "patchA": None, "shrinkA": 2}
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkB": 1, "alpha": 0.6, **begin}
        axes.annotate(
            text, (x, y), (1.03, place), xycoords="data", textcoords="axes fraction", va="center", ha="left",
            fontsize=SMALL, color=darker(colour), arrowprops=arrow, annotation_clip=False, path_effects=_halo(),
        )  # fmt: skip


def name_points(axes: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Names beside points, to the side where there is room, moved apart where they would overlap; call it when the limits stand.

    Of each point the place in the data, its name and colour.
    """
    axes.autoscale_view()  # where nobody has set limits yet
    to_axes = axes.transData + axes.transAxes.inverted()
    moved = [(to_axes.transform((x, y)), name, colour) for x, y, name, colour in points]
    placed = sorted((float(place[0]), float(place[1]), name, colour) for place, name, colour in moved)
    line = 1.3 * (SMALL + 1) / (72 * _inches(axes)[1])
    letter = 0.5 * (SMALL + 1) / (72 * _inches(axes)[0])
    everywhere = [(x, y) for x, y, _, _ in placed]
    while placed:
        reach = 1 + next((j for j, (a, b) in enumerate(zip(placed, placed[1:], strict=False)) if b[0] - a[0] > 0.3), len(placed))
        near, placed = placed[:reach], placed[reach:]  # whose names could overlap, one with the next
        for (x, y, name, colour), place in zip(near, _apart([y + line for _, y, _, _ in near], [line] * len(near)), strict=True):
            side = -1 if x > 0.7 else 1
            look: dict[str, Any] = {"color": darker(colour), "ha": "left" if side > 0 else "right", "zorder": 6}
            arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4, "alpha": 0.8}
            start = _free(x, place, side, everywhere, letter * len(name), line)
            look |= {"va": "center", "fontsize": SMALL + 1, "path_effects": _halo()}
            axes.annotate(name, (x, y), (start, place), "axes fraction", "axes fraction", arrow, **look)


def _free(x: float, y: float, side: int, points: Sequence[tuple[float, float]], width: float, line: float) -> float:
    """Where a name so wide can begin, beyond x to its side, without covering a point."""
    level = [side * a for a, b in points if abs(b - y) < 1.2 * line]
    start = side * x + 0.03
    for other in sorted(level):  # from near to far
        if start - 0.02 <= other <= start + width:
            start = other + 0.03
    return side * start


def _halo() -> list[Any]:
    """Paper around letters, so that what lies below them does not cross them."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.0, foreground="white")]


def _apart(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """The nearest places, in the same order, at which things so high do not overlap; none below zero, where the ticks are."""
    order, n = np.argsort(wanted, kind="stable"), len(wanted)
    high = np.asarray(heights)[order]
    stacked = np.cumsum(high) - high / 2  # with no room between them
    room = np.asarray(wanted)[order] - stacked  # it must not fall: isotonic regression, by its formula
    risen = [max(0.0, *(min(room[i : k + 1].mean() for k in range(j, n)) for i in range(j + 1))) for j in range(n)]
    places = np.empty(n)
    places[order] = stacked + risen
    return [float(place) for place in places]


def _inches(axes: Axes) -> tuple[float, float]:
    """About how wide and high the axes will be, before anything is laid out."""
    figure, spec = axes.get_figure(root=True), axes.get_subplotspec()
    rows, columns = (spec.get_gridspec().nrows, spec.get_gridspec().ncols) if spec is not None else (1, 1)
    width, height = figure.get_size_inches() if figure is not None else (6.4, 4.4)
    return 0.7 * width / columns, 0.65 * height / rows


def cross(axes: Axes, x: float, y: float, xerr: float, yerr: float, colour: str, **more: Any) -> None:
    """A mean in two measures with its 95% intervals; an interval that is not a number, of a single run, is left out."""
    bars = [half if np.isfinite(half) else 0.0 for half in (xerr, yerr)]
    look = {"fmt": "o", "markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.7, "elinewidth": 1.2, "zorder": 4, **more}
    axes.errorbar(x, y, xerr=bars[0], yerr=bars[1], color=colour, **look)


def save(path: str | PathLike[str], figure: Figure) -> None:
    """Write a figure, and beside every PNG a PDF of it; for an unwritable place or unknown format, one sentence."""
    from matplotlib import rc_context

    check_kind("path", path, str | PathLike, "the name of a file, such as regret.png")
    files = [Path(path)]
    files += [files[0].with_suffix(VECTOR)] if files[0].suffix.lower() == ".png" else []
    try:
        with rc_context({"pdf.fonttype": 42}):  # letters stay letters
            for file in files:
                # the same figure is the same file, whenever it was made
                figure.savefig(file, metadata={"CreationDate": None} if file.suffix == VECTOR else None)
                figure.set_layout_engine(None)  # what was laid out once stays: to draw it once more for that takes half of the time
    except (OSError, ValueError) as error:
        raise InvalidInput(f"the figure cannot be written to {path}: {error}.") from error
