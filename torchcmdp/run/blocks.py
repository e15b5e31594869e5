"""Blocks of episodes in one compiled call, where learner, simulator, processes and tracker are all ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.comparators import Comparators
from torchcmdp.kernels.memory import compact
from torchcmdp.learners.base import Learner
from torchcmdp.learners.compiled import Packed, check_failures, is_original
from torchcmdp.learners.compiled import obstacle as learner_obstacle
from torchcmdp.metrics import Tracker
from torchcmdp.run.diagnostics import Diagnostics
from torchcmdp.simulator import Simulator


def obstacle(learner: Any, env: Any, tracker: Any) -> str:
    """What keeps compiled code from playing these with the numbers that they would give themselves, as a clause; else empty."""
    if not isinstance(learner, Learner):
        return f"{type(learner).__name__} is no learner of this library"
    if why := learner_obstacle(learner):
        return why
    if not (isinstance(env, Simulator) and vars(type(env)).get("plays_in_blocks", type(env) is Simulator)):
        return f"{type(env).__name__} is not the simulator of this library"
    if not env.is_packable:
        return "a process is not of this library, has come to its end, or is not in torch.float64 on the CPU"
    originals = is_original(env, "rollout") and is_original(tracker, "update") and is_original(learner, "policy", "update")
    if not (originals and type(tracker) is Tracker and type(tracker._comparators) is Comparators):
        return "the tracker, or a method of learner or simulator, is somebody else's"
    constraints = getattr(learner, "ignored_constraints", learner.constraints)
    if (learner.layout, learner.runs, constraints) != (env.layout, env.runs, env.constraints):
        return "learner and simulator have different layouts, runs or constraints"
    return ""


class Blocks:
    """Plays blocks of episodes for those that no `obstacle` keeps from it.

    Args:
        learner, env, tracker, diagnostics: Those of a session.
    """

    def __init__(self, learner: Learner, env: Simulator, tracker: Tracker, diagnostics: Diagnostics) -> None:
        from torchcmdp.kernels.geometry import geometry_of

        self.learner, self.env, self.tracker, self.diagnostics = learner, env, tracker, diagnostics
        self.geometry = geometry_of(env.layout)

    def play(self, episodes: int) -> None:
        """That many episodes of every run."""
        from torchcmdp.kernels.threads import over_batch

        env, geometry, learnt = self.env, self.geometry, int(self.learner.episode)
        env.watch(self.learner.policy)
        packed = Packed(self.learner)
        sums = self.diagnostics.room_for(packed.tags, env.device)
        world, scene = env.pack(episodes), self._scene(packed, sums)

        def piece(start: int, stop: int) -> None:
            stage, state = packed.room(env.constraints)
            packed.face.play(
                start, stop, episodes, geometry, world, scene, packed.settings, packed.hyperparameters, learnt, packed.buffers,
                stage, state,
            )  # fmt: skip

        over_batch(piece, env.runs, len(geometry.successor) * episodes)
        check_failures(scene.failed)
        packed.unpack(episodes)
        env.unpack(world, episodes)
        comparators = self.tracker._comparators
        if comparators.changing:  # once more, for the padding, at which kernels do not look
            comparators.worst_cost = torch.maximum(comparators.worst_cost, env.costs.largest(env.cost_values))
        self.tracker.updates += episodes
        self.diagnostics.take(sums, episodes)

    def _scene(self, packed: Packed, sums: dict[str, Tensor]) -> Any:
        from torchcmdp.kernels.block import Scene

        env, comparators = self.env, self.tracker._comparators
        changing = comparators.changing
        return Scene(
            comparator=compact(self.geometry, comparators.safe, 3),
            sums=self.tracker._sums.numpy(),
            changing=int(changing),
            reward_sum=comparators.reward_sum.flatten(1).numpy() if changing else np.zeros((1, 1)),
            cost_sum=comparators.cost_sum.flatten(2).numpy() if changing else np.zeros((1, 1, 1)),
            worst_cost=comparators.worst_cost.flatten(2).numpy() if changing else np.zeros((1, 1, 1)),
            last=packed.last,
            failed=np.zeros(env.runs, np.int64),
            **{name: tensor.numpy() for name, tensor in sums.items()},
        )
