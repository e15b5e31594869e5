"""How regret and violation depend on each constant: curves with bands, and smoothed gradients as tangents with theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from torchcmdp.learners.practical import PRACTICAL_SCALES
from torchcmdp.tuning import Smoothed, Study
from torchcmdp.tuning.smoothed import Pairs

from ..program import Count, at_least, bar, begin, plus_minus, publish, table
from .evaluate import stage
from .figures import KNOWN_AS, MEASURED, sensitivity_figure
from .instances import RULES, InstanceOptions

FACTORS = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)  # around the point
SIGMA = 0.3  # spread of the logarithm of a scale: what is drawn is the mean over it, and so are the tangents
NORMAL = 1.96

# By scale: where, both parts of the objective an episode with half-widths, and their slopes in the logarithm with theirs
Curves = dict[str, dict[str, list[Any]]]


@dataclass
class Options(InstanceOptions):
    """Draw how regret and positive violation of WC-OPS depend on each of its constants, around those that the study found.

    Every point is a mean over pairs of runs with the same random numbers and scales on two sides of it; half of the differences
    of a pair is the gradient, drawn as a tangent. Bands and wedges are 95% intervals over runs on the same instances. Into
    LOGDIR/NAME go report.md, sensitivity.png and sensitivity.pdf. The same command repeats them.

    Examples:
      python -m train tune sensitivity
      python -m train tune sensitivity --quick
    """

    horizon: Count = 1000  # Episodes of a run.
    pairs: Annotated[int, at_least(2, "an interval")] = 16  # Of runs, of each instance at each point.
    name: str = "tune-sensitivity"  # Folder of the results inside LOGDIR.
    quick: bool = False  # A minute's version, into LOGDIR/NAME-quick: short runs, few of them.


def main(arguments: Sequence[str]) -> None:
    """Play and draw."""
    options, folder = begin(Options, arguments, "tune sensitivity", {"horizon": 30, "pairs": 3, "instances": 1})
    study = options.training(options.horizon).study(options.horizon, options.weight, options.delta)
    config = {"point": PRACTICAL_SCALES, "factors": FACTORS, "sigma": SIGMA, "normal": NORMAL, **RULES, **options.settings()}
    curves = stage(folder, "sensitivity", config, lambda: sensitivity(study, PRACTICAL_SCALES, options.pairs, options.seed))
    where = f"Written to {folder}: report.md, sensitivity.png, sensitivity.pdf"
    figure = sensitivity_figure(curves, note(study, options.pairs))
    publish(folder / "report.md", report(curves), where, {"sensitivity": figure})


def note(study: Study, pairs: int) -> str:
    """What the figure is made of."""
    size = f"{study.horizon:,} episodes, {study.instances} instances, {pairs} pairs of runs of each"
    return f"{size}; bands and wedges: 95% intervals"


def sensitivity(study: Study, scales: Mapping[str, float], pairs: int, seed: int) -> Curves:
    """Both parts of the objective an episode around the scales, and their slopes, each scale moved by itself."""
    curves: Curves = {}
    with bar(None, "sensitivity", total=len(scales) * study.horizon, unit="ep") as shown:
        for name, value in scales.items():
            rest = {other: scale for other, scale in scales.items() if other != name}
            alone = replace(study, options={**study.options, **rest})
            n = study.instances * pairs
            places = torch.tensor([value * factor for factor in FACTORS], dtype=torch.float64)
            around = Pairs(Smoothed(SIGMA), alone, (name,), len(FACTORS) * n, seed)
            slopes = around.advance(places.log().repeat_interleave(n).unsqueeze(-1), shown.update).squeeze(1)
            # both runs of a pair lie as far from the point: their mean is a sample of the smoothed objective there
            values = around.played().parts.view(2, -1, 2).mean(0)
            found = {"scale": places.tolist()}
            for kind, numbers in (("value", values), ("slope", slopes)):
                mean, half = _interval((numbers / study.horizon).view(len(FACTORS), pairs, study.instances, 2))
                found |= {kind: mean.tolist(), f"{kind}_half": half.tolist()}
            curves[name] = found
    return curves


def _interval(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and 95% half-width over pairs and instances of `(points x pairs x instances x 2)`; the instances are what they are."""
    _, pairs, instances, _ = numbers.shape
    return numbers.mean((1, 2)), NORMAL * (numbers.var(1).mean(1) / (pairs * instances)).sqrt()


def report(curves: Curves) -> str:
    """The numbers of the figure."""
    rows = []
    for name, curve in curves.items():
        for scale, *pairs in zip(*(curve[key] for key in ("scale", "value", "value_half", "slope", "slope_half")), strict=True):
            cells = [plus_minus(mean, half, ",.3f") for two in (pairs[:2], pairs[2:]) for mean, half in zip(*two, strict=True)]
            rows.append([KNOWN_AS[name], f"{scale:.3g}", *cells])
    header = ["constant", "multiple of the paper's", *MEASURED, *(f"slope of {part}" for part in MEASURED)]
    return f"Per episode; slopes are in the logarithm of the constant.\n\n{table(header, rows, 'sensitivity')}"
