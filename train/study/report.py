"""What the study says: tables with intervals, who dominates whom, whether the goals are met, and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor

from torchcmdp.plotting.style import blank, cross, looks, name_points, tidy, zero_line

from ..program import mean_and_half, table, with_interval
from . import design
from .design import ENTRIES, SETTINGS

# by setting and learner: measures, a number an instance, (instances,)
Numbers = dict[str, dict[str, dict[str, Tensor]]]
PAIR = ("regret", "positive violation")
PUBLISHED = tuple(key for key, entry in ENTRIES.items() if entry.published)


def wilson(hits: int, n: int) -> tuple[float, float]:
    """The 95% Wilson interval of a fraction."""
    from scipy.stats import binomtest  # slow to import

    found = binomtest(hits, n).proportion_ci(method="wilson")
    return found.low, found.high


def dominates(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    """On which instances one has less regret and less positive violation than the other, `(instances,)` bool."""
    return torch.stack([one[name] < other[name] for name in PAIR]).all(0)


def undominated(players: Mapping[str, Mapping[str, Tensor]], title: str) -> Tensor:
    """On which instances no published rival dominates a learner, `(instances,)` bool."""
    rivals = [players[key] for key in PUBLISHED if key != title and key in players]
    return ~torch.stack([dominates(rival, players[title]) for rival in rivals]).any(0)


def best_rivals(searched: Mapping[str, Sequence[float]], count: int = design.FINAL_RIVALS) -> list[str]:
    """The published rivals with the least objectives on the training instances, the best first."""
    return sorted(PUBLISHED, key=lambda key: min(searched[key]))[:count]


def report(
    command: str,
    options: Mapping[str, Any],
    searched: Mapping[str, Sequence[float]],
    chosen: Mapping[str, Mapping[str, float]],
    held: Mapping[int, Numbers],
    ablated: Numbers,
) -> str:
    """The report, as Markdown."""
    n, rival = options["instances"], best_rivals(searched)[0]
    size = "-".join(map(str, design.WIDTHS))
    parts = [
        f"`{command}`",
        f"{n} held-out instances ({size}, {design.ACTIONS} actions, {design.CONSTRAINTS} constraints; half with Slater gap "
        f"{design.TIGHT}, half with {design.SLACK}, or less), {options['seeds']} seeds; of the finalists, the practical learners "
        f"and the {design.FINAL_RIVALS} best published rivals, over the final horizon {options['final_seeds']}. Every learner had "
        f"{options['configurations']} configurations on 16 training instances; the best published rival there is {rival}. "
        "Intervals are 95%: of means over instances, and Wilson's of fractions. Undominated: no published rival that was played "
        f"has both less regret and less positive violation on the instance. Dominating: less of both than {rival}.",
        *(f"## {T:,} episodes\n\n{_table(numbers, rival, T)}\n\n{_goals(numbers, rival)}" for T, numbers in held.items()),
    ]
    if ablated:
        first = next(iter(held))
        parts.append(f"## Practical WC-OPS without each of its changes, {first:,} episodes\n\n{_ablation(held[first], ablated)}")
    rows = [
        [key, f"{min(searched[key]):.3f}", ", ".join(f"{k} {v:.3g}" for k, v in chosen[key].items()) or "-"] for key in searched
    ]
    parts.append("## What the search chose\n\n" + table(["learner", "objective", "constants"], rows, "search"))
    return "\n\n".join(parts)


def _table(numbers: Numbers, rival: str, episodes: int) -> str:
    rows = []
    for setting, players in numbers.items():
        for title, found in players.items():
            cells = [with_interval(found[name]) for name in ("regret", "violation", "positive violation")]
            safe = "-" if title == rival else _fraction(dominates(found, players[rival]))
            alarms = f"{float(found['alarms'].mean()):.1f}" if "alarms" in found else "-"
            rows.append([setting, title, *cells, _fraction(undominated(players, title)), safe, alarms])
    header = ["setting", "learner", "regret", "violation", "positive violation", "undominated", "dominating", "alarms"]
    return table(header, rows, f"{episodes:,} episodes")


def _fraction(hits: Tensor) -> str:
    low, high = wilson(int(hits.sum()), len(hits))
    return f"{float(hits.double().mean()):.0%} [{low:.0%}, {high:.0%}]"


def _goals(numbers: Numbers, rival: str) -> str:
    """Whether practical WC-OPS as it is shipped meets the goals, in each setting."""
    lines = []
    for setting, players in numbers.items():
        hits = undominated(players, "practical WC-OPS")
        low, _ = wilson(int(hits.sum()), len(hits))
        met = float(hits.double().mean()) >= design.LEAST_UNDOMINATED and low > design.LEAST_LOWER_END
        tight, roomy = (float(part.double().mean()) for part in (hits[::2], hits[1::2]))  # as the seeds alternate
        shares = f"{_fraction(hits)} (tight {tight:.0%}, with slack {roomy:.0%})"
        line = f"- {setting}: undominated on {shares}: {'met' if met else 'not met'}"
        if setting in design.CHANGING:
            ratio = float(players["practical WC-OPS"]["positive violation"].mean() / players[rival]["positive violation"].mean())
            kept = "met" if ratio <= design.MOST_VIOLATION else "not met"
            line += f"; positive violation {ratio:.0%} of {rival}'s: {kept}"
        ours = players["practical OptCMDP"]
        beaten, beats = dominates(ours, players["practical WC-OPS"]), dominates(players["practical WC-OPS"], ours)
        lines.append(line + f"; dominated by practical OptCMDP on {_fraction(beaten)}, dominating it on {_fraction(beats)}.")
    goal = (
        f"Goals for practical WC-OPS as it is shipped (at least {design.LEAST_UNDOMINATED:.0%} with the lower end above "
        f"{design.LEAST_LOWER_END:.0%}; where costs change, at most {design.MOST_VIOLATION:.0%} of the rival's positive violation):"
    )
    return "\n".join([goal, "", *lines])


def _ablation(numbers: Numbers, ablated: Numbers) -> str:
    rows = []
    for setting, players in numbers.items():
        whole = players["practical WC-OPS"]
        for title, found in {"whole": whole, **ablated[setting]}.items():
            cells = [with_interval(found[name]) for name in PAIR]
            change = ["-" if title == "whole" else with_interval(found[name] - whole[name]) for name in PAIR]
            rows.append([setting, title, *cells, *change, _fraction(undominated({**players, title: found}, title))])
    header = ["setting", "practical WC-OPS", *PAIR, *(f"more {name}" for name in PAIR), "undominated"]
    return table(header, rows, "ablations")


def figure(held: Mapping[int, Numbers], n: int, rival: str) -> Figure:
    """A panel for each setting: what everybody pays in regret and positive violation, an episode, from horizon to horizon."""
    drawn = blank(13.2, 9.8)
    marks = ", ".join(f"{horizon:,}" for horizon in held)
    for j, setting in enumerate(SETTINGS):
        axes = drawn.add_subplot(2, 2, j + 1)
        paths: dict[str, list[list[float]]] = {}
        for horizon, numbers in held.items():
            for title, found in numbers[setting].items():
                if "searched" not in title:  # the tables have them
                    pairs = [mean_and_half(found[name] / horizon) for name in PAIR]
                    paths.setdefault(title, []).append([value for pair in pairs for value in pair])
        ends = []
        for title, path in paths.items():
            name, colour, shape = _mark(title)
            for k, (x, dx, y, dy) in enumerate(path):
                last = k + 1 == len(path)
                bars = (dx, dy) if last else (0.0, 0.0)
                cross(axes, x, y, *bars, colour, fmt=shape, markersize=4 + 2 * k, alpha=1 if last else 0.4)
            axes.plot([point[0] for point in path], [point[2] for point in path], color=colour, linewidth=1, alpha=0.4)
            ends.append((path[-1][0], path[-1][2], name, colour))
        axes.set_yscale("log")  # some are ten times as unsafe as others
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.margins(y=0.12)
        zero_line(axes, "x")
        note = f"larger marks, longer runs: {marks} episodes; 95% intervals over {n} instances; squares: as shipped, dots: searched"
        title = _finding(setting, held[max(held)][setting], rival, max(held))
        tidy(axes, "regret an episode (reward)", "positive violation an episode (cost)", title, note)
        name_points(axes, ends)
    return drawn


def _finding(setting: str, players: Mapping[str, Mapping[str, Tensor]], rival: str, horizon: int) -> str:
    """What practical WC-OPS buys, and what it pays."""
    ours, theirs = players["practical WC-OPS"], players[rival]
    ratio = float(ours["positive violation"].mean() / theirs["positive violation"].mean())
    more, half = mean_and_half((ours["regret"] - theirs["regret"]) / horizon)
    clear = f"{abs(more):.2f} {'more' if more > 0 else 'less'} regret an episode"
    regret = clear if abs(more) > half else "no clearly different regret"
    return f"{setting.capitalize()}: WC-OPS practical has {ratio:.0%} of {rival}'s positive violation, with {regret}"


def _mark(title: str) -> tuple[str, str, str]:
    """What a learner is called in figures, its colour, and its shape: as published a dot, practical a square."""
    practical = title.startswith("practical ")
    name = f"{title.removeprefix('practical ')} practical" if practical else title
    return name, looks([name])[name][0], "s" if practical else "o"
