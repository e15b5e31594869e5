"""What a comparison leaves behind: a table and a figure a problem, ranks, pairwise wins, as Markdown and as HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp import plotting
from torchcmdp.learners import LEARNERS
from torchcmdp.plotting.results import MEASURES

from ..program import mean_and_half, publish, table, with_interval, write_table

# What each player is called; the practical ones are recipes of their own.
NAMES = {key: kind.name for key, kind in LEARNERS.items()}
NAMES |= {"wc-ops-practical": "WC-OPS practical", "opt-cmdp-practical": "OptCMDP practical"}
# What the same players are told otherwise, by the end of their key.
VARIANTS = {"-untold": "untold", "-tied": "tied"}
PLAYERS = NAMES | {f"{key}{end}": f"{name} {word}" for key, name in NAMES.items() for end, word in VARIANTS.items()}
# By problem and learner.
Results = dict[str, dict[str, tc.RunResult]]
WEIGHT = 2.0  # of the positive violation in the loss by which learners are ranked; that of `train tune`
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222}"
    "div{overflow-x:auto;margin:1em 0}table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}"
    "td,th{border-bottom:1px solid #ddd;padding:.3em .6em;text-align:left;vertical-align:bottom}td{white-space:pre}"
    "img{max-width:100%}"
)


def loss(result: tc.RunResult) -> Tensor:
    """(regret + 2 positive violation) / episodes in normal form, which no choice of units changes, `(runs,)`."""
    scaled = result.scaled
    return (scaled.regret[:, -1] + WEIGHT * scaled.positive_violation[:, -1]) / int(result.episodes[-1])


def write_problem(folder: Path, name: str, results: Mapping[str, tc.RunResult]) -> None:
    """The figure and the numbers of one problem."""
    place = folder / name.replace("/", "-")
    plotting.save(place / "figure.png", plotting.overview({PLAYERS[key]: result for key, result in results.items()}, name))
    rows = []
    for key, result in results.items():
        row: dict[str, Any] = {"learner": key}
        for each in MEASURES:
            row[each], row[f"{each}_ci95"] = mean_and_half(getattr(result, each)[:, -1])
        rows.append({**row, "seconds": round(result.seconds, 2)})
    write_table(place / "numbers.csv", rows)


def write_report(folder: Path, results: Results, options: Mapping[str, Any]) -> None:
    """report.md, report.html and what is printed."""
    who = f"{len(results)} problems, {len(options['learners'])} learners with {options['constants']} constants"
    full = all(len(found) == len(_players(results)) for found in results.values())
    parts = [
        "# Comparison",
        f"{who}, {options['seeds']} seeds of {options['episodes']:,} episodes; 95% intervals. Regret and violations are in the "
        f"units of each problem. Learners are ranked by their loss, (regret + {WEIGHT:g} x positive violation) / episodes in "
        f"normal form, in the mean over seeds{'' if full else '; - where a learner sits a problem out, since it needs a margin'}.",
        "## Ranks",
        ranks(results),
        "## Pairwise wins",
        "How often the learner of the row had the smaller loss than that of the column with the same seed: the share of seeds, in "
        "the mean over the problems that both play, and its interval over them; a draw is half a win.",
        wins(results),
        *(part for name, found in results.items() for part in _problem_parts(name, found)),
    ]
    text = "\n\n".join(parts)
    (folder / "report.html").write_text(as_html(text))
    publish(folder / "report.md", text, f"Written to {folder / 'report.md'}, {folder / 'report.html'} and a folder a problem")


def _problem_parts(name: str, results: Mapping[str, tc.RunResult]) -> list[str]:
    problem = tc.problems.make(name)
    first = next(iter(results.values()))
    best = f"Safe optimum {float(first.safe_value.mean()):z.4f} an episode, optimum {float(first.best_value.mean()):z.4f}."
    rows = [
        [PLAYERS[key], *(with_interval(getattr(r, each)[:, -1]) for each in MEASURES), with_interval(loss(r), ".4f")]
        for key, r in results.items()
    ]
    header = ["learner", "regret", "violation", "positive violation", "loss"]
    return [f"## {name}", f"{problem.source}. {best}", table(header, rows, name), f"![{name}]({name.replace('/', '-')}/figure.png)"]


def ranks(results: Results) -> str:
    """The rank of each learner on each problem that it plays by its mean loss, and its mean rank with an interval over them."""
    learners = _players(results)
    places = torch.full((len(results), len(learners)), torch.nan, dtype=torch.float64)
    for row, found in zip(places, results.values(), strict=True):
        here = [j for j, key in enumerate(learners) if key in found]
        means = torch.stack([loss(found[learners[j]]).mean() for j in here]).nan_to_num(nan=torch.inf)
        row[here] = (means[:, None] > means[None]).sum(1).double() + 1
    rows = []
    for j in places.nanmean(0).argsort().tolist():
        own = places[:, j]
        mean = with_interval(own[own.isfinite()], ".2f")
        each = " ".join(f"{'-' if place.isnan() else int(place):>{len(str(len(learners)))}}" for place in own)
        rows.append([PLAYERS[learners[j]], mean, str(int((own == 1).sum())), each])
    return table(["learner", "mean rank", "first on", "rank on each problem, in the order below"], rows, "ranks")


def wins(results: Results) -> str:
    """A row and a column a learner, over the problems that both of them play."""
    learners = _players(results)
    rows = []
    for mine in learners:
        cells = [PLAYERS[mine]]
        for other in learners:
            pairs = [(loss(found[mine]), loss(found[other])) for found in results.values() if {mine, other} <= found.keys()]
            shares = [((ours < theirs).double() + 0.5 * (ours == theirs).double()).mean() for ours, theirs in pairs]
            cells.append(with_interval(torch.stack(shares), ".2f") if shares and mine != other else "-")
        rows.append(cells)
    return table(["", *(PLAYERS[key] for key in learners)], rows, "pairwise wins")


def _players(results: Results) -> list[str]:
    """All who play a problem, in the order of the options: one that sits some of them out is in the others."""
    return [key for key in PLAYERS if any(key in found for found in results.values())]


def as_html(text: str) -> str:
    """Headings, paragraphs, tables and images of our own Markdown as one page."""
    blocks = [_block(block) for block in text.split("\n\n")]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Comparison</title><style>{STYLE}</style>'
    return "\n".join([head, *blocks, "</html>", ""])


def _block(block: str) -> str:
    if image := re.fullmatch(r"!\[(.*)\]\((.*)\)", block):
        return f'<img alt="{html.escape(image[1])}" src="{html.escape(image[2])}">'
    if heading := re.fullmatch(r"(#+) (.*)", block):
        size = len(heading[1])
        return f"<h{size}>{html.escape(heading[2])}</h{size}>"
    if block.startswith("|"):
        lines = [line.strip("|").split("|") for line in block.splitlines()]
        return f"<div><table>{_line(lines[0], 'th')}{''.join(_line(line, 'td') for line in lines[2:])}</table></div>"
    return f"<p>{html.escape(block)}</p>"


def _line(cells: Sequence[str], tag: str) -> str:
    # a space that is as wide as a digit keeps numbers of one and two digits in line
    shown = [cell[1:].rstrip().replace("+-", "±").replace("  ", " \u2007") for cell in cells]
    shown = [f"\u2007{cell[1:]}" if cell.startswith(" ") else cell for cell in shown]
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in shown) + "</tr>"
