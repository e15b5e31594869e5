"""Constants that follow the problem, trained by smoothed gradients over a distribution of problems, judged outside of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from torchcmdp.learners.fitted import Follow
from torchcmdp.learners.practical import RECIPE, practical_costs
from torchcmdp.tuning import Smoothed, Study

from ..program import Count, at_least, bar, begin, mean_and_half, plus_minus, publish, table, write_table
from . import fit_design as design
from .evaluate import play_all, stage
from .fit_design import Cell
from .instances import RULES

TODAY, FIXED, FITTED = "today's", "one trained set", "fitted"
MEASURES = ("objective", "regret", "positive violation")
KINDS = 2  # instances of a seed: they share transitions and rewards, and count as one problem

# measure by method by cell: a number an instance, an episode
Judged = dict[str, dict[str, list[float]]]


@dataclass
class Options:
    """Train a log-linear map from what is known before a run to four constants of practical WC-OPS, and judge it elsewhere.

    What is known: L, |X|, |A|, m, K, T, delta, and the range of the costs. The constants: learning rate, implicit exploration,
    transition radius, margin. The map is trained by smoothed gradients on small problems and short runs, and judged on larger
    problems at shorter and longer horizons, all declared in `train/tune/fit_design.py`, against today's constants, which are the
    same for all problems, and against one set for all that was trained with the same effort. Into LOGDIR/NAME go report.md,
    fit.csv and fitted.json, the map. Ctrl-C stops, and the same command continues.

    Examples:
      python -m train tune fit
      python -m train tune fit --quick
    """

    updates: Count = design.UPDATES  # Of both trainings.
    held_out: Annotated[int, at_least(2, "an interval over problems")] = 32
    """Problems of every held-out cell, each with costs that stay and with costs that change."""
    seed: int = 0  # Of all random numbers.
    name: str = "tune-fit"  # Folder of the results inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments.
    quick: bool = False  # A minute's version, into LOGDIR/NAME-quick: few updates, short runs, few problems.


def main(arguments: Sequence[str]) -> None:
    """Train and judge."""
    options, folder = begin(Options, arguments, "tune fit", {"updates": 4, "held_out": 2})
    training, held_out = design.TRAINING, design.HELD_OUT_CELLS
    if options.quick:
        training, held_out = (tuple(replace(x, horizon=min(x.horizon, 40) // 2) for x in part[:4]) for part in (training, held_out))
    trained = {}
    for name in (FIXED, FITTED):  # the map, and with slopes that stay zero one set of constants for all
        config = {**settings(options), "cells": [asdict(cell) for cell in training], "follow": name == FITTED}
        found = stage(folder, name.replace(" ", "_"), config, lambda x=name: train(options, training, x).plain())
        trained[name] = Follow.of(found)
    groups = {"outside": (held_out, design.JUDGE_SEEDS), "inside": (training, design.INSIDE_SEEDS)}
    trial = 50 if options.quick else 0  # which does not look at the problems that are judged on
    judged: dict[str, list[Judged]] = {where: [] for where in groups}
    for where, (chosen, start) in groups.items():
        for j, cell in enumerate(bar(chosen, f"judging {where}")):
            first = start + 100 * j + trial
            points = {TODAY: dict(design.START), **{key: follow.scales(cell.features) for key, follow in trained.items()}}
            config = {**settings(options), "cell": asdict(cell), "first": first, "points": points, "held_out": options.held_out}
            work = partial(judge, options, cell, first, points)
            judged[where].append(stage(folder, f"{where}_{j}", config, work))
    write_table(folder / "fit.csv", rows_of(groups, judged))
    trained[FITTED].save(folder / "fitted.json")
    where = f"Written to {folder}: report.md, fit.csv, fitted.json"
    publish(folder / "report.md", report(options, held_out, trained, judged), where)


def settings(options: Options) -> dict[str, Any]:
    """All that both trainings and the judging depend on, but for the cells: the constants of the design and of the recipe."""
    names = ("START", "TRAIN_SEEDS", "TRAIN_COUNT", "BLOCK", "SIGMA", "RATE", "DECAY", "REACH", "WEIGHT")
    costs = {name: getattr(value, "config", lambda v=value: v)() for name, value in practical_costs().settings().items()}
    recipe = {**RECIPE, **costs}
    return {"seed": options.seed, "updates": options.updates, **{n: getattr(design, n) for n in names}, "recipe": recipe, **RULES}


def train(options: Options, cells: Sequence[Cell], name: str) -> Follow:
    """Gradient steps on the mean objective over all cells; the mean of the last half of the points."""
    seen = torch.stack([cell.features for cell in cells])
    follow, points = Follow.at(design.START, seen, design.REACH), list[tuple[Tensor, Tensor]]()
    blocks = range(0, design.TRAIN_COUNT, design.BLOCK)
    studies = [
        [cell.study(range(first + b, first + b + design.BLOCK), design.WEIGHT) for b in blocks]
        for first, cell in ((design.TRAIN_SEEDS + 100 * j, cell) for j, cell in enumerate(cells))
    ]
    for update in bar(range(options.updates), name):
        slopes = gradient(follow, seen, [own[update % len(own)] for own in studies], (options.seed + 1) * 100_000 + 100 * update)
        offset = follow.offset - design.RATE * slopes[0]
        if name == FITTED:
            follow = replace(follow, slopes=follow.slopes - design.RATE * (slopes[1] + design.DECAY * follow.slopes))
        follow = replace(follow, offset=offset)
        points.append((follow.offset, follow.slopes))
    late = points[len(points) // 2 :]
    means = [torch.stack(list(part)).mean(0) for part in zip(*late, strict=True)]
    return replace(follow, offset=means[0], slopes=means[1])


def gradient(follow: Follow, seen: Tensor, studies: Sequence[Study], seed: int) -> tuple[Tensor, Tensor]:
    """Of the mean objective over the cells in offset and slopes: smoothed in the scales of each cell, exact from there."""
    live = replace(follow, offset=follow.offset.clone().requires_grad_(), slopes=follow.slopes.clone().requires_grad_())
    logs = live(seen)
    how = Smoothed(design.SIGMA)
    found = [
        how.samples(study, follow.names, point, 1, seed + j, None).derivatives.mean(0)
        for j, (study, point) in enumerate(zip(studies, logs.detach(), strict=True))
    ]
    offset, slopes = torch.autograd.grad(logs, (live.offset, live.slopes), torch.stack(found) / len(studies))
    return offset, slopes


def judge(options: Options, cell: Cell, first: int, points: Mapping[str, Mapping[str, float]]) -> Judged:
    """All methods on the problems of a cell, each instance once and with the same random numbers for all."""
    study = cell.study(range(first, first + options.held_out), design.WEIGHT)
    played = play_all(study, list(points.values()), 77_000 + options.seed, distinct_runs=study.instances)
    regret, violation = (played.parts / cell.horizon).unbind(-1)
    # of a seed the two instances are one problem; a violation in units of the largest cost, as in the objective
    numbers = (study.objective(played.parts), regret, violation / cell.factor)
    by_method = [x.view(len(points), -1, KINDS).mean(-1) for x in numbers]
    return {m: {k: x[j].tolist() for k, x in zip(MEASURES, by_method, strict=True)} for j, m in enumerate(points)}


def difference(judged: Sequence[Judged], method: str, rival: str, measure: str) -> tuple[float, float]:
    """Mean and 95% half-width of method less rival, paired, over all problems of all cells."""
    ours, theirs = (torch.tensor([x for cell in judged for x in cell[m][measure]], dtype=torch.float64) for m in (method, rival))
    return mean_and_half(ours - theirs)


def wins(judged: Sequence[Judged]) -> bool:
    """Whether the map is better than both, beyond the intervals."""
    return all(sum(difference(judged, FITTED, rival, "objective")) < 0 for rival in (TODAY, FIXED))


def finding(judged: Sequence[Judged]) -> str:
    """What was found outside the range of training, in a sentence."""
    words = [f"{plus_minus(*difference(judged, FITTED, rival, 'objective'), ',.3f')} to {rival}" for rival in (TODAY, FIXED)]
    verdict = "win" if wins(judged) else "do not win"
    return f"Constants that follow the problem {verdict} outside the range they were trained on: {words[0]}, {words[1]}"


def rows_of(groups: Mapping[str, tuple[Sequence[Cell], int]], judged: Mapping[str, Sequence[Judged]]) -> list[dict[str, Any]]:
    """A row for every cell, method and measure."""
    return [
        {"where": where, "cell": str(cell), "method": method, "measure": measure, "mean": mean, "half_width": half}
        for where, (cells, _) in groups.items()
        for cell, found in zip(cells, judged[where], strict=True)
        for method, measures in found.items()
        for measure, values in measures.items()
        for mean, half in [mean_and_half(torch.tensor(values, dtype=torch.float64))]
    ]


def report(
    options: Options, held_out: Sequence[Cell], trained: Mapping[str, Follow], judged: Mapping[str, Sequence[Judged]]
) -> str:
    """What a person reads."""
    points = {TODAY: design.START, FIXED: trained[FIXED].scales(held_out[0].features)}  # the same for all cells
    points |= {f"fitted: {cell}": trained[FITTED].scales(cell.features) for cell in held_out}
    constants = [[name, *(f"{value:.3g}" for value in scales.values())] for name, scales in points.items()]
    apart = [
        [where, f"{method} - {rival}", *(plus_minus(*difference(found, method, rival, m), ",.3f") for m in MEASURES)]
        for where, found in judged.items()
        for method, rival in ((FITTED, TODAY), (FITTED, FIXED), (FIXED, TODAY))
    ]
    each = [
        [str(cell), *(plus_minus(*difference([found], FITTED, rival, "objective"), ",.3f") for rival in (TODAY, FIXED))]
        for cell, found in zip(held_out, judged["outside"], strict=True)
    ]
    parts = (
        f"{finding(judged['outside'])}.",
        f"{options.held_out} problems of each of {len(held_out)} held-out cells, 95% intervals over problems, paired; an "
        f"episode; the objective is regret + {design.WEIGHT:g} x positive violation; {options.updates} updates.",
        table(["problems", "difference", *MEASURES], apart, "differences"),
        table(["held-out cell", f"fitted - {TODAY}", f"fitted - {FIXED}"], each, "cells"),
        table(["constants", *design.START], constants, "constants"),
    )
    return "\n\n".join(parts)
