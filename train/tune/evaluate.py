"""What studies share: methods side by side on the same instances, tables with intervals, and stages that are not played twice."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.events import flatten
from torchcmdp.files import write_file
from torchcmdp.tuning import SCALES, Played, Study

from ..program import bar, with_interval
from .instances import Instances

MEASURES = {"objective": ",.3f", "regret": ",.1f", "violation": ",.1f", "positive violation": ",.1f"}  # and how they are written
PAPER: dict[str, float] = dict.fromkeys(SCALES, 1.0)

# measure by method: a number an instance
Results = dict[str, dict[str, list[float]]]


def spread(points: Sequence[Mapping[str, float]], count: int) -> dict[str, Tensor]:
    """By name the scales of runs, of which the first so many have those of the first point, and so on."""
    return {x: torch.tensor([p[x] for p in points], dtype=torch.float64).repeat_interleave(count) for x in points[0]}


def play_all(study: Study, points: Sequence[Mapping[str, float]], seed: int, **options: Any) -> Played:
    """Every point once on every instance, all in one batch."""
    n = study.instances
    return study.play(spread(points, n), torch.arange(n).repeat(len(points)), seed, **options)


def play_out(learner: tc.Learner, env: tc.Simulator, episodes: int, tick: Callable[[int], None] | None = None) -> tc.RunResult:
    """Whole runs. Ctrl-C ends a run in good order, but half of one must not be kept, and so it goes on from here."""
    result = tc.run(learner, env, episodes, progress=False, on_progress=tick)
    if not result.completed:
        raise KeyboardInterrupt
    return result


def evaluate(
    instances: Instances, methods: Mapping[str, Mapping[str, float]], horizon: int, weight: float, delta: float, seed: int
) -> Results:
    """Play every method once on every instance.

    Intervals are then over instances, which is what a claim about instances never seen needs.
    """
    study = instances.study(horizon, weight, delta)
    with bar(None, f"{horizon:,} episodes", total=horizon, unit="ep") as shown:
        played = play_all(study, [{**PAPER, **method} for method in methods.values()], seed, tick=shown.update)
    values = (study.objective(played.parts), played.regret, played.worst_violation, played.worst_positive_violation)
    rows = zip(methods, *(x.view(len(methods), -1).tolist() for x in values), strict=True)
    return {method: dict(zip(MEASURES, row, strict=True)) for method, *row in rows}


def of_kind(values: Sequence[float], kinds: Sequence[str], kind: str) -> Tensor:
    """The numbers of the instances of one kind."""
    return torch.tensor([value for value, k in zip(values, kinds, strict=True) if k == kind], dtype=torch.float64)


def rows_of(results: Results, kinds: Sequence[str], horizon: int) -> list[list[str]]:
    """A table's rows: one for each kind and method."""
    rows = []
    for kind in dict.fromkeys(kinds):
        for method, measures in results.items():
            cells = [with_interval(of_kind(measures[name], kinds, kind), form) for name, form in MEASURES.items()]
            rows.append([f"{horizon:,}", kind, method, *cells])
    return rows


def stage(folder: Path, name: str, config: Mapping[str, Any], function: Callable[[], Any]) -> Any:
    """The function's result, kept as JSON in the folder, and read from there where it was made with the same settings.

    `config` is all that the result depends on, the constants of the code among it. Where something else is kept the stage is played
    again, and a sentence names the first setting in which they differ.
    """
    file = folder / "stages" / f"{name}.json"
    settings = json.loads(json.dumps(config))
    try:
        kept = json.loads(file.read_text())
        if kept["config"] == settings:
            return kept["result"]
        print(_other(file, kept["config"], settings), file=sys.stderr)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing or damaged: it is made again
    result = json.loads(json.dumps(function()))
    write_file(file, json.dumps({"config": settings, "result": result}).encode())
    return result


def _other(file: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """That a stage was made with other settings, and the first of them."""
    before, after = flatten(old), flatten(new)
    name = next(name for name in (*after, *before) if before.get(name) != after.get(name))
    was, now = (json.dumps(settings.get(name)) for settings in (before, after))
    return f"{file} was made with {name} = {was}, and this command has {now}; it is played again."
