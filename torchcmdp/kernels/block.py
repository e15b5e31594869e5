"""Blocks of whole episodes: play, measure, learn, one run after the other, as `torchcmdp.run` does an episode at a time."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.metrics import tally, track, track_values
from torchcmdp.kernels.occupancy import pair_occupancy_of
from torchcmdp.kernels.options import entry_for, formula, kernel
from torchcmdp.kernels.padding import LOAD, STORE, move_each
from torchcmdp.kernels.processes import OGD, Process, advance, load_values
from torchcmdp.kernels.rollout import Steps, is_policy, rollout, steps
from torchcmdp.status import INVALID

learner: Any = None  # in the entries of this module and of `single`: the kernels of the learner that each is made for

# why a run cannot go on, and what to say about it
BAD_POLICY, BAD_STEP, BAD_PROBLEM = 1, 2, 3
ADVICE = {
    BAD_POLICY: "its policy has an entry that is no probability; expected finite numbers that are not negative.",
    BAD_STEP: "its trajectory has a state, an action or a successor that the layout does not have.",
    BAD_PROBLEM: "its safe set or its target has numbers that are not valid, such as NaN; expected finite rewards and costs.",
}


class World(NamedTuple):
    """A simulator, of all runs.

    Attributes:
        seed, first_run, distinct: Which random numbers are used; `distinct` is 0 where every run has its own.
        episode: How many episodes it has played.
        transitions, thresholds: Of the true CMDP, `((1 or runs) x E)`.
        rewards, costs: The processes.
    """

    seed: int
    first_run: int
    distinct: int
    episode: int
    transitions: np.ndarray
    thresholds: np.ndarray
    rewards: Process
    costs: Process


class Scene(NamedTuple):
    """Tracker and diagnostics of all runs.

    Attributes:
        comparator: `((1 or runs) x P)`.
        sums: Of the tracker, `(runs x (5 + 3 m))`, written to.
        changing: Whether the comparators need the values of every episode, 0 or 1.
        reward_sum, cost_sum, worst_cost: Of the comparators, `(runs x [m x] L S A)`, written to; empty where they do not.
        last, window, total, positive: The diagnostics of the last episode and their sums, `(tags x runs)`, written to.
        failed: Why a run's block ended early, `(runs,)` int64, written to.
    """

    comparator: np.ndarray
    sums: np.ndarray
    changing: int
    reward_sum: np.ndarray
    cost_sum: np.ndarray
    worst_cost: np.ndarray
    last: np.ndarray
    window: np.ndarray
    total: np.ndarray
    positive: np.ndarray
    failed: np.ndarray


class Stage(NamedTuple):
    """What one run needs while it plays: its policy and its occupancy `(P,)`, masses `(n + 1,)`, values `(1 or m x P)`, steps."""

    policy: np.ndarray
    occupancy: np.ndarray
    mass: np.ndarray
    reward_values: np.ndarray
    cost_values: np.ndarray
    steps: Steps


def empty_stage(geometry: Geometry, constraints: int) -> Stage:
    """Room for one run of an environment."""
    pairs = len(geometry.pair_at)
    return Stage(
        np.zeros(pairs),
        np.zeros(pairs),
        np.zeros(len(geometry.state_at) + 1),
        np.zeros((1, pairs)),
        np.zeros((constraints, pairs)),
        steps(len(geometry.first) - 1, constraints),
    )


@formula
def enter(geometry, world, run, stage):
    """Find the values that a run's next episode has."""
    load_values(geometry, world.rewards, run, world.rewards.episode, stage.reward_values)
    load_values(geometry, world.costs, run, world.costs.episode, stage.cost_values)


@formula
def leave(geometry, world, run, stage):
    """Keep the values that an adversary has come to."""
    if world.rewards.kind == OGD:
        move_each(geometry.pair_at, world.rewards.values, run, stage.reward_values, STORE)
    if world.costs.kind == OGD:
        move_each(geometry.pair_at, world.costs.values, run, stage.cost_values, STORE)


@kernel
def roll_out(geometry, world, run, t, stage):
    """The t-th episode from where the world stands, with the stage's policy."""
    number = world.first_run + run
    if world.distinct > 0:
        number %= world.distinct
    rollout(
        geometry, stage.policy, world.thresholds[run if world.thresholds.shape[0] > 1 else 0], world.seed, number,
        world.episode + t, world.rewards, world.costs, stage.reward_values, stage.cost_values, stage.steps,
    )  # fmt: skip


@kernel
def measure(geometry, run, transitions, comparator, sums, stage):
    """Add the stage's episode to the tracker's sums."""
    own = transitions[run if transitions.shape[0] > 1 else 0]
    pair_occupancy_of(geometry, stage.policy, own, stage.mass, stage.occupancy)
    best = comparator[run if comparator.shape[0] > 1 else 0]
    track(run, stage.occupancy, best, stage.reward_values, stage.cost_values, stage.steps, sums)


@kernel
def move_on(geometry, world, run, t, final, stage):
    """Move the processes on from the t-th episode, of which a recorder keeps the values; so does an adversary of the final one."""
    if t < world.rewards.kept.shape[0]:
        move_each(geometry.pair_at, world.rewards.kept[t], run, stage.reward_values, STORE)
    if t < world.costs.kept.shape[0]:
        move_each(geometry.pair_at, world.costs.kept[t], run, stage.cost_values, STORE)
    if final and world.rewards.kind == OGD:
        move_each(geometry.pair_at, world.rewards.played, run, stage.reward_values, STORE)
    if final and world.costs.kind == OGD:
        move_each(geometry.pair_at, world.costs.played, run, stage.cost_values, STORE)
    advance(geometry, world.rewards, run, world.rewards.episode + t, stage.policy, stage.reward_values)
    advance(geometry, world.costs, run, world.costs.episode + t, stage.policy, stage.cost_values)


@kernel
def perform(geometry, world, scene, run, t, stage):
    """The t-th episode of the block: roll out the stage's policy, and measure it."""
    roll_out(geometry, world, run, t, stage)
    measure(geometry, run, world.transitions, scene.comparator, scene.sums, stage)
    if scene.changing == 1:
        track_values(
            geometry, run, world.costs, stage.reward_values, stage.cost_values, scene.reward_sum, scene.cost_sum, scene.worst_cost
        )


@formula
def finish(geometry, world, scene, run, t, episodes, stage):
    """Add the t-th episode's diagnostics to their sums, and move on."""
    tally(run, scene.last, scene.window, scene.total, scene.positive)
    move_on(geometry, world, run, t, t == episodes - 1, stage)


def _play(start, stop, episodes, geometry, world, scene, settings, hyper, learnt, buffers, stage, state):
    """`episodes` episodes of runs start .. stop-1 with a learner.

    Args:
        learnt: How many episodes the learner has seen.
        buffers: Of the learner, of all runs, written to.
        stage, state: Room for one run.
    """
    for run in range(start, stop):
        learner.carry(geometry, settings, run, buffers, state, LOAD)
        for p in range(state.visits.shape[0]):
            learner.follow(geometry, settings, hyper, run, p, state)
        enter(geometry, world, run, stage)
        for t in range(episodes):
            learner.plan(geometry, state, stage.policy)
            if not is_policy(stage.policy):
                scene.failed[run] = BAD_POLICY
                break
            perform(geometry, world, scene, run, t, stage)
            status = learner.update(
                geometry, settings, hyper, run, learnt + t + 1, stage.policy, stage.steps, buffers, state, scene.last
            )
            if status == INVALID:
                scene.failed[run] = BAD_PROBLEM
                break
            finish(geometry, world, scene, run, t, episodes, stage)
        leave(geometry, world, run, stage)
        learner.carry(geometry, settings, run, buffers, state, STORE)


@cache
def play_of(kernels: ModuleType) -> Any:
    """`_play` with the learner of these kernels."""
    return entry_for(_play, learner=kernels)
