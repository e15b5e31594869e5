"""One update of OptCMDP, and of Greedy, in one run: `torchcmdp.learners.opt_cmdp` compiled.

An episode changes the averages and the widths of its visited pairs only; the program is solved anew.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.confidence import KernelSet, confidence_row, empirical_row, kernel_set, line_up
from torchcmdp.kernels.empirical import count, move_sums
from torchcmdp.kernels.estimation import bonus, optimistic_cost
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.metrics import solver_tags, tell_solver
from torchcmdp.kernels.occupancy import policy_of
from torchcmdp.kernels.options import kernel
from torchcmdp.kernels.padding import move
from torchcmdp.kernels.program import Work, optimise_one, workspace
from torchcmdp.status import INFEASIBLE

TAGS = (*solver_tags("infeasible"), "Learner/planned_value", "Learner/max_multiplier")


class Settings(NamedTuple):
    """What is the same in every run and episode.

    Attributes:
        kind: Of the confidence set, around which the program has a box.
        greedy: Whether the averages are taken as exact, 0 or 1.
        iota: The logarithm in the transitions' radii.
        logarithm: That in the radii of rewards and costs.
        max_iterations: Of the program.
        cost_low: The smallest that each mean cost can be, in padded memory, `(1 or runs x m x pairs)`.
        reward_high: The largest that each mean reward can be, `(1 or runs x pairs)`.
    """

    kind: int
    greedy: int
    iota: float
    logarithm: float
    max_iterations: int
    cost_low: np.ndarray
    reward_high: np.ndarray


class Hyperparameters(NamedTuple):
    """One value a run, `(runs,)` each."""

    bonus_scale: np.ndarray
    radius_scale: np.ndarray


class Buffers(NamedTuple):
    """The learner's state, of all runs, in the padded memory of its tensors with the axes after the runs (and m) flattened."""

    plan: np.ndarray
    visits: np.ndarray
    transition_visits: np.ndarray
    reward_sum: np.ndarray
    cost_sum: np.ndarray


class State(NamedTuple):
    """The state of one run without padding, the program that follows from it, its answer, and room to find that."""

    plan: np.ndarray
    visits: np.ndarray
    transition_visits: np.ndarray
    reward_sum: np.ndarray
    cost_sum: np.ndarray
    rewards: np.ndarray
    costs: np.ndarray
    kernels: KernelSet
    occupancy: np.ndarray
    multipliers: np.ndarray
    work: Work


def empty_state(geometry: Geometry, constraints: int, kind: int) -> State:
    """Room for the state of one run."""
    pairs, entries, m = len(geometry.pair_at), len(geometry.successor), constraints
    sizes = (pairs, pairs, entries, pairs, (m, pairs), pairs, (m, pairs))
    arrays = [np.zeros(size) for size in sizes]
    return State(*arrays, kernel_set(kind, geometry), np.zeros(entries), np.zeros(m), workspace(geometry, m))


@kernel
def carry(geometry, settings, run, buffers, state, back):
    """A run's state from the buffers, or `back` into them."""
    move_sums(geometry, run, buffers, state, back)
    move(geometry.pair_at, buffers.plan, run, state.plan, back)


@kernel
def plan(geometry, state, policy):
    """policy <- what the last program found."""
    for p in range(policy.shape[0]):
        policy[p] = state.plan[p]


@kernel
def follow(geometry, settings, hyper, run, p, state):
    """What the program has at pair p: optimistic rewards, costs and kernels, or the averages where the learner is greedy."""
    visits, kernels = state.visits[p], state.kernels
    samples = max(visits, 1.0)
    state.rewards[p] = state.reward_sum[p] / samples
    for i in range(state.costs.shape[0]):
        state.costs[i, p] = state.cost_sum[i, p] / samples
    if settings.greedy == 1:
        empirical_row(geometry, p, state.visits, state.transition_visits, kernels.center)
        for e in range(geometry.row[p], geometry.row[p + 1]):
            kernels.lower[e] = kernels.center[e]
            kernels.upper[e] = kernels.center[e]
        line_up(geometry, p, kernels)
        return
    confidence_row(geometry, p, state.visits, state.transition_visits, settings.iota, hyper.radius_scale[run], kernels)
    cost_width = bonus(visits, settings.logarithm, hyper.bonus_scale[run])
    place, lowest = geometry.pair_at[p], settings.cost_low[run % settings.cost_low.shape[0]]
    highest = settings.reward_high[run % settings.reward_high.shape[0], place]
    state.rewards[p] = min(state.rewards[p] + 0.5 * cost_width, highest) if visits > 0.0 else highest
    for i in range(state.costs.shape[0]):
        state.costs[i, p] = optimistic_cost(state.costs[i, p], cost_width, visits, lowest[i, place])


@kernel
def update(geometry, settings, hyper, run, episode, policy, steps, buffers, state, last):
    """Count the episode and plan the next one; arguments and result as in `wcops.update`."""
    count(steps, state)
    for k in range(steps.pairs.shape[0]):
        follow(geometry, settings, hyper, run, steps.pairs[k], state)
    status, iterations, value, _, residual = optimise_one(
        geometry, state.rewards, state.kernels, state.costs, settings.max_iterations, state.work, state.occupancy, state.multipliers
    )
    policy_of(geometry, state.occupancy, state.plan)
    highest = 0.0
    for i in range(state.multipliers.shape[0]):
        highest = max(highest, state.multipliers[i])
    tell_solver(run, iterations, residual, status, INFEASIBLE, last)
    last[5, run] = value
    last[6, run] = highest
    return status
