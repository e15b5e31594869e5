"""Where the gradients of a descent come from: a fresh estimate a step, or windows of runs under way while the point moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchcmdp.tuning.estimators import Estimator, Tick
from torchcmdp.tuning.gradient import Estimate, summary, values_of
from torchcmdp.tuning.smoothed import Pairs, Smoothed
from torchcmdp.tuning.study import Study


class Fresh:
    """Every step plays whole runs of its own, step j with seed + j, for the samples of an estimator."""

    def __init__(self, study: Study, names: tuple[str, ...], how: Estimator, repeats: int, seed: int) -> None:
        self.study, self.names, self.how, self.repeats, self.seed = study, names, how, repeats, seed
        self.run_episodes = 0

    def step(self, number: int, point: Tensor, tick: Tick | None) -> Estimate:
        """The gradient at a point, `(P,)`, in step `number`."""
        found = self.how.samples(self.study, self.names, point, self.repeats, self.seed + number, tick)
        self.run_episodes += self.how.runs(self.study, len(self.names), self.repeats) * self.study.horizon
        return summary(self.study, found)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"run_episodes": self.run_episodes}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.run_episodes = int(state["run_episodes"])


class Online(Fresh):
    """Every step plays one window of groups of pairs, each at another window of its runs; a group at its end begins anew.

    As many groups as a run has windows, begun one a step, so that from then on every window is seen in every step. The gradients
    of the windows add up to that of whole runs, but for the moves that were made while these were under way.
    """

    def __init__(self, study: Study, names: tuple[str, ...], how: Smoothed, repeats: int, seed: int) -> None:
        super().__init__(study, names, how, repeats, seed)
        self.windows, self._smoothed, self._groups = how.windows(study), how, list[Pairs]()

    def step(self, number: int, point: Tensor, tick: Tick | None) -> Estimate:
        """The gradient at a point, `(P,)`, from one window of every group."""
        self._groups = [group for group in self._groups if not group.finished]
        self._groups.append(self._pairs(self.seed + number))
        before = [group.played().parts if group.played_windows else torch.zeros(()) for group in self._groups]
        slopes = [self.study.objective(group.advance(point, tick)) for group in self._groups]
        share = self.windows / len(self._groups)  # the windows that no group is at yet count like those that one is at
        window = self.study.horizon // self.windows
        self.run_episodes += sum(2 * group.pairs for group in self._groups) * window
        means = torch.stack([x.mean(0) for x in slopes]).sum(0) * share
        error = torch.stack([x.var(0) / len(x) for x in slopes]).sum(0).sqrt() * share
        added = torch.stack([(group.played().parts - old).mean(0) for group, old in zip(self._groups, before, strict=True)])
        values = {**values_of(self.study, self._groups[0].played()), "objective": float(self.study.objective(added.sum(0) * share))}
        return Estimate(gradient=means, standard_error=error, half_width=1.96 * error, **values)

    def _pairs(self, seed: int) -> Pairs:
        return Pairs(self._smoothed, self.study, self.names, self.study.instances * self.repeats, seed)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it: with the groups under way."""
        return {**super().state(), "groups": [group.state() for group in self._groups]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        super().restore(state)
        self._groups = [self._pairs(int(held["seed"])) for held in state["groups"]]
        for group, held in zip(self._groups, state["groups"], strict=True):
            group.restore(held)
