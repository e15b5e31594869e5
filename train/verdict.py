"""Learners side by side in numbers and words: one table, and two sentences that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.metrics import mean_and_interval

from .program import table, with_interval

# Columns, all the smaller the better, and how their numbers are written.
COLUMNS = {"regret": ",.1f", "violation": ",.1f", "positive violation": ",.1f", "unsafe episodes": ".1%"}
Results = Mapping[str, tc.RunResult]


def ends(result: tc.RunResult, column: str) -> Tensor:
    """What every run ended with, `(runs,)`."""
    name = "unsafe_share" if column == "unsafe episodes" else column.replace(" ", "_")
    curve: Tensor = getattr(result, name)
    return curve[:, -1]


def ranking(results: Results) -> str:
    """The table: totals with 95% intervals, the best in bold.

    Of the regret only one that is not bought is best: the least, if no other learner has less positive violation.
    """
    best = {column: least(results, column) for column in COLUMNS}
    if best["regret"] and not all(at_most(results, best["regret"], rival, "positive violation") for rival in results):
        best["regret"] = ""
    rows = []
    for label, result in results.items():
        cells = [(column, with_interval(ends(result, column), form)) for column, form in COLUMNS.items()]
        rows.append([label, *(f"**{cell}**" if best[column] == label else cell for column, cell in cells)])
    return table(["learner", *COLUMNS], rows)


def least(results: Results, column: str) -> str:
    """Who has the least in the mean over runs; nobody where it is undefined, or the same for all."""
    means = {label: float(ends(result, column).mean()) for label, result in results.items()}
    known = {label: mean for label, mean in means.items() if math.isfinite(mean)}
    return min(known, key=lambda label: known[label]) if len(set(known.values())) > 1 else ""


def difference(results: Results, one: str, other: str, column: str) -> tuple[float, float]:
    """The 95% interval of the first's total minus the second's, run by run, since runs of a number share their random numbers."""
    values = ends(results[one], column) - ends(results[other], column)
    mean, half = (float(x) for x in mean_and_interval(values))
    return (mean - half, mean + half) if half == half else (mean, mean)


def at_most(results: Results, one: str, other: str, column: str) -> bool:
    """Whether nothing speaks for the first having more than the second."""
    return one == other or difference(results, one, other, column)[0] <= 0


def alike(results: Results, best: str, column: str) -> list[str]:
    """Who cannot be told from the best."""
    return [label for label in results if label != best and difference(results, best, label, column)[1] >= 0]


def sentences(results: Results) -> list[str]:
    """Two sentences about what the numbers show, the regret never without the violation."""
    episodes = int(next(iter(results.values())).episodes[-1])
    if not all(bool(torch.isfinite(ends(result, "regret")).all()) for result in results.values()):
        return ["No policy is safe in some of these CMDPs, so that there is no regret.", _safest(results, episodes)]
    safest, keenest = least(results, "positive violation"), least(results, "regret")
    if not safest:
        unsafe = float(ends(next(iter(results.values())), "positive violation").mean())
        same = "Nobody broke a constraint" if unsafe == 0 else "All broke the constraints alike"
        words = f"{keenest} has the least regret, {_number(results, keenest, 'regret')}" if keenest else "all have the same regret"
        return [f"{same} in {episodes:,} episodes.", f"{words[0].upper()}{words[1:]}."]
    return [_safest(results, episodes), _keenest(results, safest, keenest)]


def _safest(results: Results, episodes: int) -> str:
    safest = least(results, "positive violation") or next(iter(results))
    equals = alike(results, safest, "positive violation")
    doubt = f" ({_join(equals)} cannot be told from it)" if equals and len(next(iter(results.values())).regret) > 1 else ""
    return (
        f"In {episodes:,} episodes {safest} broke the constraints least{doubt}: positive violation "
        f"{_number(results, safest, 'positive violation')}, unsafe in {_number(results, safest, 'unsafe episodes')} of episodes, "
        f"regret {_number(results, safest, 'regret')}."
    )


def _keenest(results: Results, safest: str, keenest: str) -> str:
    if keenest in (safest, ""):
        return "It has the least regret, too, so that here nothing was traded for safety."
    regret, unsafe = (_number(results, keenest, column) for column in ("regret", "positive violation"))
    words = f"The least regret is {_possessive(keenest)}, {regret}"
    if difference(results, keenest, safest, "regret")[1] >= 0:
        words += f", which cannot be told from {_possessive(safest)},"
    if at_most(results, keenest, safest, "positive violation"):
        return f"{words} with a positive violation of {unsafe}, which cannot be told from the least."
    bought = "and a regret below zero is reward that no safe policy can earn" if _mean(results, keenest, "regret") < 0 else ""
    ratio = _mean(results, keenest, "positive violation") / max(_mean(results, safest, "positive violation"), 1e-12)
    more = f"{ratio:,.1f} times" if ratio < 1000 else "far more than"
    return ", ".join(filter(None, (f"{words} with {more} the positive violation, {unsafe}", bought))) + "."


def _mean(results: Results, label: str, column: str) -> float:
    return float(ends(results[label], column).mean())


def _number(results: Results, label: str, column: str) -> str:
    return with_interval(ends(results[label], column), COLUMNS[column])


def _possessive(label: str) -> str:
    return f"{label}'" if label.endswith("s") else f"{label}'s"


def _join(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
