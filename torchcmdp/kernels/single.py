"""One step of all runs a call, for runs in which somebody else's learner, environment or tracker takes part."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from torchcmdp.kernels.block import BAD_POLICY, BAD_PROBLEM, BAD_STEP, enter, leave, measure, move_on, roll_out
from torchcmdp.kernels.options import entry_for, exact_entry, kernel
from torchcmdp.kernels.padding import LOAD, STORE, move, move_each
from torchcmdp.kernels.rollout import is_policy, sums_to_one
from torchcmdp.status import INVALID

learner: Any = None  # as in `block`


class Walk(NamedTuple):
    """A trajectory: states, actions, next states and rewards `(runs x L)` each, and costs `(runs x L x m)`."""

    states: np.ndarray
    actions: np.ndarray
    next_states: np.ndarray
    rewards: np.ndarray
    costs: np.ndarray


@kernel
def read_steps(geometry, run, walk, steps):
    """steps <- a run's row of a trajectory; says whether all its states, actions and successors exist."""
    first = geometry.first
    for k in range(steps.pairs.shape[0]):
        x, a, y = walk.states[run, k], walk.actions[run, k], walk.next_states[run, k]
        following = first[k + 2] - first[k + 1] if k + 2 < first.shape[0] else 1
        if x < 0 or x >= first[k + 1] - first[k] or a < 0 or a >= geometry.actions or y < 0 or y >= following:
            return False
        p = (first[k] + x) * geometry.actions + a
        steps.pairs[k] = p
        e = geometry.row[p]
        while e < geometry.row[p + 1] and geometry.successor[e] != first[k + 1] + y:
            e += 1
        if e == geometry.row[p + 1]:
            return False
        steps.entries[k] = e
        steps.rewards[k] = walk.rewards[run, k]
        for i in range(steps.costs.shape[1]):
            steps.costs[k, i] = walk.costs[run, k, i]
    return True


@exact_entry
def rollout_range(start, stop, geometry, world, policy, walk, failed, stage):
    """walk <- an episode of runs start .. stop-1 with the policies `(runs x L S A)`."""
    for run in range(start, stop):
        move(geometry.pair_at, policy, run, stage.policy, LOAD)
        if not (is_policy(stage.policy) and sums_to_one(geometry, stage.policy)):
            failed[run] = BAD_POLICY
            continue
        enter(geometry, world, run, stage)
        roll_out(geometry, world, run, 0, stage)
        for k in range(walk.states.shape[1]):
            p = stage.steps.pairs[k]
            walk.states[run, k] = p // geometry.actions - geometry.first[k]
            walk.actions[run, k] = p % geometry.actions
            walk.next_states[run, k] = geometry.successor[stage.steps.entries[k]] - geometry.first[k + 1]
            walk.rewards[run, k] = stage.steps.rewards[k]
            for i in range(walk.costs.shape[2]):
                walk.costs[run, k, i] = stage.steps.costs[k, i]
        move_on(geometry, world, run, 0, True, stage)
        leave(geometry, world, run, stage)


@exact_entry
def track_range(start, stop, geometry, transitions, comparator, policy, reward_values, cost_values, rewards, costs, sums, stage):
    """Add an episode of runs start .. stop-1 to the tracker's sums.

    Args:
        transitions, comparator: `((1 or runs) x E)` and `((1 or runs) x P)`.
        policy: `((1 or runs) x L S A)`.
        reward_values, cost_values: `((1 or runs) x 1 x L S A)` and `((1 or runs) x m x L S A)`.
        rewards, costs: Of the trajectory.
        sums: `(runs x (5 + 3 m))`.
    """
    for run in range(start, stop):
        move(geometry.pair_at, policy, run % policy.shape[0], stage.policy, LOAD)
        move_each(geometry.pair_at, reward_values, run % reward_values.shape[0], stage.reward_values, LOAD)
        move_each(geometry.pair_at, cost_values, run % cost_values.shape[0], stage.cost_values, LOAD)
        for k in range(rewards.shape[1]):
            stage.steps.rewards[k] = rewards[run, k]
            for i in range(costs.shape[2]):
                stage.steps.costs[k, i] = costs[run, k, i]
        measure(geometry, run, transitions, comparator, sums, stage)


def _update(start, stop, geometry, settings, hyper, learnt, walk, buffers, last, failed, stage, state):
    """One update of runs start .. stop-1 of a learner; `learnt` episodes came before."""
    for run in range(start, stop):
        if not read_steps(geometry, run, walk, stage.steps):
            failed[run] = BAD_STEP
            continue
        learner.carry(geometry, settings, run, buffers, state, LOAD)
        for p in range(state.visits.shape[0]):
            learner.follow(geometry, settings, hyper, run, p, state)
        learner.plan(geometry, state, stage.policy)
        status = learner.update(geometry, settings, hyper, run, learnt + 1, stage.policy, stage.steps, buffers, state, last)
        if status == INVALID:
            failed[run] = BAD_PROBLEM
        learner.carry(geometry, settings, run, buffers, state, STORE)


@cache
def update_of(kernels: ModuleType) -> Any:
    """`_update` with the learner of these kernels."""
    return entry_for(_update, learner=kernels)
