"""Blocks of episodes in one compiled call, where learner, simulator, processes and tracker are all ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.comparators import Comparators
from torchcmdp.kernels.engine import wants_gpu
from torchcmdp.kernels.memory import array, compact, zeros
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
    if why := learner_obstacle(learner, wants_gpu(learner.device)):
        return why
    if not (isinstance(env, Simulator) and vars(type(env)).get("plays_in_blocks", type(env) is Simulator)):
        return f"{type(env).__name__} is not the simulator of this library"
    if not (env.is_packable and env.device == learner.device):
        return "a process is not of this library, has come to its end, or is not in torch.float64 where the learner is"
    originals = is_original(env, "rollout") and is_original(tracker, "update") and is_original(learner, "policy", "update")
    if not (originals and type(tracker) is Tracker and type(tracker.comparators) is Comparators):
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
        env = self.env
        env.watch(self.learner.policy)
        packed, sums, records = self.pack(episodes)
        world, scene = records[:2]
        if wants_gpu(env.device):
            from torchcmdp.kernels import cuda

            cuda.launch(packed.face.play, env.runs, env.device, *self.gpu_arguments(packed, episodes, records))
        else:
            self._play_here(packed, episodes, records)
        check_failures(scene.failed)
        packed.unpack(episodes)
        env.unpack(world, episodes)
        comparators = self.tracker.comparators
        if comparators.changing:  # once more, for the padding, at which kernels do not look
            comparators.worst_cost = torch.maximum(comparators.worst_cost, env.costs.largest(env.cost_values))
        self.tracker.updates += episodes
        self.diagnostics.take(sums, episodes)

    def pack(self, episodes: int) -> tuple[Packed, dict[str, Tensor], tuple[Any, ...]]:
        """For so many episodes: the learner, the sums of its diagnostics, and the records of all runs that kernels take."""
        packed = Packed(self.learner)
        sums = self.diagnostics.room_for(packed.tags, self.env.device)
        own = packed.settings, packed.hyperparameters, int(self.learner.episode), packed.buffers
        return packed, sums, (self.env.pack(episodes), self._scene(packed, sums), *own)

    def _play_here(self, packed: Packed, episodes: int, records: tuple[Any, ...]) -> None:
        """On the CPU: pieces of the batch on threads, each of which has room for one run."""
        from torchcmdp.kernels.threads import over_batch

        def piece(start: int, stop: int) -> None:
            packed.face.play(start, stop, episodes, self.geometry, *records, *packed.room(self.env.constraints))

        over_batch(piece, self.env.runs, len(self.geometry.successor) * episodes)

    def gpu_arguments(self, packed: Packed, episodes: int, records: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `cuda.launch` gives to the kernel that plays: a thread a run, each with its own part of the rooms."""
        from torchcmdp.kernels import cuda

        device, runs = self.env.device, self.env.runs
        rooms = (cuda.rooms(record, runs, device) for record in packed.room(self.env.constraints))
        return episodes, cuda.geometry_on(self.env.layout, device), *records, *rooms

    def _scene(self, packed: Packed, sums: dict[str, Tensor]) -> Any:
        from torchcmdp.kernels.block import Scene

        env, comparators = self.env, self.tracker.comparators
        changing = comparators.changing
        return Scene(
            comparator=compact(self.geometry, comparators.safe, 3),
            sums=array(self.tracker.sums),
            changing=int(changing),
            reward_sum=array(comparators.reward_sum.flatten(1)) if changing else zeros(env.device, 1, 1),
            cost_sum=array(comparators.cost_sum.flatten(2)) if changing else zeros(env.device, 1, 1, 1),
            worst_cost=array(comparators.worst_cost.flatten(2)) if changing else zeros(env.device, 1, 1, 1),
            last=packed.last,
            failed=zeros(env.device, env.runs, dtype=np.int64),
            **{name: array(tensor) for name, tensor in sums.items()},
        )
