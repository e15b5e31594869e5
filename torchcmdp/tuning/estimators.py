"""Gradients of a study's objective in the logarithms of its scales: estimators behind one interface, each with a standard error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchcmdp.errors import check_kind, choice, not_negative, number, switch
from torchcmdp.tuning.study import FEEDBACKS, Derivative, Study, check_study, forward_derivative
from torchcmdp.tuning.unroll import Played

Tick = Callable[[], Any]


@dataclass(frozen=True, eq=False)
class Samples:
    """What an estimator found at a point.

    Attributes:
        derivatives: Independent samples of the gradient of the objective, `(n x P)`.
        played: The runs that they come from.
    """

    derivatives: Tensor
    played: Played


class Estimator(ABC):
    """A way to estimate the gradient of a study's objective."""

    @abstractmethod
    def runs(self, study: Study, parameters: int, repeats: int) -> int:
        """How many runs one estimate plays."""

    @abstractmethod
    def samples(self, study: Study, names: tuple[str, ...], point: Tensor, repeats: int, seed: int, tick: Tick | None) -> Samples:
        """Play, and differentiate.

        Args:
            study: What to differentiate.
            names: Of the parameters, P of them.
            point: The logarithms of their scales, `(P,)`.
            repeats: Samples of each instance.
            seed: Of all random numbers.
            tick: Called after every episode.
        """


@dataclass(frozen=True)
class Through(Estimator):
    """Derivatives through the learner in forward mode, each partial derivative from runs of its own.

    Attributes:
        feedback, memory: As in `Study.play`; but for "sampled" the learner must be WC-OPS.
        score: With sampled feedback, whether the derivative of which trajectories are likely is added. With it, with `memory=1` and
            without `run_clip` the estimate is unbiased, and of use for short horizons only.
        run_clip: The largest derivative of the objective that one run may report; None for any.
    """

    feedback: str = "mixed"
    memory: float = 0.98
    score: bool = True
    run_clip: float | None = 1.0

    def __post_init__(self) -> None:
        choice("feedback", self.feedback, FEEDBACKS)
        number("memory", self.memory, "a number between 0 and 1", lambda found: 0 <= found <= 1)
        switch("score", self.score)
        if self.run_clip is not None:
            not_negative("run_clip", self.run_clip)

    def runs(self, study: Study, parameters: int, repeats: int) -> int:
        """As in `Estimator`: one for every instance, repeat and parameter."""
        return parameters * study.instances * repeats

    def samples(self, study: Study, names: tuple[str, ...], point: Tensor, repeats: int, seed: int, tick: Tick | None) -> Samples:
        """As in `Estimator`."""
        return self.differentiate(study, names, point.expand(study.instances * repeats, -1), seed, tick)

    def differentiate(
        self, study: Study, names: tuple[str, ...], points: Tensor, seed: int, tick: Tick | None = None, shared: bool = False
    ) -> Samples:
        """All partial derivatives at `points`, `(n x P)`: of one point in the same random numbers where `shared`, or in others."""
        block, count = points.shape
        directions = torch.eye(count, dtype=torch.float64).repeat_interleave(block, dim=0)
        instances = torch.arange(count * block) % block % study.instances
        options: dict[str, Any] = {"feedback": self.feedback, "memory": self.memory, "tick": tick}
        if shared:
            options["distinct_runs"] = block
        found = forward_derivative(study, names, points.repeat(count, 1), directions, instances, seed, **options)
        return Samples(run_derivatives(study, found, self.run_clip, self.score).view(count, block).T, found.played)


def run_derivatives(study: Study, found: Derivative, run_clip: float | None = None, score: bool = True) -> Tensor:
    """The objective's derivative in every run, `(runs,)`, clipped if asked, with its score part or without."""
    check_study(study)
    check_kind("found", found, Derivative, "a Derivative, such as forward_derivative gives")
    switch("score", score)
    if run_clip is not None:
        not_negative("run_clip", run_clip)
    derivatives = study.objective(found.pathwise + found.score if score else found.pathwise)
    return derivatives if run_clip is None else derivatives.clamp(-run_clip, run_clip)
