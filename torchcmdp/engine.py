"""Blocks of episodes in compiled code, where learner, simulator, processes and tracker are all ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.learners.compiled import Packed, check_failures
from torchcmdp.processes.compiled import pack, unpack
from torchcmdp.simulator import _thresholds


class Engine:
    """Plays blocks of episodes of one session."""

    def __init__(self, learner: Any, env: Any, tracker: Any, tally: Any) -> None:
        from torchcmdp.kernels.geometry import geometry_of

        self.learner, self.env, self.tracker, self.tally = learner, env, tracker, tally
        self.geometry = geometry_of(env.layout)
        transitions = env.cmdp.transitions
        self.transitions = self._compact(transitions, 4)
        self.thresholds = self._compact(_thresholds(transitions), 4)

    def _compact(self, tensor: Tensor, axes: int) -> np.ndarray:
        """A padded tensor `([runs x] L x S x A [x S])` without its padding, `((1 or runs) x P or E)`."""
        places = self.geometry.pair_at if axes == 3 else self.geometry.entry_at
        flat = tensor.detach().flatten(-axes).reshape(-1, tensor.shape[-axes:].numel()).numpy()
        return np.ascontiguousarray(flat[:, places])

    def play(self, episodes: int) -> None:
        """That many episodes of every run."""
        from torchcmdp.kernels.cpu import over_batch

        learner, env, tracker, tally = self.learner, self.env, self.tracker, self.tally
        packed = Packed(learner)
        tags = packed.face.kernels.TAGS
        if not tally.tags:
            tally._make_room(list(tags), env.device)
        sums = {name: getattr(tally, f"_{name}").clone() for name in ("window", "total", "positive")}
        scene = self._scene(packed, sums)
        geometry, learnt = self.geometry, int(learner.episode)

        def piece(start: int, stop: int) -> None:
            stage, state = packed.room(env.constraints)
            packed.face.play(
                start, stop, episodes, geometry, scene, packed.settings, packed.hyperparameters, learnt, packed.buffers, stage,
                state,
            )  # fmt: skip

        over_batch(piece, env.runs, len(geometry.successor) * episodes)
        check_failures(scene.failed)
        packed.unpack(episodes)
        env.reward_values = unpack(env.rewards, scene.rewards, episodes, 3)
        env.cost_values = unpack(env.costs, scene.costs, episodes, 4)
        env.episode += episodes
        comparators = tracker._comparators
        if comparators.changing:  # the padding too, where kernels do not look
            comparators._worst_cost = torch.maximum(comparators._worst_cost, env.costs.largest(env.cost_values))
        tracker.updates += episodes
        for name, value in sums.items():
            setattr(tally, f"_{name}", value)
        tally.window_episodes += episodes

    def _scene(self, packed: Packed, sums: dict[str, Tensor]) -> Any:
        from torchcmdp.kernels.block import Scene

        env, comparators = self.env, self.tracker._comparators
        changing = comparators.changing
        return Scene(
            seed=env.seed,
            first_run=env.first_run,
            distinct=env.distinct_runs or 0,
            episode=env.episode,
            transitions=self.transitions,
            thresholds=self.thresholds,
            rewards=pack(env.rewards, env.runs, 3),
            costs=pack(env.costs, env.runs, 4),
            comparator=self._compact(comparators.safe, 3),
            sums=self.tracker._sums.numpy(),
            changing=int(changing),
            reward_sum=comparators._reward_sum.flatten(1).numpy() if changing else np.zeros((1, 1)),
            cost_sum=comparators._cost_sum.flatten(2).numpy() if changing else np.zeros((1, 1, 1)),
            worst_cost=comparators._worst_cost.flatten(2).numpy() if changing else np.zeros((1, 1, 1)),
            last=packed.last,
            window=sums["window"].numpy(),
            total=sums["total"].numpy(),
            positive=sums["positive"].numpy(),
            failed=np.zeros(env.runs, np.int64),
        )
