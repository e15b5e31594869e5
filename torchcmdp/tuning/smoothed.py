"""Gradients of a smoothed objective by evolution strategies: antithetic pairs of runs that share their random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, brief, check_kind, positive, switch, whole_number
from torchcmdp.tuning.estimators import Estimator, Samples, Through, Tick
from torchcmdp.tuning.study import Study, named
from torchcmdp.tuning.unroll import Played, Unroll


@dataclass(frozen=True)
class Smoothed(Estimator):
    """Evolution strategies: antithetic pairs of runs with common random numbers, around the point in the logarithms of the scales.

    Unbiased for the gradient of the smoothed objective, its mean over scales with a normal spread of `sigma` around the point. It
    asks nothing of the learner but numbers, so that any is played, in compiled blocks where they can be, and its variance does not
    explode with the horizon: a pair shares its random numbers and differs in its scales alone.

    Attributes:
        sigma: Standard deviation of the logarithm of each scale; one for all, or by name.
        window: Episodes of a window, a divisor of the horizon; None for the whole horizon. In `optimise` a step then plays one
            window of runs under way, which begin at different times, and moves on (online). With the noise of a pair kept for its
            whole run this is NRES (Li et al. 2023).
        redraw: Whether every window has new noise: PES (Vicol et al. 2021), whose noise adds up over the windows of a run.
        control: An estimator through the learner whose derivatives along the same random numbers are used as control variates,
            with a coefficient that is estimated on the other half of the pairs; kept where it lowers the variance. For whole
            runs: with a window, and so with PES, it is refused.
    """

    sigma: float | Mapping[str, float] = 0.3
    window: int | None = None
    redraw: bool = False
    control: Through | None = None

    def __post_init__(self) -> None:
        switch("redraw", self.redraw)
        check_kind("control", self.control, Through | None, "a Through, such as Through(), or None")
        if self.window is not None:
            if self.control is not None:
                raise InvalidInput(
                    f"control is given with a window of {brief(self.window)} episodes; what a control explains is the noise of "
                    "whole runs, so that window must be None."
                )
            whole_number("window", self.window, least=1)
        for value in self.sigma.values() if isinstance(self.sigma, Mapping) else [self.sigma]:
            positive("sigma", value)

    def runs(self, study: Study, parameters: int, repeats: int) -> int:
        """As in `Estimator`: a pair for every instance and repeat, and what a control plays."""
        extra = 0 if self.control is None else self.control.runs(study, parameters, repeats)
        return 2 * study.instances * repeats + extra

    def spread(self, names: tuple[str, ...]) -> Tensor:
        """sigma of every parameter, `(P,)`."""
        sigma = self.sigma if isinstance(self.sigma, Mapping) else dict.fromkeys(names, self.sigma)
        for name in names:
            if name not in sigma:
                raise InvalidInput(f"sigma has no {name}; it needs a number for each of {', '.join(names)}.")
        return torch.tensor([sigma[name] for name in names], dtype=torch.float64)

    def windows(self, study: Study) -> int:
        """How many windows a run has."""
        window = study.horizon if self.window is None else self.window
        if study.horizon % window:
            raise InvalidInput(f"window is {window}; it must divide the horizon, {study.horizon} episodes.")
        return study.horizon // window

    def samples(self, study: Study, names: tuple[str, ...], point: Tensor, repeats: int, seed: int, tick: Tick | None) -> Samples:
        """As in `Estimator`: as many samples as pairs."""
        points = point.expand(study.instances * repeats, -1)
        found = self.differentiate(study, names, points, seed, tick)
        if self.control is None:
            return found
        return self._controlled(study, names, points, seed, found)

    def differentiate(self, study: Study, names: tuple[str, ...], points: Tensor, seed: int, tick: Tick | None = None) -> Samples:
        """One pair around each of the points, `(pairs x P)`; pair i plays instance i % instances."""
        pairs = Pairs(self, study, names, len(points), seed)
        # without new noise, and at a point that does not move, all windows can be played as one
        windows, episodes = (self.windows(study), None) if self.redraw else (1, study.horizon)
        slopes = torch.stack([pairs.advance(points, tick, episodes) for _ in range(windows)]).sum(0)
        return Samples(study.objective(slopes), pairs.played())

    def _controlled(self, study: Study, names: tuple[str, ...], points: Tensor, seed: int, found: Samples) -> Samples:
        """The samples less what the control explains of them; its part is zero in the mean, whatever it is worth."""
        assert self.control is not None
        sigma, unit = self.spread(names), noise_of(seed, 0, *points.shape)
        slopes = self.control.differentiate(study, names, points, seed, shared=True).derivatives
        # what the pair would have shown had the objective been a plane with these slopes, less the slopes themselves
        zero = unit / sigma * (unit * sigma * slopes).sum(-1, keepdim=True) - slopes
        corrected = without(found.derivatives, zero)
        better = corrected.var(0) < found.derivatives.var(0)
        return Samples(torch.where(better, corrected, found.derivatives), found.played)


class Pairs:
    """Antithetic pairs under way: run i and run n + i have the same random numbers, and scales on two sides of a point."""

    def __init__(self, how: Smoothed, study: Study, names: tuple[str, ...], pairs: int, seed: int) -> None:
        self.how, self.study, self.names, self.pairs, self.seed = how, study, names, pairs, seed
        self.sigma = how.spread(names)
        self.window, self.played_windows = study.horizon // how.windows(study), 0
        self.unit = self.weight = torch.zeros(pairs, len(names), dtype=torch.float64)
        self._unroll: Unroll | None = None

    @property
    def finished(self) -> bool:
        """Whether the runs are at their horizon."""
        return self._unroll is not None and self._unroll.episode == self.study.horizon

    def advance(self, points: Tensor, tick: Tick | None = None, episodes: int | None = None) -> Tensor:
        """Play a window around the points, `(n x P)` or `(P,)`; returns the gradient of what it adds, `(n x P x 2)`."""
        if self.how.redraw or not self.played_windows:
            self.unit = noise_of(self.seed, self.played_windows, self.pairs, len(self.names))
            self.weight = self.weight + self.unit  # of all noise so far: what a window shows, the noise before it has caused too
        self.played_windows += 1
        move = self.sigma * self.unit
        scales = named(self.names, torch.cat([points + move, points - move]))
        if self._unroll is None:
            self._unroll = self._begun(scales)
        else:
            self._unroll.learner.retune(self.study.make(self._unroll.env, scales))
        up, down = self._unroll.advance(self.window if episodes is None else episodes, tick).view(2, self.pairs, 2).unbind(0)
        return (self.weight / self.sigma).unsqueeze(-1) * ((up - down) / 2).unsqueeze(1)

    def _begun(self, scales: Mapping[str, Tensor]) -> Unroll:
        study = self.study
        env = study.environment((torch.arange(self.pairs) % study.instances).repeat(2), self.seed)
        env.share_streams(self.pairs)
        return Unroll(study.make(env, scales), env, study.horizon)

    def played(self) -> Played:
        """What the runs have come to so far."""
        assert self._unroll is not None
        return self._unroll.played()

    def state(self) -> dict[str, Any]:
        """All of it as plain data, for `restore`."""
        unroll = None if self._unroll is None else self._unroll.state()
        return {"unroll": unroll, "windows": self.played_windows, "unit": self.unit, "weight": self.weight, "seed": self.seed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.unit, self.weight, self.played_windows, self.seed = (state[name] for name in ("unit", "weight", "windows", "seed"))
        if state["unroll"] is not None:
            self._unroll = self._begun(named(self.names, torch.zeros(2 * self.pairs, len(self.names), dtype=torch.float64)))
            self._unroll.restore(state["unroll"])


def noise_of(seed: int, window: int, pairs: int, parameters: int) -> Tensor:
    """Standard normal noise of a window, `(pairs x P)`."""
    # torch's generator on the CPU looks at 32 bits of its seed alone, which two numbers do not fit into
    return torch.from_numpy(np.random.default_rng((seed, window)).standard_normal((pairs, parameters)))


def without(samples: Tensor, control: Tensor) -> Tensor:
    """Samples less a multiple of a control whose mean is zero, `(n x P)` each.

    The coefficient of every column is the best for the other half of the samples, so that the mean is not moved.
    """
    if len(samples) < 4:
        return samples
    half = torch.arange(len(samples)) % 2 == 0
    result = samples.clone()
    for own in (half, ~half):
        ours, theirs = (x[~own] - x[~own].mean(0) for x in (samples, control))
        coefficient = (ours * theirs).sum(0) / theirs.square().sum(0).clamp_min(1e-300)
        result[own] = samples[own] - coefficient * control[own]
    return result
