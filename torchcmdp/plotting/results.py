"""The figures of runs: regret always beside the violation that it was bought with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchcmdp.errors import InvalidInput, check_kind, switch
from torchcmdp.metrics import growth_exponent, mean_and_interval
from torchcmdp.plotting.curves import Curve, Panel, array, draw, draw_panel
from torchcmdp.plotting.style import INK, TITLE, blank, cross, darker, looks, minus, name_points, save, thousands, tidy, zero_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
MEASURES = {
    "regret": "cumulative regret (reward)",
    "violation": "cumulative violation (cost)",
    "positive_violation": "cumulative positive violation (cost)",
}


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
        path: The file; of a PNG a PDF is written beside it.
        curves: Those of one `Panel`; or a `RunResult`, several of them, or a mapping of labels to them, whose regret, violation and
            positive violation are drawn side by side.
        ylabel: As for `Panel`; results need none.
        bounds, title, sqrt_guide: As for `Panel`.
    """
    for name, words in (("ylabel", ylabel), ("title", title)):
        check_kind(name, words, str | None, "a text")
    check_kind("bounds", bounds, Mapping | None, "curves by label")
    switch("sqrt_guide", sqrt_guide)
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


def figures(results: Mapping[str, Any]) -> dict[str, Figure]:
    """The three figures of an experiment: "curves", how fast they grow ("growth"), and what it came to ("balance").

    Args:
        results: Label to `RunResult`, or anything with its curves and bounds.
    """
    return {"curves": draw(panels(results)), "growth": draw(growth_panels(results)), "balance": balance(results)}


def panels(results: Mapping[str, Any]) -> list[Panel]:
    """Regret, violation and positive violation, with one curve a result; the argument is that of `figures`."""
    return [
        Panel(_curves(results, name), ylabel, _finding(results, name), bounds_of(results, name))
        for name, ylabel in MEASURES.items()
    ]


def growth_panels(results: Mapping[str, Any]) -> list[Panel]:
    """The same on logarithmic axes, with sqrt(t) to compare, and the exponent of the last half of each curve at its end."""
    found = []
    for name, ylabel in MEASURES.items():
        powers = {label: _power(b) for label, b in _exponents(results, name).items()}
        note = "exponents: of the last half of what is drawn" if powers else ""
        look: dict[str, Any] = {"remarks": powers, "sqrt_guide": True, "logarithmic": True, "note": note}
        found.append(Panel(_curves(results, name), ylabel, _growth(results, name), **look))
    return found


def _exponents(results: Mapping[str, Any], name: str) -> dict[str, float]:
    """Of the last half of each curve as it is drawn, the mean over runs, where that is above zero."""
    found = {}
    for label, result in results.items():
        curve = torch.atleast_2d(torch.from_numpy(array(getattr(result, name)))).mean(0, keepdim=True)
        found[label] = float(growth_exponent(torch.from_numpy(array(result.episodes)), curve)[0])
    return {label: b for label, b in found.items() if math.isfinite(b)}


def _growth(results: Mapping[str, Any], name: str) -> str:
    """How fast the slowest grows, over the last half of its points; of the regret together with what it was bought with."""
    known, what = _exponents(results, name), _words(name)
    if not known:
        return f"{what}: not above zero"
    slowest = min(known, key=lambda label: known[label])
    title = f"{f'Least exponent of {what.lower()}' if len(results) > 1 else what}: {slowest}, {_power(known[slowest])}"
    bought = _exponents(results, "positive_violation").get(slowest)
    return f"{title}, for positive violation {_power(bought)}" if name == "regret" and bought is not None else title


def _power(exponent: float) -> str:
    return f"$t^{{{exponent:.2f}}}$"


def overview(results: Mapping[str, Any], title: str) -> Figure:
    """What each ended with, regret against positive violation, and how both came about, below a title; as `figures` otherwise."""
    figure = blank(14.1, 4.3)
    _draw_plane(figure.add_subplot(1, 3, 1), results)
    for j, name in enumerate(("regret", "positive_violation")):
        draw_panel(figure.add_subplot(1, 3, j + 2), Panel(_curves(results, name), MEASURES[name], _finding(results, name)))
    figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE + 1, color=INK)
    return figure


def balance(results: Mapping[str, Any]) -> Figure:
    """What each ended with: regret against positive violation, and the share of its episodes that were unsafe."""
    figure = blank(10.6, 4.2)
    _draw_plane(figure.add_subplot(1, 2, 1), results)
    _draw_shares(figure.add_subplot(1, 2, 2), results)
    return figure


def _draw_plane(axes: Axes, results: Mapping[str, Any]) -> None:
    ends, ends_of = [], {label: [_last(r, name) for name in ("positive_violation", "regret")] for label, r in results.items()}
    for label, (colour, _) in looks(results).items():
        unsafe, regret = ends_of[label]
        axes.plot(array(unsafe), array(regret), ".", color=colour, markersize=3, alpha=0.35, zorder=2)
        (x, dx), (y, dy) = _interval(unsafe), _interval(regret)
        if math.isfinite(x + y):
            cross(axes, x, y, dx, dy, colour)
            ends.append((x, y, label, colour))
    zero_line(axes)
    axes.margins(0.12)
    right = axes.get_xlim()[1]
    axes.set_xlim(-0.03 * right, right)  # there is nothing below zero
    thousands(axes.xaxis)
    thousands(axes.yaxis)
    name_points(axes, ends)
    front = unbeaten({label: (x, y) for x, y, label, _ in ends})
    title = "No policy is safe, so that there is no regret to compare"
    if len(ends) == 1:
        title = f"{ends[0][2]}: regret {minus(f'{ends[0][1]:,.0f}')} with {ends[0][0]:,.0f} of positive violation"
    elif len(front) < len(ends):
        title = f"Beaten by nobody in both: {', '.join(front)}"
    elif ends:
        title = "Each has less of one for more of the other"
    note = "small dots are runs, large ones their means with 95% intervals"
    tidy(axes, MEASURES["positive_violation"], MEASURES["regret"], title, note)


def _draw_shares(axes: Axes, results: Mapping[str, Any]) -> None:
    shares = {label: _interval(100 * _last(result, "unsafe_share")) for label, result in results.items()}
    for j, (label, (colour, _)) in enumerate(looks(results).items()):
        mean, half = shares[label]
        axes.barh(j, mean, height=0.5, color=colour, alpha=0.35, zorder=2)
        cross(axes, mean, j, half, 0.0, colour)
        where: dict[str, Any] = {"textcoords": "offset points", "ha": "center" if mean > 5 else "left"}  # not over the axis
        axes.annotate(f"{mean:.1f}%", (mean, j), (0, 13), fontsize=8, color=darker(colour), **where)
    axes.set_yticks(range(len(shares)), list(shares))
    axes.set_ylim(len(shares) - 0.4, -0.7)
    axes.set_xlim(-3, 106)  # with room for what stands at either end
    least = min(shares, key=lambda label: shares[label][0])
    title = f"{least} was unsafe in {shares[least][0]:.1f}% of its episodes{', the fewest' if len(shares) > 1 else ''}"
    note = "an episode is unsafe if the expected cost of some constraint is above zero"
    tidy(axes, "unsafe episodes (% of all)", "", title, note)
    axes.grid(False, axis="y")


def unbeaten(points: Mapping[T, tuple[float, float]]) -> list[T]:
    """Those than which no other is at most as large in both and smaller in one."""

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] <= other[0] and one[1] <= other[1] and one != other

    return [label for label, point in points.items() if not any(beats(other, point) for other in points.values())]


def bounds_of(results: Mapping[str, Any], name: str) -> dict[str, Curve]:
    """The trivial bound, and the theorem's where one of the results has it, called by whose it is unless it is everybody's."""
    first = next(iter(results.values()))
    trivial = first.bounds.get(f"trivial_{name.removeprefix('positive_')}", first.bounds["trivial"])
    found: dict[str, Curve] = {"trivial bound": (first.episodes, trivial)}
    own = [label for label, result in results.items() if name in result.bounds]
    if own:
        whose = "theorem's bound" if len(own) == len(results) else f"theorem's bound for {', '.join(own)}"
        found[whose] = (results[own[0]].episodes, results[own[0]].bounds[name])
    return found


def _finding(results: Mapping[str, Any], name: str) -> str:
    """What a panel shows, in words; of the regret together with what it was bought with."""
    ends = {label: float(_last(result, name).mean()) for label, result in results.items()}
    known = {label: end for label, end in ends.items() if math.isfinite(end)}
    if not known:
        return f"{_words(name)}: undefined, since no policy is safe"
    best = min(known, key=lambda label: known[label])
    words = f"{_words(name)} of {best}: {minus(f'{known[best]:,.0f}')}{', the least' if len(ends) > 1 else ''}"
    if name == "regret":
        unsafe = float(_last(results[best], "positive_violation").mean())
        words += f", for {unsafe:,.0f} of positive violation"
    return words


def _curves(results: Mapping[str, Any], name: str) -> dict[str, Curve]:
    return {label: (result.episodes, getattr(result, name)) for label, result in results.items()}


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _last(result: Any, name: str) -> torch.Tensor:
    """What every run ended with, `(runs,)`."""
    return torch.from_numpy(array(getattr(result, name)))[..., -1].reshape(-1)


def _interval(values: torch.Tensor) -> tuple[float, float]:
    mean, half = mean_and_interval(values)
    return float(mean), float(half)
