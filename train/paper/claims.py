"""What the paper says about its figures, each claim as a rule over what was measured: holds, does not hold, cannot tell."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

import torchcmdp as tc

from ..program import mean_and_half
from .experiment import OWN, Outcome
from .presets import WC_OPS, preset_of

Results = dict[str, tc.RunResult]
Row = tuple[str, str, str]

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "cannot tell"

# "Comparable", "similar" and "lower" are all said with this share of the largest total there can be, L T.
MARGIN = 0.01
# Growth like sqrt(t), with some room above 1/2 for the logarithms that the theorems allow.
LARGEST_EXPONENT = 0.6

RULES = f"""Intervals are 95% intervals over instances, each the mean of its runs; in brackets the half-width over the runs, with
the instances as they are. Differences are taken run by run, since runs of the same number share their instance and their random
numbers. There is one margin, {MARGIN:.0%} of L T, the largest total there can be. *Lower*: the interval of the difference lies
below minus the margin (holds) or above it (does not hold). *Comparable*: it lies below the margin, or above it. *Similar*: it
lies within the margin on both sides, or outside. *Grows like sqrt(t)*: over the last half of the episodes the exponent's
interval lies below {LARGEST_EXPONENT} (1/2, and room for logarithms), or above it; a curve that ends at or below zero is within
any bound. *Converges*: the unsafe amount of the last tenth of the episodes is below that of the first tenth and its sum grows
with an exponent below 1, or one of them fails. Everything else is *cannot tell*. No regret is judged without the positive
violation that it was bought with: lower or comparable regret does not hold where the positive violation is higher, its
difference's interval above zero; and regret grows like sqrt(t) only where the positive violation does too, and fails where that
fails."""


class Finding(NamedTuple):
    """One claim in one experiment: where it was tried, what was measured, and whether it holds."""

    claim: str
    preset: str
    family: str
    sequence: str
    numbers: str
    verdict: str


def findings(outcomes: Sequence[Outcome]) -> list[Finding]:
    """Every claim in every experiment that it is about."""
    return [
        Finding(claim, job.preset, job.family, sequence, numbers, verdict)
        for outcome in outcomes
        for job in [outcome.job]
        for sequence in dict.fromkeys(sequence for sequence, _ in outcome.results)
        for claim, numbers, verdict in _claims(preset_of(job.preset).setting, outcome.of(sequence), job.instances)
    ]


def overall(rows: Sequence[Finding]) -> str:
    """One verdict for a claim over its experiments, each learner on its own sequence: all must agree."""
    verdicts = [row.verdict for row in rows if row.sequence == OWN]
    if not verdicts:
        return "not run"
    return f"{together(verdicts)} ({verdicts.count(HOLDS)} of {len(verdicts)} hold, {verdicts.count(FAILS)} do not)"


def together(verdicts: Collection[str]) -> str:
    """The verdict on things that must all hold."""
    return FAILS if FAILS in verdicts else HOLDS if set(verdicts) == {HOLDS} else UNDECIDED


def by_instance(values: Tensor, instances: int) -> Tensor:
    """Means over the runs of each instance: `(instances x runs, ...)` to `(instances, ...)`."""
    return values.unflatten(0, (instances, -1)).mean(1)


def interval(values: Tensor, instances: int) -> str:
    """The mean of one value a run, `(instances x runs,)`, its half-width over instances, and over runs in brackets."""
    mean, half = mean_and_half(by_instance(values, instances))
    _, seeds = mean_and_half(values.unflatten(0, (instances, -1)).mean(0))
    return "undefined" if math.isnan(mean) else f"{mean:,.1f} +- {half:,.1f} ({seeds:,.1f})"


def _decide(holds: bool, fails: bool) -> str:
    return HOLDS if holds else FAILS if fails else UNDECIDED


def _rule(word: str, low: float, high: float, margin: float) -> str:
    """The verdict on a difference whose interval is (low, high); of what is not a number nothing can be told."""
    if word == "lower than":
        return _decide(high < -margin, low > -margin)
    if word == "comparable to":
        return _decide(high <= margin, low > margin)
    return _decide(-margin <= low and high <= margin, low > margin or high < -margin)


def _curve(result: tc.RunResult, quantity: str) -> Tensor:
    curve: Tensor = getattr(result, quantity.replace(" ", "_").replace("-", "_"))
    return curve


def _difference(ours: tc.RunResult, theirs: tc.RunResult, quantity: str, instances: int) -> tuple[str, float, float]:
    """What two runs end with, in words, and the interval of the difference over instances."""
    ends = [_curve(result, quantity)[:, -1] for result in (ours, theirs)]
    mean, half = mean_and_half(by_instance(ends[0] - ends[1], instances))
    words = f"{interval(ends[0], instances)} against {interval(ends[1], instances)}"
    return f"{words}, difference {interval(ends[0] - ends[1], instances)}", mean - half, mean + half


def _against(results: Results, rival: str, quantity: str, word: str, instances: int) -> Iterator[Row]:
    """WC-OPS's total against that of a rival, with every mode of radii that it played with."""
    ours = results.get(_US)
    for label, theirs in results.items() if ours is not None else ():
        if label.split(",")[0] != rival:
            continue
        margin = MARGIN * float(ours.bounds["trivial"][-1])
        numbers, low, high = _difference(ours, theirs, quantity, instances)
        verdict = _rule(word, low, high, margin)
        if verdict != HOLDS and word == "lower than" and high < 0:
            numbers += ", below zero, but not by the margin"
        if "regret" in quantity and verdict != FAILS:
            words, worse, _ = _difference(ours, theirs, "positive violation", instances)
            # a NaN is no proof of safety either
            verdict = verdict if worse <= 0 else FAILS if worse > 0 else UNDECIDED
            numbers += f"; positive violation {words}"
        name, comma, mode = label.partition(", ")
        yield f"{quantity} {word} {name}'s{comma}{mode}", numbers, verdict


def _grows(results: Results, quantity: str, instances: int) -> Iterator[Row]:
    numbers, verdict = _growth(results[_US], quantity, instances)
    if "regret" in quantity:  # a learner that breaks the constraints can have any regret it likes
        words, safe = _growth(results[_US], "positive violation", instances)
        numbers, verdict = f"{numbers}; positive violation: {words}", together((verdict, safe))
    yield f"{quantity} grows like sqrt(t)", numbers, verdict


def _growth(result: tc.RunResult, quantity: str, instances: int) -> tuple[str, str]:
    """How a curve grows, in words, and whether that is like sqrt(t)."""
    curve = _curve(result, quantity)
    end, mean = interval(curve[:, -1], instances), float(curve[:, -1].mean())
    if mean <= 0:
        return f"ends at {end}", HOLDS
    slope, half = (float(x) for x in tc.growth_exponent(result.episodes, by_instance(curve, instances)))
    verdict = _decide(slope + half <= LARGEST_EXPONENT, slope - half > LARGEST_EXPONENT)
    return f"exponent {slope:.2f} +- {half:.2f}, ends at {end}", verdict


def _simplex(results: Results, instances: int) -> Iterator[Row]:
    result = results[_US]
    unsafe, tenth = result.positive_violation, max(1, result.positive_violation.shape[1] // 10)
    first, last = unsafe[:, tenth - 1], unsafe[:, -1] - unsafe[:, -1 - tenth]
    claim = "simplex: the policies converge to the safe set"
    numbers = f"unsafe amount {interval(first, instances)} in the first tenth, {interval(last, instances)} in the last"
    if float(first.max()) <= 0 and float(last.max()) <= 0:
        yield claim, f"{numbers}: never unsafe", HOLDS
        return
    slope, half = (float(x) for x in tc.growth_exponent(result.episodes, by_instance(unsafe, instances)))
    mean, width = mean_and_half(by_instance(last - first, instances))
    fails = not math.isnan(slope + mean) and (mean - width > 0 or slope - half >= 1)
    verdict = _decide(mean + width < 0 and slope + half < 1, fails)
    yield claim, f"{numbers}, exponent {slope:.2f} +- {half:.2f}", verdict


def _claims(setting: str, results: Results, instances: int) -> Iterator[Row]:
    """What the paper claims of a setting: WC-OPS against its rivals, and how its totals grow."""
    if setting == "simplex":
        yield from _simplex(results, instances)
    rivalries = [row for claim in _RIVALRIES.get(setting, ()) for row in _against(results, *claim, instances)]
    growths = [row for quantity in _GROWTHS.get(setting, ()) for row in _grows(results, quantity, instances)]
    for claim, numbers, verdict in rivalries + growths:
        yield _PREFIXES.get(setting, "") + claim, numbers, verdict


_US = WC_OPS.name
# By setting: rival, quantity and what is claimed of the two. The waking experiments are about no claim of the paper's.
_RIVALRIES = {
    "stochastic": (
        ("OptCMDP", "regret", "comparable to"),
        ("OptPrimalDual", "regret", "lower than"),
        ("OptCMDP", "violation", "lower than"),
        ("OptPrimalDual", "violation", "lower than"),
    ),
    "adversarial-reward": (
        ("OptCMDP", "regret", "lower than"),
        ("OptCMDP", "violation", "similar to"),
        ("Greedy", "regret", "lower than"),
    ),
    "adversarial": (("Greedy", "alpha-regret", "lower than"), ("Greedy", "violation", "similar to")),
}
_GROWTHS = {
    "stochastic": ("regret", "violation", "positive violation"),
    "adversarial-reward": ("regret", "violation", "positive violation"),
    "adversarial": ("alpha-regret", "violation"),
}
_PREFIXES = {"adversarial-reward": "adversarial rewards: ", "adversarial": "adversarial rewards and costs: "}
