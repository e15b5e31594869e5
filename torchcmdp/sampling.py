"""From probabilities and uniform numbers to what is drawn, and from whole tables to what they hold at the visited pairs."""

from __future__ import annotations

import torch
from torch import Tensor


def thresholds(probabilities: Tensor) -> Tensor:
    """Cumulated and normalised along the last axis, with steps at positive entries only; NaN where a row has no mass.

    The last threshold is exactly one and an entry of probability zero repeats the one before it, whatever the rounding of the
    sum, so that `draw` with a number in [0, 1) can only land on positive entries.
    """
    probabilities = probabilities.to(torch.float64)
    cumulated = torch.where(probabilities > 0, probabilities.cumsum(-1), 0).cummax(-1).values
    return cumulated / cumulated[..., -1:]


def draw(thresholds: Tensor, uniform: Tensor) -> Tensor:
    """How many thresholds lie at or below the number: the index drawn. Rows without mass, being NaN, give 0."""
    return (thresholds <= uniform).sum(-1)


def values_at(values: Tensor, pairs: Tensor) -> Tensor:
    """`([runs x] L x S x A)` at flat pair indices `(runs x L)`."""
    flat = values.flatten(-3)
    return flat.expand(pairs.shape[0], flat.shape[-1]).gather(1, pairs)


def costs_at(values: Tensor, pairs: Tensor) -> Tensor:
    """`([runs x] m x L x S x A)` at flat pair indices `(runs x L)`: `(runs x L x m)`."""
    flat = values.flatten(-3).transpose(-1, -2)
    runs, layers = pairs.shape
    index = pairs.unsqueeze(-1).expand(runs, layers, flat.shape[-1])
    return flat.expand(runs, *flat.shape[-2:]).gather(1, index)
