"""Draws from rows of probabilities or of thresholds, as `torchcmdp.sampling` has them."""

from __future__ import annotations

from torchcmdp.kernels.options import formula


@formula
def draw(thresholds, begin, end, number):
    """How many of the thresholds begin .. end-1 lie at or below the number: the index drawn."""
    index = 0
    for j in range(begin, end):
        if thresholds[j] <= number:
            index += 1
    return index


@formula
def draw_from(probabilities, begin, end, number):
    """`draw` from the thresholds of a row: cumulated, with steps at positive entries only, and normalised."""
    total = 0.0
    for j in range(begin, end):
        if probabilities[j] > 0.0:
            total += probabilities[j]
    cumulated = 0.0
    index = 0
    for j in range(begin, end):
        if probabilities[j] > 0.0:
            cumulated += probabilities[j]
        if cumulated / total <= number:
            index += 1
    return index
