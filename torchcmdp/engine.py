"""Blocks of episodes in compiled code, where learner, simulator, processes and tracker are all ours."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from torchcmdp.kernels import block, wcops
from torchcmdp.kernels.cpu import over_batch
from torchcmdp.kernels.geometry import geometry_of
from torchcmdp.learners.compiled import copies, flat, hyperparameters, wcops_settings
from torchcmdp.processes.compiled import pack, unpack
from torchcmdp.simulator import _thresholds

_local = threading.local()


def _room(key: Any, make: Any) -> Any:
    """A workspace of the calling thread, made once."""
    rooms = _local.__dict__.setdefault("rooms", {})
    if key not in rooms:
        rooms.clear()
        rooms[key] = make()
    return rooms[key]


class Engine:
    def __init__(self, learner: Any, env: Any, tracker: Any, tally: Any) -> None:
        self.learner, self.env, self.tracker, self.tally = learner, env, tracker, tally
        self.geometry = geometry_of(env.layout)
        E, P = self.geometry.entry_at, self.geometry.pair_at
        self._entries = lambda t: np.ascontiguousarray(t.reshape(-1, int(np.prod(env.layout.transition_shape))).numpy()[:, E])
        self._pairs = lambda t: np.ascontiguousarray(t.reshape(-1, int(np.prod(env.layout.pair_shape))).numpy()[:, P])
        self.transitions, self.thresholds = self._entries(env.cmdp.transitions), self._entries(_thresholds(env.cmdp.transitions))
        self.settings = wcops_settings(learner)
        if not tally.tags:
            tally._make_room(list(wcops.TAGS), env.device)

    def play(self, episodes: int) -> None:
        learner, env, tracker, tally = self.learner, self.env, self.tracker, self.tally
        runs, m = env.runs, env.constraints
        rewards, costs = pack(env.rewards, runs, 3), pack(env.costs, runs, 4)
        names = wcops.Buffers._fields
        tensors = copies(learner, names)
        buffers = flat(tensors, wcops.Buffers, runs)
        hyper = hyperparameters(learner, wcops.Hyperparameters)
        comp = tracker._comparators
        sums = tracker._sums.numpy()
        changing = comp.changing
        empty2, empty3 = np.zeros((1, 1)), np.zeros((1, 1, 1))
        window, total, positive = (x.clone() for x in (tally._window, tally._total, tally._positive))
        last = np.zeros((len(wcops.TAGS), runs))
        scene = block.Scene(
            env.seed, env.first_run, env.distinct_runs or 0, env.episode, self.transitions, self.thresholds, rewards, costs,
            self._pairs(comp.safe), sums, int(changing),
            comp._reward_sum.flatten(1).numpy() if changing else empty2,
            comp._cost_sum.flatten(2).numpy() if changing else empty3,
            comp._worst_cost.flatten(2).numpy() if changing else empty3,
            last, window.numpy(), total.numpy(), positive.numpy(), np.zeros(runs, np.int8),
        )
        g, settings, learnt = self.geometry, self.settings, int(learner.episode)
        key = (env.layout, m, learner.constraints, settings.kind)

        def piece(start: int, stop: int) -> None:
            stage, state = _room(key, lambda: (block.empty_stage(g, m), wcops.empty_state(g, learner.constraints, settings.kind)))
            block.play_wcops(start, stop, episodes, g, scene, settings, hyper, learnt, buffers, stage, state)

        over_batch(piece, runs, len(g.successor) * episodes)
        for name, tensor in tensors.items():
            setattr(learner, name, tensor)
        learner.episode = learner.episode + episodes
        learner._forget()
        env.reward_values, env.cost_values = unpack(env.rewards, rewards, episodes, 3), unpack(env.costs, costs, episodes, 4)
        if changing:
            comp._worst_cost = torch.maximum(comp._worst_cost, env.costs.largest(env.cost_values))
        env.episode += episodes
        tracker.updates += episodes
        tally._window, tally._total, tally._positive = window, total, positive
        tally.window_episodes += episodes
        self.failed = scene.failed
