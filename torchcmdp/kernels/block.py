"""Blocks of whole episodes: play, measure, learn, one run after the other, as `torchcmdp.run` does an episode at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchcmdp.kernels import opt_cmdp, opt_primal_dual, pdbps, wcops
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.metrics import tally, track, track_values
from torchcmdp.kernels.occupancy import pair_occupancy_of, policy_of_log, policy_of_logits
from torchcmdp.kernels.options import entry, formula, kernel
from torchcmdp.kernels.processes import OGD, Process, advance, load_values, store
from torchcmdp.kernels.projection import INVALID
from torchcmdp.kernels.rollout import Steps, is_policy, rollout, steps

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
        store(geometry, stage.reward_values, run, world.rewards.values)
    if world.costs.kind == OGD:
        store(geometry, stage.cost_values, run, world.costs.values)


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
        store(geometry, stage.reward_values, run, world.rewards.kept[t])
    if t < world.costs.kept.shape[0]:
        store(geometry, stage.cost_values, run, world.costs.kept[t])
    if final and world.rewards.kind == OGD:
        store(geometry, stage.reward_values, run, world.rewards.played)
    if final and world.costs.kind == OGD:
        store(geometry, stage.cost_values, run, world.costs.played)
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


@entry
def play_wcops(start, stop, episodes, geometry, world, scene, settings, hyper, learnt, buffers, stage, state):
    """`episodes` episodes of runs start .. stop-1 with WC-OPS or UOB-REPS.

    Args:
        learnt: How many episodes the learner has seen.
        buffers: Of the learner, of all runs, written to.
        stage, state: Room for one run.
    """
    for run in range(start, stop):
        wcops.load(geometry, settings, hyper, run, buffers, state)
        enter(geometry, world, run, stage)
        for t in range(episodes):
            policy_of_log(geometry, state.log_occupancy, stage.policy)
            if not is_policy(stage.policy):
                scene.failed[run] = BAD_POLICY
                break
            perform(geometry, world, scene, run, t, stage)
            status = wcops.update(
                geometry, settings, hyper, run, learnt + t + 1, stage.policy, stage.steps, buffers, state, scene.last
            )
            if status == INVALID:
                scene.failed[run] = BAD_PROBLEM
                break
            finish(geometry, world, scene, run, t, episodes, stage)
        leave(geometry, world, run, stage)
        wcops.store(geometry, settings, run, buffers, state)


@entry
def play_opt_primal_dual(start, stop, episodes, geometry, world, scene, settings, hyper, learnt, buffers, stage, state):
    """`episodes` episodes of runs start .. stop-1 with OptPrimalDual; arguments as for `play_wcops`."""
    for run in range(start, stop):
        opt_primal_dual.load(geometry, settings, hyper, run, buffers, state)
        enter(geometry, world, run, stage)
        for t in range(episodes):
            policy_of_logits(geometry, state.logits, stage.policy)
            if not is_policy(stage.policy):
                scene.failed[run] = BAD_POLICY
                break
            perform(geometry, world, scene, run, t, stage)
            opt_primal_dual.update(geometry, settings, hyper, run, stage.policy, stage.steps, buffers, state, scene.last)
            finish(geometry, world, scene, run, t, episodes, stage)
        leave(geometry, world, run, stage)
        opt_primal_dual.store(geometry, run, buffers, state)


@entry
def play_pdbps(start, stop, episodes, geometry, world, scene, settings, hyper, learnt, buffers, stage, state):
    """`episodes` episodes of runs start .. stop-1 with PDB-PS; arguments as for `play_wcops`."""
    for run in range(start, stop):
        pdbps.load(geometry, settings, hyper, run, buffers, state)
        enter(geometry, world, run, stage)
        for t in range(episodes):
            policy_of_logits(geometry, state.logits, stage.policy)
            if not is_policy(stage.policy):
                scene.failed[run] = BAD_POLICY
                break
            perform(geometry, world, scene, run, t, stage)
            pdbps.update(geometry, settings, hyper, run, stage.policy, stage.steps, buffers, state, scene.last)
            finish(geometry, world, scene, run, t, episodes, stage)
        leave(geometry, world, run, stage)
        pdbps.store(geometry, run, buffers, state)


@entry
def play_opt_cmdp(start, stop, episodes, geometry, world, scene, settings, hyper, learnt, buffers, stage, state):
    """`episodes` episodes of runs start .. stop-1 with OptCMDP or Greedy; arguments as for `play_wcops`."""
    for run in range(start, stop):
        opt_cmdp.load(geometry, settings, hyper, run, buffers, state)
        enter(geometry, world, run, stage)
        for t in range(episodes):
            for p in range(state.plan.shape[0]):
                stage.policy[p] = state.plan[p]
            if not is_policy(stage.policy):
                scene.failed[run] = BAD_POLICY
                break
            perform(geometry, world, scene, run, t, stage)
            if opt_cmdp.update(geometry, settings, hyper, run, stage.steps, state, scene.last) == INVALID:
                scene.failed[run] = BAD_PROBLEM
                break
            finish(geometry, world, scene, run, t, episodes, stage)
        leave(geometry, world, run, stage)
        opt_cmdp.store(geometry, run, buffers, state)
