"""The variance of every gradient estimator against the horizon: which of them can be trusted in long runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, cast

import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.tuning import ESTIMATORS, Estimator, Smoothed, Through

from ..program import Count, at_least, bar, begin, publish, table, write_table
from .evaluate import stage
from .figures import variance_figure
from .instances import RULES, InstanceOptions
from .study import START

RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
WINDOWS = 10  # of a run, in which PES draws new noise
RESAMPLES = 500  # of the bootstrap behind the intervals
# All at the point where the study's descent begins.
CONTROLLED = {"smoothed, mixed control": "mixed", "smoothed, pathwise control": "pathwise"}
NAMED = ("smoothed", *CONTROLLED, "PES", "mixed", "pathwise", "sampled")


@dataclass
class Options(InstanceOptions):
    """Measure the variance of every estimator of the gradient of the objective in the logarithms of the scales.

    Of each instance many independent samples of the gradient are made; the variance is that between the samples of an instance,
    summed over the parameters, in the mean over the instances, with a 95% bootstrap interval. Derivatives through the learner are
    played in torch and so to --through episodes only. Into LOGDIR/NAME go report.md, variance.csv, variance.png and .pdf. Ctrl-C
    stops, and the same command continues.

    Examples:
      python -m train tune variance
      python -m train tune variance --quick
    """

    horizons: tuple[Count, ...] = (10, 30, 100, 300, 1000, 3000)  # Episodes of a run, each a study of its own.
    through: Count = 1000  # The longest horizon for derivatives through the learner.
    instances: Count = 2  # Seeds of the instances, each with stochastic and with changing costs.
    samples: Annotated[int, at_least(4, "a variance with an interval")] = 16  # Of the gradient, from each instance.
    name: str = "tune-variance"  # Folder of the results inside LOGDIR.
    quick: bool = False  # A minute's version, into LOGDIR/NAME-quick: short horizons, few samples.


def main(arguments: Sequence[str]) -> None:
    """Play all horizons."""
    options, folder = begin(Options, arguments, "tune variance", {"horizons": (10, 20, 40), "instances": 1, "samples": 6})
    check(options)
    rows, short = [], [T for T in options.horizons if options.through >= T]
    cases = [(T, name) for T in short for name in NAMED]
    cases += [(T, name) for T in options.horizons if T not in short for name in ("smoothed", "PES")]
    for horizon, name in bar(cases, "variance"):
        file = f"{name.replace(' ', '_').replace(',', '')}_{horizon}"
        how = estimator(name, horizon)
        design = {"estimator": {"kind": type(how).__name__, **asdict(how)}, "start": START, "resamples": RESAMPLES, **RULES}
        config = {**options.settings("horizons", "through"), **design}
        found = stage(folder, file, config, partial(measure, options, how, horizon))
        rows.append({"estimator": name, "horizon": horizon, **found})
    rows.sort(key=lambda row: (NAMED.index(row["estimator"]), row["horizon"]))
    write_table(folder / "variance.csv", rows)
    figure = variance_figure(rows, finding(rows))
    where = f"Written to {folder}: report.md, variance.csv, variance.png, variance.pdf"
    publish(folder / "report.md", report(options, rows), where, {"variance": figure})


def check(options: Options) -> None:
    """Refuse what would be found out only after minutes."""
    tc.Layout(options.widths, options.actions)
    if options.through < min(options.horizons):
        raise tc.InvalidInput(f"--through is {options.through}; it must reach the shortest of --horizons, {min(options.horizons)}.")
    for horizon in options.horizons:
        if horizon % WINDOWS:
            raise tc.InvalidInput(f"--horizons has {horizon}; PES needs a multiple of {WINDOWS}, its windows.")


def estimator(name: str, horizon: int) -> Estimator:
    """The estimator of this name for runs of so many episodes."""
    own: Mapping[str, Estimator] = {
        **{label: Smoothed(control=cast(Through, ESTIMATORS[kind])) for label, kind in CONTROLLED.items()},
        "PES": Smoothed(window=horizon // WINDOWS, redraw=True),
    }
    return own[name] if name in own else ESTIMATORS[name]


def measure(options: Options, how: Estimator, horizon: int) -> dict[str, float]:
    """The variance of a sample, with the ends of its interval, and how many runs a sample costs."""
    study = options.training(horizon).study(horizon, options.weight, options.delta)
    point = torch.tensor(list(START.values()), dtype=torch.float64).log()
    found = how.samples(study, tuple(START), point, options.samples, options.seed, None).derivatives
    value, low, high = variance(found.view(options.samples, study.instances, -1))
    return {"variance": value, "low": low, "high": high, "runs": how.runs(study, len(START), 1) / study.instances}


def variance(samples: Tensor) -> tuple[float, float, float]:
    """Between the samples of an instance, of `(n x instances x P)`: summed over P, meaned over instances; and its 95% interval."""
    n, instances, _ = samples.shape

    def within(some: Tensor) -> Tensor:
        return some.var(0).sum(-1).mean()

    drawn = torch.randint(n, (RESAMPLES, n, instances), generator=torch.Generator().manual_seed(0))
    resampled = torch.stack([within(samples[rows, torch.arange(instances)]) for rows in drawn]) * n / (n - 1)
    low, high = resampled.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(within(samples)), low, high


def finding(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the figure shows, in a sentence: how many times larger variances are at the last common horizon than at the shortest."""
    common = [row["horizon"] for row in rows if row["estimator"] == "sampled"]
    own = {(row["estimator"], row["horizon"]): row["variance"] for row in rows}
    ours, theirs = (factor(own[name, max(common)] / own[name, min(common)]) for name in ("smoothed", "sampled"))
    return (
        f"From {min(common):,} to {max(common):,} episodes the variance of the unbiased gradient through the learner becomes "
        f"{theirs}, that of the smoothed one {ours}"
    )


def factor(value: float) -> str:
    """A factor in words."""
    return f"{value:,.2g} times as large" if value < 1e4 else f"10{f'{math.log10(value):.0f}'.translate(RAISED)} times as large"


def report(options: Options, rows: Sequence[Mapping[str, Any]]) -> str:
    """What a person reads."""
    cells = [
        [name, f"{horizon:,}", *(f"{x:.3g}" for x in (value, low, high)), f"{runs:g}", f"{runs * value:.3g}"]
        for name, horizon, value, low, high, runs in (row.values() for row in rows)
    ]
    header = ["estimator", "episodes", "variance of a sample", "from", "to", "runs of a sample", "variance times runs"]
    return (
        f"{finding(rows)}.\n\n{options.samples} samples of each of {2 * options.instances} instances, 95% bootstrap intervals; "
        f"the gradient is that of (regret + {options.weight:g} x positive violation) / episodes in the logarithms of "
        f"{len(START)} scales.\n\n{table(header, cells, 'variance')}"
    )
