"""A declared comparison of ways to find constants, at equal run-episodes: on held-out instances, with paired intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torchcmdp as tc

from ..program import Count, bar, begin, mean_and_half, plus_minus, publish, table, write_table
from .evaluate import play_all, stage
from .figures import budget_figure
from .instances import HELD_OUT, RULES, InstanceOptions
from .methods import METHODS, Search, constants, start_of
from .study import BOX

OURS, RIVAL = "smoothed gradient", "random search"
SHARES = tuple(j / 10 for j in range(1, 11))  # of the budget, at which what each method would hand out is judged
ABOVE = 0.2  # the goal is about budgets above this share of the whole


@dataclass
class Options(InstanceOptions):
    """Compare five ways to find the constants of WC-OPS, at equal run-episodes.

    The smoothed gradient with Adam, the mixed gradient with Adam, random search, TPE (optuna) and CMA-ES (cmaes; both in the extra
    [tune]). In every repetition all of them begin at the same random point of the box, on the same training instances, which are
    others in every repetition; the gradients spend the first fifth of their budget on random draws, and descend from the best.
    What each would hand out after every tenth of the budget is played once on every held-out instance, with the same random
    numbers for all. The goal: the smoothed gradient is better than random search, with 95% intervals over repetitions and over
    held-out instances that both exclude zero, at every budget above a fifth. The report says whether.

    Examples:
      python -m train tune compare
      python -m train tune compare --quick
    """

    horizon: Count = 300  # Episodes of a run.
    budget: Count = 240_000  # Run-episodes of each method in each repetition.
    repetitions: Count = 10  # Each with training instances, a start and random numbers of its own.
    held_out: Count = 16  # Seeds of the instances that are judged on, each with stochastic and with changing costs.
    name: str = "tune-compare"  # Folder of the results inside LOGDIR.
    quick: bool = False
    """A minute's version, into LOGDIR/NAME-quick: short horizon, small budget, two repetitions."""


def main(arguments: Sequence[str]) -> None:
    """Play and judge all methods."""
    small = {"horizon": 20, "budget": 6400, "repetitions": 2, "instances": 2, "held_out": 2}
    options, folder = begin(Options, arguments, "tune compare", small)
    check(options)
    cases = [(method, r) for r in range(options.repetitions) for method in METHODS]
    judged = {case: repetition(options, folder, *case) for case in bar(cases, "compare")}
    everyone = range(options.repetitions)
    values = {method: torch.tensor([judged[method, r] for r in everyone], dtype=torch.float64) for method in METHODS}
    rows, sentence = rows_of(options, values), finding(options, values)[1]
    write_table(folder / "compare.csv", rows)
    about = {"options": vars(options), "box": BOX, "methods": constants(), "rows": rows}
    (folder / "compare.json").write_text(json.dumps(about, indent=2) + "\n")
    where = f"Written to {folder}: report.md, compare.csv, compare.json, compare.png, compare.pdf"
    publish(folder / "report.md", report(options, rows, sentence), where, {"compare": budget_figure(rows, sentence)})


def check(options: Options) -> None:
    """Refuse what would be found out only after hours."""
    tc.Layout(options.widths, options.actions)
    if min(options.repetitions, options.held_out) < 2:
        raise tc.InvalidInput("--repetitions and --held-out must both be at least 2, or there is no interval.")
    if options.seed + options.repetitions * options.instances > HELD_OUT:
        raise tc.InvalidInput(f"--seed is {options.seed}; training seeds must stay below {HELD_OUT}, where the unseen ones begin.")
    dearest = max(8, len(BOX)) * 2 * options.instances * options.horizon / SHARES[0]  # a generation of CMA-ES, a step of the mixed
    if options.budget < dearest:
        raise tc.InvalidInput(f"--budget is {options.budget}; a tenth of it must pay for one step of every method: {dearest:g}.")
    constants()  # which says whether packages are missing
    options.training(options.horizon).check_weight(options.weight)


def repetition(options: Options, folder: Any, method: str, number: int) -> list[list[float]]:
    """The objective of what a method hands out at each share of the budget, on each held-out instance, `(shares x instances)`."""

    def play() -> list[list[float]]:
        first, seed = options.seed + number * options.instances, 7919 * (options.seed + 1) + number
        instances = options.drawn(range(first, first + options.instances), options.horizon)
        study = instances.study(options.horizon, options.weight, options.delta)
        trail = METHODS[method](Search(study, BOX, start_of(BOX, seed), options.budget, seed))
        points = [max((x for x in trail if x[0] <= share * options.budget + 0.5), key=lambda x: x[0])[1] for share in SHARES]
        return judge(options, points)

    config = {**options.settings("repetitions"), "box": BOX, "shares": SHARES, "methods": constants(), **RULES}
    return list(stage(folder, f"{method.replace(' ', '_')}_{number}", config, play))


def judge(options: Options, points: Sequence[Mapping[str, float]]) -> list[list[float]]:
    """The objective of each point on every held-out instance: one run, with the same random numbers for all."""
    instances = options.drawn(range(HELD_OUT, HELD_OUT + options.held_out), options.horizon)
    unseen = instances.study(options.horizon, options.weight, options.delta)
    played = play_all(unseen, points, HELD_OUT + options.seed, distinct_runs=unseen.instances)
    found: list[list[float]] = unseen.objective(played.parts).view(len(points), -1).tolist()
    return found


def difference(values: Mapping[str, Tensor], method: str, share: int) -> tuple[float, float, float]:
    """Method less random search: mean and half-width over repetitions, and the half-width over the seeds of instances."""
    apart = (values[method] - values[RIVAL])[:, share]  # (repetitions x instances)
    seeds = apart.view(len(apart), -1, 2).mean(-1)  # the two instances of a seed share transitions and rewards: they count as one
    return *mean_and_half(apart.mean(1)), mean_and_half(seeds.mean(0))[1]


def finding(options: Options, values: Mapping[str, Tensor]) -> tuple[bool, str]:
    """Whether the goal is met, and a sentence."""
    found = [difference(values, OURS, j) for j, share in enumerate(SHARES) if share > ABOVE + 1e-9]
    met = [mean + max(half, other) < 0 for mean, half, other in found]
    if all(met):
        return True, f"Smoothed gradients beat random search at every budget above {ABOVE:.0%} of {options.budget:,} run-episodes"
    return False, f"Smoothed gradients beat random search at {sum(met)} of the {len(met)} budgets above a fifth: the goal is missed"


def rows_of(options: Options, values: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """A row for every method and budget, the objective in the mean over repetitions and held-out instances."""
    keys = ("run_episodes", "objective", "half_width", "less_random", "over_repetitions", "over_instances")
    rows = []
    for method, found in values.items():
        for j, share in enumerate(SHARES):
            numbers = (share * options.budget, *mean_and_half(found[:, j].mean(-1)), *difference(values, method, j))
            rows.append({"method": method, **dict(zip(keys, numbers, strict=True))})
    return rows


def report(options: Options, rows: Sequence[Mapping[str, Any]], sentence: str) -> str:
    """What a person reads."""
    cells = []
    for j, (method, spent, mean, half, apart, *halves) in enumerate(row.values() for row in rows):
        if j % len(SHARES) in (1, 2, 4, 6, 9):
            apart_cells = ["-" if method == RIVAL else plus_minus(apart, other, ",.3f") for other in halves]
            cells.append([method, f"{spent:,.0f}", plus_minus(mean, half, ",.3f"), *apart_cells])
    header = ["method", "run-episodes", "objective", "less random search (over repetitions)", "(over instances)"]
    words = f"{options.repetitions} repetitions, {2 * options.held_out} held-out instances, {options.horizon} episodes"
    return f"{sentence}.\n\n{words}, 95% intervals.\n\n{table(header, cells, 'comparison')}"
