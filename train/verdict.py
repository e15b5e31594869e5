"""Learners side by side in numbers and words: one table, and two sentences that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import torchcmdp as tc

from .program import mean_and_half, table, with_interval

# Columns, all the smaller the better, and how their numbers are written.
COLUMNS = {"regret": ",.1f", "violation": ",.1f", "positive violation": ",.1f", "unsafe episodes": ".1%"}
Results = Mapping[str, tc.RunResult]
BASELINE_GIVEN = " with a baseline"  # at the end of the name of a learner that was given a safe policy to start from


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
    mean, half = mean_and_half(ends(results[one], column) - ends(results[other], column))
    return (mean - half, mean + half) if half == half else (mean, mean)


def at_most(results: Results, one: str, other: str, column: str) -> bool:
    """Whether nothing speaks for the first having more than the second."""
    return one == other or difference(results, one, other, column)[0] <= 0


def sentences(results: Results) -> list[str]:
    """Two sentences about what the numbers show, the regret never without the violation.

    Those with a baseline know from the start what the others have to find out: the first sentence is about them, where there are
    both, and the second about the others among themselves.
    """
    helped = {label: result for label, result in results.items() if label.endswith(BASELINE_GIVEN)}
    rest = {label: result for label, result in results.items() if label not in helped}
    when = f"In {int(next(iter(results.values())).episodes[-1]):,} episodes "
    if not helped or not rest:
        return _pair(results, when)
    first, second = _pair(rest, "Without one, ")
    second = second if second.startswith(tuple(rest)) else second[0].lower() + second[1:]  # a name keeps its letter
    return [_helped(helped, when), f"{first.removesuffix('.')}; {second}"]


def _helped(results: Results, when: str) -> str:
    """What those with a baseline made of it, each with what it cost."""
    words = []
    for label, result in results.items():
        clean = bool((ends(result, "unsafe episodes") == 0).all())
        unsafe = [_number(results, label, column) for column in ("unsafe episodes", "positive violation")]
        broke = "broke no constraint" if clean else f"was unsafe in {unsafe[0]} of episodes (positive violation {unsafe[1]})"
        share = result.diagnostics.get("Learner/on_baseline")
        played = "" if share is None else f" and played that policy in {with_interval(share, '.1%')} of them"
        words.append(f"{label.removesuffix(BASELINE_GIVEN)} {broke}{played}, for a regret of {_number(results, label, 'regret')}")
    return f"{when}and given a safe policy to start from, {_join(words)}."


def _pair(results: Results, when: str) -> list[str]:
    """About learners that know the same."""
    if not all(bool(torch.isfinite(ends(result, "regret")).all()) for result in results.values()):
        return ["No policy is safe in some of these CMDPs, so that there is no regret.", _safest(results, when)]
    safest, keenest = least(results, "positive violation"), least(results, "regret")
    if not safest:
        unsafe = float(ends(next(iter(results.values())), "positive violation").mean())
        same = f"{when}{'nobody broke a constraint' if unsafe == 0 else 'all broke the constraints alike'}."
        words = f"{keenest} has the least regret, {_number(results, keenest, 'regret')}" if keenest else "All have the same regret"
        return [same, f"{words}."]
    return [_safest(results, when), _keenest(results, safest, keenest)]


def _safest(results: Results, when: str) -> str:
    safest = least(results, "positive violation") or next(iter(results))
    equals = [label for label in results if label != safest and difference(results, safest, label, "positive violation")[1] >= 0]
    doubt = f" ({_join(equals)} cannot be told from it)" if equals and len(next(iter(results.values())).regret) > 1 else ""
    violation, unsafe, regret = (_number(results, safest, x) for x in ("positive violation", "unsafe episodes", "regret"))
    what = f"positive violation {violation}, unsafe in {unsafe} of episodes, regret {regret}"
    return f"{when}{safest} broke the constraints least{doubt}: {what}."


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
    more = f"{ratio:,.1f} times the positive violation" if ratio < 1000 else "a far larger positive violation"
    return ", ".join(filter(None, (f"{words} with {more}, {unsafe}", bought))) + "."


def _mean(results: Results, label: str, column: str) -> float:
    return float(ends(results[label], column).mean())


def _number(results: Results, label: str, column: str) -> str:
    return with_interval(ends(results[label], column), COLUMNS[column])


def _possessive(label: str) -> str:
    return f"{label}'" if label.endswith("s") else f"{label}'s"


def _join(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
