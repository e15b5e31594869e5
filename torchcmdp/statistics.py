"""Numbers of many runs as one: means with intervals, the worst of the constraints, how fast a curve grows."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, brief, check_delta, check_tensor


def worst_constraint(sums: Tensor) -> Tensor:
    """The largest over the constraints of `(... x m)`: `(...)`; zero without constraints."""
    return sums.amax(-1) if sums.shape[-1] else sums.new_zeros(sums.shape[:-1])


def mean_and_interval(x: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Mean over runs, `(runs x ...)`, and half-width of its confidence interval, t_{n-1} * s / sqrt(n); NaN for a single run."""
    check_delta(level, "level")
    check_tensor("x", x, axes=1)
    if not x.is_floating_point() or not len(x):
        raise InvalidInput(f"x is {brief(x)}; it must hold floating-point numbers of at least one run.")
    runs = x.shape[0]
    if runs < 2:
        return x.mean(0), torch.full_like(x[0], torch.nan)
    from scipy.special import stdtrit  # Student's quantile; scipy is slow to import, and only intervals need it

    quantile = float(stdtrit(runs - 1, (1 + level) / 2))
    return x.mean(0), x.std(0) * (quantile / runs**0.5)


def growth_exponent(episodes: Tensor, curve: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """How fast a curve grows: b in curve = c t^b over the last half of its points, the mean over runs and its half-width.

    Of every run the slope of log(curve), `(runs x points)`, over log(t), `(points,)` episodes, by least squares, at those of the
    points where the curve is positive. Both results are NaN if some run has fewer than two: such a run has no exponent, and leaving
    it out would flatter the others.
    """
    check_tensor("episodes", episodes, axes=1)
    check_tensor("curve", curve, axes=2)
    if episodes.shape != curve.shape[1:] or not curve.is_floating_point() or episodes.device != curve.device or not len(curve):
        raise InvalidInput(
            f"episodes is {brief(episodes)} and curve {brief(curve)}; expected (points,) and floating-point (runs x points)."
        )
    half = curve.shape[-1] // 2
    t, y = episodes[half:].to(curve), curve[:, half:]
    used = y > 0
    x, y = t.log().expand_as(y), torch.where(used, y, 1).log()
    count = used.sum(-1, keepdim=True)
    x = torch.where(used, x - (x * used).sum(-1, keepdim=True) / count, 0)
    slopes = (x * y).sum(-1) / x.square().sum(-1)
    return mean_and_interval(torch.where(count.squeeze(-1) > 1, slopes, torch.nan), level)
