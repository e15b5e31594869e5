"""Where to move the hyperparameters: descent with checkpoints, and random search to compare with."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from torchcmdp.errors import InvalidInput, brief, check_folder, check_kind, check_memory, positive, switch, whole_number
from torchcmdp.folder import RunFolder
from torchcmdp.tuning.estimators import Estimator
from torchcmdp.tuning.gradient import Estimate, estimator_of, log_point
from torchcmdp.tuning.online import Fresh, Online
from torchcmdp.tuning.smoothed import Smoothed
from torchcmdp.tuning.study import Study, check_study

Box = Mapping[str, tuple[float, float]]
Progress = bool | Callable[..., tqdm]  # whether to show a bar, or what makes one


@dataclass(frozen=True)
class Descent:
    """How `optimise` moves: Adam on the logarithms of the scales.

    Attributes:
        steps: At most this many.
        learning_rate: Of Adam; about the largest move of a logarithm in one step.
        max_norm: Gradients longer than this are shortened to it.
        patience: Stop when the mean objective of this many steps is no better than that of as many steps before; 0 never stops.
        repeats, estimator: As in `estimate_gradient`. A `Smoothed` with a window is used online: a step plays one window.
        seed: Step j uses the trajectories of seed + j.
    """

    steps: int = 15
    learning_rate: float = 0.3
    max_norm: float = 1.0
    patience: int = 6
    repeats: int = 4
    estimator: str | Estimator = "smoothed"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("patience", 0), ("repeats", 1), ("seed", 0)):
            whole_number(name, getattr(self, name), least=least)
        for name in ("learning_rate", "max_norm"):
            positive(name, getattr(self, name))
        estimator_of(self.estimator)


@dataclass(frozen=True, eq=False)
class TuningResult:
    """What a study found.

    Attributes:
        scales: The mean of the last third of the points visited, in logarithms, by name.
        history: One row a step: objective, its parts, scales, gradient, by TensorBoard tag.
        run_episodes: How many episodes of runs were played.
    """

    scales: dict[str, float]
    history: list[dict[str, float]]
    run_episodes: int


@dataclass
class _Session:
    """An optimisation in memory, and everything that a checkpoint holds."""

    names: tuple[str, ...]
    log_scales: Tensor
    optimiser: torch.optim.Adam
    source: Fresh
    points: list[list[float]] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        log_scales, optimiser = self.log_scales.detach().clone(), self.optimiser.state_dict()
        kept = {"points": self.points, "rows": self.rows, "source": self.source.state()}
        return {"log_scales": log_scales, "optimiser": optimiser, **kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.log_scales.copy_(state["log_scales"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.points, self.rows = list(state["points"]), list(state["rows"])
        self.source.restore(state["source"])

    def done(self, descent: Descent) -> bool:
        n, found = descent.patience, [row["Tuning/objective"] for row in self.rows]
        stalled = n > 0 and len(found) >= 2 * n and sum(found[-n:]) >= sum(found[-2 * n : -n])
        return len(found) >= descent.steps or stalled

    def step(self, estimate: Estimate, descent: Descent, low: Tensor, high: Tensor) -> None:
        """Record a point, and move on from it."""
        self.points.append(self.log_scales.detach().tolist())
        self.rows.append(_row(len(self.points), self.names, self.log_scales.detach(), estimate))
        self.log_scales.grad = estimate.gradient.clone()
        torch.nn.utils.clip_grad_norm_([self.log_scales], descent.max_norm)
        self.optimiser.step()
        with torch.no_grad():
            self.log_scales.clamp_(low, high)


def optimise(
    study: Study,
    start: Mapping[str, float],
    descent: Descent | None = None,
    *,
    box: Box,
    folder: str | PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
    fresh: bool = False,
    progress: Progress = True,
) -> TuningResult:
    """Descend from `start` to better hyperparameters; with a folder, log to TensorBoard and resume what the folder holds.

    Args:
        study: What to tune, on what.
        start: Where to begin, by name; what is not named is not tuned.
        descent: How to move.
        box: The smallest and the largest value of each scale.
        folder: For TensorBoard events, `config.json`, `metrics.csv` (one row a step) and `checkpoint.pt`, written after every step.
        config: What else defines the study, ready for JSON: a folder of other settings is refused.
        fresh: Forget what the folder holds.
        progress: Show a progress bar; or what makes another, a function of None, a name, and tqdm's `total`, `initial` and `unit`.
    """
    check_study(study)
    descent, names = Descent() if descent is None else descent, tuple(study.check(start))
    check_kind("descent", descent, Descent, "a Descent")
    check_kind("config", config, Mapping | None, "settings by name, or None")
    switch("fresh", fresh)
    _check_progress(progress)
    point = log_point(start)
    low, high = log_box(box, names)
    log_scales = torch.nn.Parameter(point.clamp(low, high))
    how, luck = estimator_of(descent.estimator), (descent.repeats, descent.seed)
    source = Fresh(study, names, how, *luck)
    if isinstance(how, Smoothed) and how.window is not None:
        source = Online(study, names, how, *luck)
    session = _Session(names, log_scales, torch.optim.Adam([log_scales], lr=descent.learning_rate), source)
    if folder is not None:
        check_folder("folder", folder)
    place = None if folder is None else RunFolder(Path(folder), fresh)
    settings = _settings(study, start, descent, box, config)
    try:
        if place is not None:
            state = place.checkpoint(settings)
            if state is not None:
                session.restore(state)
            place.begin(settings, session.rows, ())
        with _bar(progress, "tuning", descent.steps * study.horizon, len(session.rows) * study.horizon) as bar:
            while not session.done(descent):
                found = source.step(len(session.rows), log_scales.detach().clone(), bar.update)
                session.step(found, descent, low, high)
                bar.set_postfix_str(f"step {len(session.rows)}, objective {found.objective:.4f}", refresh=False)
                if place is not None:
                    place.append(session.rows[-1], {})
                    place.save(session.state(), settings)
        if place is not None:
            place.finish({}, len(session.rows))
    finally:
        if place is not None:
            place.close()
    tail = torch.tensor(session.points[-math.ceil(len(session.points) / 3) :], dtype=torch.float64).mean(0).exp()
    return TuningResult(dict(zip(names, tail.tolist(), strict=True)), session.rows, source.run_episodes)


def random_search(
    study: Study, box: Box, *, candidates: int, runs: int, seed: int = 0, progress: Progress = True
) -> tuple[dict[str, float], list[tuple[dict[str, float], float]]]:
    """The best of `candidates` points drawn uniformly in the logarithms, each judged by the same `runs` runs over all instances.

    `progress` is that of `optimise`.

    Returns:
        The best point, and all points with their objectives.
    """
    check_study(study)
    names = tuple(study.check(box))
    low, high = log_box(box, names)
    candidates, runs = whole_number("candidates", candidates, least=1), whole_number("runs", runs, least=1)
    check_memory(f"{brief(runs)} runs and {brief(candidates)} candidates", 4 * runs + 4 * candidates)
    seed = whole_number("seed", seed, least=0)
    _check_progress(progress)
    draws = torch.rand(candidates, len(names), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    instances = torch.arange(runs) % study.instances
    found = []
    with _bar(progress, "random search", candidates * study.horizon) as bar:
        for point in torch.exp(low + draws * (high - low)).tolist():
            scales: dict[str, float] = dict(zip(names, point, strict=True))
            played = study.play(scales, instances, seed, tick=bar.update)
            found.append((scales, float(study.objective(played.parts).mean())))
    return min(found, key=lambda pair: pair[1])[0], found


def _check_progress(progress: Progress) -> None:
    if not callable(progress):
        switch("progress", progress)


def _bar(progress: Progress, name: str, total: int, initial: int = 0) -> tqdm[Any]:
    """The caller's bar over episodes, or ours."""
    if callable(progress):
        return progress(None, name, total=total, initial=initial, unit="ep")
    return tqdm(desc=name, total=total, initial=initial, unit="ep", disable=not progress, dynamic_ncols=True)


def log_box(box: Box, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The logarithms of the smallest and of the largest values, `(P,)` each."""
    check_kind("box", box, Mapping, "the smallest and the largest value of each scale, by name")
    for name in names:
        ends = box.get(name)
        if not isinstance(ends, list | tuple) or len(ends) != 2 or not positive(name, ends[0]) <= positive(name, ends[1]):
            raise InvalidInput(f"box has {brief(ends)} for {name}; it needs a smallest and a largest value, both above zero.")
    low, high = torch.tensor([box[name] for name in names], dtype=torch.float64).log().unbind(-1)
    return low, high


def _row(step: int, names: Sequence[str], log_scales: Tensor, estimate: Estimate) -> dict[str, float]:
    row = {
        "episode": float(step),  # the folder's word for the axis of its curves: here, the step
        "Tuning/objective": estimate.objective,
        "Regret/cumulative": estimate.regret,
        "Violation/cumulative": estimate.violation,
        "Violation/positive": estimate.positive_violation,
        "Gradient/norm": float(estimate.gradient.norm()),
    }
    for name, value, slope in zip(names, log_scales.exp().tolist(), estimate.gradient.tolist(), strict=True):
        row[f"Scales/{name}"], row[f"Gradient/{name}"] = value, slope
    return row


def _settings(
    study: Study, start: Mapping[str, float], descent: Descent, box: Box, config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Everything that determines the result, as JSON holds it."""
    own = {"instances": study.instances, "horizon": study.horizon, "weight": study.weight, "delta": study.delta}
    fixed = {name: value if isinstance(value, int | float | str) else str(value) for name, value in study.options.items()}
    settings = {
        "learner": {"name": f"{study.learner.name}, tuned", **fixed},
        "study": own,
        "start": dict(start),
        "box": {name: list(ends) for name, ends in box.items()},
        "descent": {**vars(descent), "estimator": str(estimator_of(descent.estimator))},
        "config": dict(config or {}),
    }
    return dict(json.loads(json.dumps(settings)))
