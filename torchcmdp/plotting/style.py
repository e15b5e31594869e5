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
    """Names near points, where they cover least of what is drawn and of each other; call it when all else is and limits stand.

    Of each point the place in the data, its name and colour.
    """
    axes.autoscale_view()  # where nobody has set limits yet
    size = 72 * np.array(_inches(axes))  # lengths from here on are in points of type
    spots = _on_paper(axes, [point[:2] for point in points], size)
    crowd, line = _drawn(axes, size), 1.3 * (SMALL + 1)
    taken: list[tuple[Any, Any, Any]] = []  # of every name so far: its box, and where its leader begins and ends
    for j in np.argsort(spots[:, 0]):
        _, _, name, colour = points[j]
        others = np.delete(spots, j, axis=0)
        candidates = [
            _candidate(spots[j], side, reach * line, rise * line, 0.55 * (SMALL + 1) * len(name), line)
            for side, reach, rise in PLACES
        ]
        costs = [_in_the_way(*found, spots[j], size, crowd, others, taken) for found in candidates]
        box, end = candidates[int(np.argmin(costs))]
        taken.append((box, spots[j], end))
        side = "left" if end[0] >= spots[j][0] else "right"
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4, "alpha": 0.8}
        arrow |= {"relpos": (0.0 if side == "left" else 1.0, 0.5), "patchA": None}
        axes.annotate(
            name, points[j][:2], end / size, "data", "axes fraction", arrow, va="center", ha=side, path_effects=_halo(),
            fontsize=SMALL + 1, color=darker(colour), zorder=6,
        )  # fmt: skip


# Where a name may stand, seen from its point: on which side, and how many lines of type away and up; of equals the first.
PLACES = [(side, reach, rise) for reach in (0.8, 2, 4) for rise in (1, -1, 0, 2, -2, 3, -3, 4.5, -4.5) for side in (1, -1)]


def _on_paper(axes: Axes, places: Any, size: Any) -> Any:
    """Places in the data, `(n x 2)`, in points of type from the corner of axes of that size."""
    data = np.asarray(places, dtype=np.float64).reshape(-1, 2)
    with np.errstate(invalid="ignore", divide="ignore"):  # what logarithmic axes cannot show
        return (axes.transData + axes.transAxes.inverted()).transform(data) * size


def _drawn(axes: Axes, size: Any) -> Any:
    """Where something is drawn, by points every few points of type: dots, lines and the bars of intervals, `(n x 2)`."""
    from matplotlib.collections import LineCollection

    bars = [part for found in axes.collections if isinstance(found, LineCollection) for part in found.get_segments()]
    lines = [found for found in axes.lines if found.get_transform() == axes.transData]
    paths = [_on_paper(axes, bar, size) for bar in bars]
    paths += [_on_paper(axes, found.get_xydata(), size) for found in lines if found.get_linestyle() != "None"]
    dots = [_on_paper(axes, found.get_xydata(), size) for found in lines if found.get_linestyle() == "None"]
    steps = [a + (b - a) * np.linspace(0, 1, 30)[:, None] for path in paths for a, b in zip(path, path[1:], strict=False)]
    found = np.concatenate([np.zeros((0, 2)), *dots, *steps])
    return found[np.isfinite(found).all(1)]


def _candidate(spot: Any, side: int, reach: float, rise: float, width: float, height: float) -> tuple[Any, Any]:
    """The box of a name, (left, below, right, above), and the middle of its edge towards the point."""
    near = spot + np.array([side * reach, rise])
    far = near[0] + side * width
    return np.array([min(near[0], far), near[1] - height / 2, max(near[0], far), near[1] + height / 2]), near


def _in_the_way(box: Any, end: Any, spot: Any, size: Any, crowd: Any, others: Any, taken: Sequence[tuple[Any, Any, Any]]) -> float:
    """How bad a place is: out of the axes, over points and names, across leaders, over what else is drawn, and far away."""
    outside = float(np.clip([-box[0], -box[1], box[2] - size[0], box[3] - size[1]], 0, None).sum())
    leader = spot + (end - spot) * np.linspace(0, 1, 12)[1:, None]
    hidden = sum(bool((np.abs(other - leader) < 4).all(1).any()) for other in others) + int(_within(box, others, 4).sum())
    for theirs, begin, stop in taken:
        beside = box[2] <= theirs[0] or box[0] >= theirs[2] or box[3] <= theirs[1] or box[1] >= theirs[3]
        line = begin + (stop - begin) * np.linspace(0, 1, 12)[:, None]
        hidden += int(not beside) + bool(_within(theirs, leader).any()) + bool(_within(box, line).any())
    return 1000 * outside + 100 * hidden + 4 * int(_within(box, crowd).sum()) + 0.2 * float(np.abs(end - spot).sum())


def _within(box: Any, places: Any, margin: float = 0.0) -> Any:
    """Which places, `(n x 2)`, lie in a box or nearer to it than the margin."""
    low, high = box[:2] - margin, box[2:] + margin
    return ((places > low) & (places < high)).all(-1)


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
    engine = figure.get_layout_engine()
    if engine is not None:
        # laid out once, and by itself: matplotlib would draw all of it once more for that, and again for every file
        engine.execute(figure)
        figure.set_layout_engine(None)
    try:
        with rc_context({"pdf.fonttype": 42}):  # letters stay letters
            for file in files:
                # the same figure is the same file, whenever it was made
                figure.savefig(file, metadata={"CreationDate": None} if file.suffix == VECTOR else None)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"the figure cannot be written to {path}: {error}.") from error
