"""Figures of runs: mean curves with 95% bands, and the bounds they are measured against."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from torchcmdp.errors import InvalidInput
from torchcmdp.metrics import mean_and_interval

if TYPE_CHECKING:  # matplotlib is slow to import: only those who draw wait for it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette without its yellow, which is too light for a line: distinct under the common kinds of colour blindness.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), "-", "--")
INK = "#333333"

# A bound is drawn when at least this share of the horizontal axis sees it; less is a stub that explains nothing.
VISIBLE_SHARE = 0.1

Curve = tuple[ArrayLike, ArrayLike]


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
        curves: Label to (episodes `(points,)`, values `(runs x points)`): drawn as the mean over runs and its 95% band.
        ylabel: What the values are.
        title: Above the axes.
        bounds: Label to (episodes, values), both `(points,)`: grey lines, drawn only where they fit between the curves' extremes.
        sqrt_guide: Also draw c * sqrt(t) through the last point of the first curve.
    """

    curves: Mapping[str, Curve]
    ylabel: str
    title: str | None = None
    bounds: Mapping[str, Curve] = field(default_factory=dict)
    sqrt_guide: bool = False


def plot_curves(
    path: str | PathLike[str],
    curves: Any,
    ylabel: str | None = None,
    *,
    bounds: Mapping[str, Curve] | None = None,
    title: str | None = None,
    sqrt_guide: bool = False,
) -> None:
    """Write curves, or the results of runs, to an image file; the suffix of `path` chooses the format.

    Args:
        path: The file.
        curves: Those of one `Panel`; or a `RunResult`, several of them, or a mapping of labels to them, whose regret, violation and
            positive violation are drawn side by side.
        ylabel: As for `Panel`; results need none.
        bounds, title, sqrt_guide: As for `Panel`.
    """
    results = _results(curves)
    if results is None and ylabel is None:
        raise InvalidInput("plot_curves got curves without a ylabel; say what the values are, or pass results of runs.")
    drawn = [Panel(curves, ylabel or "", title, bounds or {}, sqrt_guide)] if results is None else panels(results)
    save(path, draw(drawn))


def _results(value: Any) -> dict[str, Any] | None:
    """Results by label, or None where these are not results."""

    def is_result(entry: Any) -> bool:
        return all(hasattr(entry, name) for name in ("episodes", "regret", "bounds"))

    if is_result(value):
        value = [value]
    if isinstance(value, Mapping):
        return dict(value) if value and all(map(is_result, value.values())) else None
    if not isinstance(value, Sequence) or not value or not all(map(is_result, value)):
        raise InvalidInput(f"plot_curves got a {type(value).__name__}; expected results of runs, or curves or results by label.")
    names = [result.config["learner"]["name"] for result in value]
    return {
        name if names.count(name) == 1 else f"{name} {j}": result for j, (name, result) in enumerate(zip(names, value, strict=True))
    }


def draw(panels: Sequence[Panel]) -> Figure:
    """Panels side by side in one figure, without touching matplotlib's global state."""
    if not panels:
        raise InvalidInput("draw got no panels; it needs at least one.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(panels), 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for j, panel in enumerate(panels):
        _draw_panel(figure.add_subplot(1, len(panels), j + 1), panel)
    return figure


def save(path: str | PathLike[str], figure: Figure) -> None:
    """Write a figure; for an unwritable place or unknown format, one sentence."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"the figure cannot be written to {path}: {error}.") from error


def figures(results: Mapping[str, Any]) -> dict[str, Figure]:
    """The two figures of an experiment, "regret" and "violation", with one curve a result.

    Args:
        results: Label to `RunResult`, or anything with its curves and bounds.
    """
    regret, *violations = panels(results)
    return {"regret": draw([regret]), "violation": draw(violations)}


def panels(results: Mapping[str, Any]) -> list[Panel]:
    """Regret, violation and positive violation, with one curve a result; the argument is that of `figures`."""

    def panel(name: str) -> Panel:
        curves = {f"{label}, {len(r.regret)} runs": (r.episodes, getattr(r, name)) for label, r in results.items()}
        return Panel(curves, f"cumulative {name.replace('_', ' ')}", bounds=bounds_of(results, name))

    return [panel(name) for name in ("regret", "violation", "positive_violation")]


def bounds_of(results: Mapping[str, Any], name: str) -> dict[str, Curve]:
    """The trivial bound, and the theorem's where one of the results has it, called by whose it is unless it is everybody's."""
    first = next(iter(results.values()))
    found: dict[str, Curve] = {"trivial bound": (first.episodes, first.bounds["trivial"])}
    own = [label for label, result in results.items() if name in result.bounds]
    if own:
        whose = "theorem's bound" if len(own) == len(results) else f"theorem's bound for {', '.join(own)}"
        found[whose] = (results[own[0]].episodes, results[own[0]].bounds[name])
    return found


def _draw_panel(axes: Axes, panel: Panel) -> None:
    if not panel.curves:
        raise InvalidInput(f"the panel {panel.ylabel!r} has no curves; it needs at least one.")
    low, high = 0.0, 0.0
    for j, (label, (episodes, values)) in enumerate(panel.curves.items()):
        x, mean, half = _summarise(label, episodes, values)
        colour, style = PALETTE[j % len(PALETTE)], STYLES[j % len(STYLES)]
        axes.plot(x, mean, color=colour, linestyle=style, linewidth=1.8, label=label, zorder=3)
        axes.fill_between(x, mean - half, mean + half, color=colour, alpha=0.2, linewidth=0, zorder=2)
        shown = np.isfinite(mean)  # the regret is NaN where no policy is safe
        low = min(low, float(np.min((mean - half)[shown], initial=0.0)))
        high = max(high, float(np.max((mean + half)[shown], initial=0.0)))
    margin = 0.06 * (high - low) or 1.0
    bottom, top = low - margin if low < 0 else 0.0, high + margin
    if panel.sqrt_guide:
        _draw_guide(axes, panel)
    for j, (label, (episodes, values)) in enumerate(panel.bounds.items()):
        _draw_bound(axes, label, _array(episodes), _array(values), (bottom, top), STYLES[1 + j % 3])
    axes.set_ylim(bottom, top)
    axes.set_xlim(0, max(float(_array(episodes)[-1]) for episodes, _ in panel.curves.values()))
    _decorate(axes, panel)


def _summarise(label: str, episodes: ArrayLike, values: ArrayLike) -> tuple[NDArray[np.float64], ...]:
    """Episodes, mean and 95% half-width of one curve, each `(points,)`; a single run has no band."""
    x, y = _array(episodes), np.atleast_2d(_array(values))
    if x.ndim != 1 or y.ndim != 2 or y.shape[1] != x.shape[0] or x.shape[0] == 0:
        raise InvalidInput(
            f"the curve {label!r} has episodes of shape {x.shape} and values of shape {y.shape}; "
            "expected (points,) and (runs x points)."
        )
    mean, half = mean_and_interval(torch.from_numpy(y))
    return x, _array(mean), np.nan_to_num(_array(half), nan=0.0, posinf=0.0)


def _draw_bound(
    axes: Axes, label: str, x: NDArray[np.float64], y: NDArray[np.float64], limits: tuple[float, float], style: object
) -> None:
    """A grey line where the bound is within the limits, else only its final value, in the legend."""
    inside = (y >= limits[0]) & (y <= limits[1])
    share = float(np.ptp(x[inside])) / float(x[-1]) if inside.any() and x[-1] > 0 else 0.0
    if share >= VISIBLE_SHARE:
        axes.plot(x, y, color="#777777", linestyle=style, linewidth=1.2, label=label, zorder=1)  # type: ignore[arg-type]
    else:
        axes.plot([], [], color="none", label=f"{label}: {_in_words(float(y[-1]))} at the end (off scale)")


def _draw_guide(axes: Axes, panel: Panel) -> None:
    episodes, values = next(iter(panel.curves.values()))
    x, last = _array(episodes), float(np.atleast_2d(_array(values))[:, -1].mean())
    t = np.linspace(0, x[-1], 200)
    axes.plot(t, last * np.sqrt(t / x[-1]), color="#999999", linestyle=":", linewidth=1.2, label=r"$\propto\sqrt{t}$", zorder=1)


def _decorate(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    thousands = FuncFormatter(lambda value, _: f"{value:,.10g}")
    axes.xaxis.set_major_formatter(thousands)
    axes.yaxis.set_major_formatter(thousands)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.tick_params(labelsize=10, colors=INK)
    axes.set_xlabel("episode", fontsize=11, color=INK)
    axes.set_ylabel(panel.ylabel, fontsize=11, color=INK)
    if panel.title:
        axes.set_title(panel.title, fontsize=12, color=INK, loc="left")
    axes.grid(True, color="#E5E5E5", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(fontsize=9, frameon=True, framealpha=0.9, edgecolor="none", labelcolor=INK)


def _in_words(value: float) -> str:
    """3.2e6 rather than 3200000.0, and 840 as it is."""
    if not math.isfinite(value) or abs(value) < 1e4:
        return f"{value:,.4g}"
    exponent = math.floor(math.log10(abs(value)))
    return f"{value / 10**exponent:.1f}e{exponent}"


def _array(values: ArrayLike) -> NDArray[np.float64]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    return np.asarray(values, dtype=np.float64)
