"""One step of all runs a call, for runs in which somebody else's learner, environment or tracker takes part."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchcmdp.kernels import opt_cmdp, opt_primal_dual, pdbps, wcops
from torchcmdp.kernels.block import BAD_POLICY, BAD_PROBLEM, BAD_STEP, enter, leave, measure, move_on, roll_out
from torchcmdp.kernels.occupancy import policy_of_log, policy_of_logits
from torchcmdp.kernels.options import entry, kernel
from torchcmdp.kernels.projection import INVALID
from torchcmdp.kernels.rollout import is_policy, sums_to_one


class Walk(NamedTuple):
    """A trajectory: states, actions, next states and rewards `(runs x L)` each, and costs `(runs x L x m)`."""

    states: np.ndarray
    actions: np.ndarray
    next_states: np.ndarray
    rewards: np.ndarray
    costs: np.ndarray


@kernel
def gather(geometry, run, padded, compact):
    """compact <- the pairs of a run's row of a padded tensor, `(runs x L S A)`."""
    for p in range(compact.shape[0]):
        compact[p] = padded[run, geometry.pair_at[p]]


@kernel
def load(geometry, run, padded, values):
    """values <- a run's `(m x P)` of a padded tensor of all runs, or of one for all."""
    row = run if padded.shape[0] > 1 else 0
    for i in range(values.shape[0]):
        for p in range(values.shape[1]):
            values[i, p] = padded[row, i, geometry.pair_at[p]]


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


@entry
def rollout_range(start, stop, geometry, world, policy, walk, failed, stage):
    """walk <- an episode of runs start .. stop-1 with the policies `(runs x L S A)`."""
    for run in range(start, stop):
        gather(geometry, run, policy, stage.policy)
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


@entry
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
        gather(geometry, run if policy.shape[0] > 1 else 0, policy, stage.policy)
        load(geometry, run, reward_values, stage.reward_values)
        load(geometry, run, cost_values, stage.cost_values)
        for k in range(rewards.shape[1]):
            stage.steps.rewards[k] = rewards[run, k]
            for i in range(costs.shape[2]):
                stage.steps.costs[k, i] = costs[run, k, i]
        measure(geometry, run, transitions, comparator, sums, stage)


@entry
def update_wcops(start, stop, geometry, settings, hyper, learnt, walk, buffers, last, failed, stage, state):
    """One update of runs start .. stop-1 of WC-OPS or UOB-REPS; `learnt` episodes came before."""
    for run in range(start, stop):
        if not read_steps(geometry, run, walk, stage.steps):
            failed[run] = BAD_STEP
            continue
        wcops.load(geometry, settings, hyper, run, buffers, state)
        policy_of_log(geometry, state.log_occupancy, stage.policy)
        status = wcops.update(geometry, settings, hyper, run, learnt + 1, stage.policy, stage.steps, buffers, state, last)
        if status == INVALID:
            failed[run] = BAD_PROBLEM
        wcops.store(geometry, settings, run, buffers, state)


@entry
def update_opt_primal_dual(start, stop, geometry, settings, hyper, learnt, walk, buffers, last, failed, stage, state):
    """One update of runs start .. stop-1 of OptPrimalDual."""
    for run in range(start, stop):
        if not read_steps(geometry, run, walk, stage.steps):
            failed[run] = BAD_STEP
            continue
        opt_primal_dual.load(geometry, settings, hyper, run, buffers, state)
        policy_of_logits(geometry, state.logits, stage.policy)
        opt_primal_dual.update(geometry, settings, hyper, run, stage.policy, stage.steps, buffers, state, last)
        opt_primal_dual.store(geometry, run, buffers, state)


@entry
def update_pdbps(start, stop, geometry, settings, hyper, learnt, walk, buffers, last, failed, stage, state):
    """One update of runs start .. stop-1 of PDB-PS."""
    for run in range(start, stop):
        if not read_steps(geometry, run, walk, stage.steps):
            failed[run] = BAD_STEP
            continue
        pdbps.load(geometry, settings, hyper, run, buffers, state)
        policy_of_logits(geometry, state.logits, stage.policy)
        pdbps.update(geometry, settings, hyper, run, stage.policy, stage.steps, buffers, state, last)
        pdbps.store(geometry, run, buffers, state)


@entry
def update_opt_cmdp(start, stop, geometry, settings, hyper, learnt, walk, buffers, last, failed, stage, state):
    """One update of runs start .. stop-1 of OptCMDP or Greedy."""
    for run in range(start, stop):
        if not read_steps(geometry, run, walk, stage.steps):
            failed[run] = BAD_STEP
            continue
        opt_cmdp.load(geometry, settings, hyper, run, buffers, state)
        if opt_cmdp.update(geometry, settings, hyper, run, stage.steps, state, last) == INVALID:
            failed[run] = BAD_PROBLEM
        opt_cmdp.store(geometry, run, buffers, state)
