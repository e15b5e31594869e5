"""Ways to look for constants, each with the same number of run-episodes: two gradients, random search, TPE and CMA-ES."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.tuning import Descent, Estimator, Smoothed, Study, Through, optimise
from torchcmdp.tuning.gradient import log_point
from torchcmdp.tuning.optimise import log_box

Box = Mapping[str, tuple[float, float]]
# After each step: how many run-episodes were played so far, and which scales the method would hand out if it ended there.
Trail = list[tuple[int, dict[str, float]]]

# Declared before the comparison was played. The smoothed gradient's spread and step, and that descents begin at the best of random
# draws, come from trials on instances of other seeds (500 to 531, judged on 600 to 615). The mixed gradient has the same step; the
# other methods have what their packages take by default.
SMOOTHED, SMOOTHED_RATE, SMOOTHED_REPEATS = Smoothed(sigma=0.7), 0.2, 1
MIXED, MIXED_RATE, MIXED_REPEATS = Through(), 0.2, 1
# Of the budget, spent on random draws of which a descent begins at the best: the box spans three decades in every scale, of which
# large parts are flat, and a gradient there shows no way out.
SCREEN = 0.2
SPREAD = 0.25  # of CMA-ES at its beginning, as a share of the box in every logarithm


@dataclass(frozen=True)
class Search:
    """What every method is given: the study, the box and where to begin, as in `optimise`, how much to play, and a seed."""

    study: Study
    box: Box
    start: dict[str, float]
    budget: int  # run-episodes
    seed: int

    @property
    def price(self) -> int:
        """Run-episodes of one candidate: a run of every instance."""
        return self.study.instances * self.study.horizon

    def judge(self, point: Tensor) -> float:
        """The objective at a point, `(P,)` in logarithms: the same random numbers for every candidate."""
        played = self.study.play(self.named(point), torch.arange(self.study.instances), self.seed)
        return float(self.study.objective(played.parts).mean())

    def named(self, point: Tensor) -> dict[str, float]:
        """By name the scales at a point, `(P,)` in logarithms."""
        return dict(zip(self.box, point.exp().tolist(), strict=True))

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """Of the box in logarithms, `(P,)` each."""
        return log_box(self.box, tuple(self.box))


def start_of(box: Box, seed: int) -> dict[str, float]:
    """A point drawn uniformly in the logarithms: where every method begins in the repetition of this seed."""
    low, high = log_box(box, tuple(box))
    draw = torch.rand(len(box), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return dict(zip(box, (low + draw * (high - low)).exp().tolist(), strict=True))


def descent(estimator: Estimator, rate: float, repeats: int, given: Search) -> Trail:
    """Adam on an estimator's gradients, from the best of random draws; hands out the mean of the last half of its points."""
    screened = best_of(random_draws, replace(given, budget=int(SCREEN * given.budget)))
    spent, start = screened[-1]
    price = estimator.runs(given.study, len(given.box), repeats) * given.study.horizon
    how = Descent((given.budget - spent) // price, rate, patience=0, repeats=repeats, estimator=estimator, seed=given.seed)
    found = optimise(given.study, start, how, box=given.box, progress=False)
    points = torch.tensor([[row[f"Scales/{name}"] for name in given.box] for row in found.history], dtype=torch.float64).log()
    moved = [(spent + price * n, given.named(points[n // 2 : n].mean(0))) for n in range(1, len(points) + 1)]
    return screened + moved


# Points in logarithms, the start first; it is sent what each was judged to be.
Draws = Generator[Tensor, float, None]


def best_of(draw: Callable[[Search], Draws], given: Search) -> Trail:
    """Candidates one after the other, each judged by a run of every instance; hands out the best so far, by these runs."""
    draws = draw(given)
    trail: Trail = []
    point, best = next(draws), float("inf")
    for n in range(1, given.budget // given.price + 1):
        value = given.judge(point)
        trail.append((n * given.price, given.named(point) if value < best else trail[-1][1]))
        point, best = draws.send(value), min(best, value)
    return trail


def random_draws(given: Search) -> Draws:
    """Uniform in the logarithms."""
    (low, high), generator = given.ends, torch.Generator().manual_seed(given.seed)
    yield log_point(given.start)
    while True:
        yield low + torch.rand(len(low), generator=generator, dtype=torch.float64) * (high - low)


def tpe_draws(given: Search) -> Draws:
    """Optuna's tree-structured Parzen estimator with its defaults."""
    optuna = package("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    uniform = {name: optuna.distributions.FloatDistribution(*ends, log=True) for name, ends in given.box.items()}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=given.seed))
    value = yield log_point(given.start)
    study.add_trial(optuna.trial.create_trial(params=given.start, distributions=uniform, value=value))
    while True:
        asked = study.ask(uniform)
        study.tell(asked, (yield log_point({name: asked.params[name] for name in given.box})))


def cma_es(given: Search) -> Trail:
    """CMA-ES with its defaults, in logarithms of which the box is a cube; hands out the mean of its distribution."""
    kind = package("cmaes").CMA
    low, high = given.ends
    begin = ((log_point(given.start) - low) / (high - low)).numpy()
    state = kind(mean=begin, sigma=SPREAD, bounds=np.array([[0.0, 1.0]] * len(low)), seed=given.seed)
    trail: Trail = []
    while (len(trail) + 1) * state.population_size * given.price <= given.budget:
        asked = [state.ask() for _ in range(state.population_size)]
        state.tell([(x, given.judge(low + torch.from_numpy(x) * (high - low))) for x in asked])
        mean = torch.from_numpy(state.mean.clip(0, 1))
        trail.append(((len(trail) + 1) * state.population_size * given.price, given.named(low + mean * (high - low))))
    return trail


def package(name: str) -> Any:
    """A package of the extra [tune]; a sentence where it is not there."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise tc.InvalidInput(f"{name} is not installed; the comparison needs it: pip install 'torchcmdp[tune]'.") from error


def constants() -> dict[str, Any]:
    """All that the methods depend on beside what they are given, of packages, whose defaults they use, the version."""
    packages = {name: package(name).__version__ for name in ("optuna", "cmaes")}
    gradients = {"smoothed": {**asdict(SMOOTHED), "rate": SMOOTHED_RATE, "repeats": SMOOTHED_REPEATS}}
    gradients["mixed"] = {**asdict(MIXED), "rate": MIXED_RATE, "repeats": MIXED_REPEATS}
    return {**gradients, "max_norm": Descent().max_norm, "screen": SCREEN, "spread": SPREAD, "packages": packages}


METHODS: Mapping[str, Callable[[Search], Trail]] = {
    "smoothed gradient": partial(descent, SMOOTHED, SMOOTHED_RATE, SMOOTHED_REPEATS),
    "random search": partial(best_of, random_draws),
    "TPE": partial(best_of, tpe_draws),
    "CMA-ES": cma_es,
    "mixed gradient": partial(descent, MIXED, MIXED_RATE, MIXED_REPEATS),
}
