"""What the paper says about its figures, each claim as a rule over what was measured: holds, does not hold, cannot tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

import torchcmdp as tc
from torchcmdp.metrics import growth_exponent, mean_and_interval
from train.paper.experiment import OWN, Outcome
from train.paper.presets import PRESETS, TUNED, WC_OPS

Results = dict[str, tc.RunResult]
Row = tuple[str, str, str]

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "cannot tell"

# "Comparable" and "similar" are within this share of the largest total there can be, L T.
MARGIN = 0.05
# Growth like sqrt(t), with some room above 1/2 for the logarithms that the theorems allow.
LARGEST_EXPONENT = 0.6

RULES = f"""All intervals are 95% intervals over runs; differences are taken run by run, since runs of the same number share
their random numbers. *Lower*: the interval of the difference lies below zero (holds) or above it (does not hold). *Comparable*: it
lies below {MARGIN:.0%} of L T, the largest total there can be, or above it. *Similar*: it lies within {MARGIN:.0%} of L T on both
sides, or outside. *Grows like sqrt(t)*: over the last half of the episodes the exponent's interval lies below {LARGEST_EXPONENT}
(1/2, and room for logarithms), or above it; a curve that ends at or below zero is within any bound. *Converges*: the unsafe amount
of the last tenth of the episodes is below that of the first tenth and its sum grows with an exponent below 1, or one of them fails.
Everything else is *cannot tell*."""


@dataclass(frozen=True)
class Finding:
    """One claim in one experiment.

    Attributes:
        claim: What is claimed.
        preset, family, sequence: Where it was tried; the family is "tuned" for WC-OPS with its tuned constants.
        numbers: What was measured.
        verdict: Holds, does not hold, cannot tell.
    """

    claim: str
    preset: str
    family: str
    sequence: str
    numbers: str
    verdict: str


def findings(outcomes: Sequence[Outcome]) -> list[Finding]:
    """Every claim in every experiment that it is about."""
    found = []
    for outcome in outcomes:
        for sequence in dict.fromkeys(sequence for sequence, _ in outcome.results):
            results = {label: result for (where, label), result in outcome.results.items() if where == sequence}
            found += _judge(outcome, outcome.job.family, sequence, results)
            if TUNED.name in results:  # the same claims for the tuned constants, against rivals with the practical ones
                found += _judge(outcome, "tuned", sequence, {**results, _US: results[TUNED.name]})
    return found


def _judge(outcome: Outcome, family: str, sequence: str, results: Results) -> list[Finding]:
    rows = _claims(PRESETS[outcome.job.preset].setting, results)
    return [Finding(claim, outcome.job.preset, family, sequence, numbers, verdict) for claim, numbers, verdict in rows]


def overall(rows: Sequence[Finding]) -> str:
    """One verdict for a claim over its experiments, each learner on its own sequence: all must agree."""
    verdicts = [row.verdict for row in rows if row.sequence == OWN]
    if not verdicts:
        return "not run"
    verdict = HOLDS if all(v == HOLDS for v in verdicts) else FAILS if FAILS in verdicts else UNDECIDED
    return f"{verdict} ({verdicts.count(HOLDS)} of {len(verdicts)} hold, {verdicts.count(FAILS)} do not)"


def interval(values: Tensor) -> str:
    """Mean and half-width over runs in words."""
    mean, half = (float(x) for x in mean_and_interval(values))
    return "undefined" if math.isnan(mean) else f"{mean:,.1f} +- {half:,.1f}"


def _decide(low: float, high: float, holds: bool, fails: bool) -> str:
    if math.isnan(low) or math.isnan(high):
        return UNDECIDED
    return HOLDS if holds else FAILS if fails else UNDECIDED


def _difference(claim: str, ours: Tensor, theirs: Tensor, names: tuple[str, str], rule: Callable[[float, float], str]) -> Row:
    mean, half = (float(x) for x in mean_and_interval(ours[:, -1] - theirs[:, -1]))
    numbers = f"{names[0]} {interval(ours[:, -1])}, {names[1]} {interval(theirs[:, -1])}, difference {mean:,.1f} +- {half:,.1f}"
    return claim, numbers, rule(mean - half, mean + half)


def _lower(low: float, high: float) -> str:
    return _decide(low, high, high < 0, low > 0)


def _comparable(largest: float) -> Callable[[float, float], str]:
    return lambda low, high: _decide(low, high, high <= MARGIN * largest, low > MARGIN * largest)


def _similar(largest: float) -> Callable[[float, float], str]:
    margin = MARGIN * largest
    return lambda low, high: _decide(low, high, -margin <= low and high <= margin, low > margin or high < -margin)


def _curve(result: tc.RunResult, quantity: str) -> Tensor:
    curve: Tensor = getattr(result, quantity.replace(" ", "_").replace("-", "_"))
    return curve


def _against(results: Results, rival: str, quantity: str, word: str) -> Iterator[Row]:
    """WC-OPS's total against a rival's, if both played."""
    ours, theirs = results.get(_US), results.get(rival)
    if ours is None or theirs is None:
        return
    largest = float(ours.bounds["trivial"][-1])
    rule = {"lower than": _lower, "comparable to": _comparable(largest), "similar to": _similar(largest)}[word]
    claim = f"{quantity} {word} {rival}'s"
    yield _difference(claim, _curve(ours, quantity), _curve(theirs, quantity), (_US, rival), rule)


def _grows(results: Results, quantity: str) -> Iterator[Row]:
    result = results[_US]
    curve = _curve(result, quantity)
    claim, end = f"{quantity} grows like sqrt(t)", interval(curve[:, -1])
    if float(curve[:, -1].mean()) <= 0:
        yield claim, f"ends at {end}", HOLDS
        return
    slope, half = (float(x) for x in growth_exponent(result.episodes, curve))
    low, high = slope - half, slope + half
    verdict = _decide(low, high, high <= LARGEST_EXPONENT, low > LARGEST_EXPONENT)
    yield claim, f"exponent {slope:.2f} +- {half:.2f}, ends at {end}", verdict


def _simplex(results: Results) -> Iterator[Row]:
    result = results[_US]
    unsafe, tenth = result.positive_violation, max(1, result.positive_violation.shape[1] // 10)
    first, last = unsafe[:, tenth - 1], unsafe[:, -1] - unsafe[:, -1 - tenth]
    claim = "simplex: the policies converge to the safe set"
    numbers = f"unsafe amount {interval(first)} in the first tenth, {interval(last)} in the last"
    if float(first.max()) <= 0 and float(last.max()) <= 0:
        yield claim, f"{numbers}: never unsafe", HOLDS
        return
    slope, half = (float(x) for x in growth_exponent(result.episodes, unsafe))
    mean, width = (float(x) for x in mean_and_interval(last - first))
    shrinks, below = mean + width < 0, slope + half < 1
    verdict = _decide(slope, mean, shrinks and below, mean - width > 0 or slope - half >= 1)
    yield claim, f"{numbers}, exponent {slope:.2f} +- {half:.2f}", verdict


def _claims(setting: str, results: Results) -> Iterator[Row]:
    """What the paper claims of a setting: WC-OPS against its rivals, and how its totals grow."""
    if setting == "simplex":
        yield from _simplex(results)
    rivalries = [row for claim in _RIVALRIES.get(setting, ()) for row in _against(results, *claim)]
    growths = [row for quantity in _GROWTHS.get(setting, ()) for row in _grows(results, quantity)]
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
