"""One update of OptCMDP, and of Greedy, in one run: `torchcmdp.learners.opt_cmdp` compiled.

An episode changes the averages and the widths of its visited pairs only; the program is solved anew.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchcmdp.kernels import costs as beliefs
from torchcmdp.kernels.confidence import ENTRYWISE, EXACT, KernelSet, confidence_row, empirical_row, kernel_set, line_up
from torchcmdp.kernels.costs import DRIFT_TAG, MARGIN_TAG, move_beliefs, revise, ring, spare, surprises
from torchcmdp.kernels.empirical import count, move_sums
from torchcmdp.kernels.estimation import bonus, optimistic_cost, prior_cost
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.metrics import solver_tags, tell_solver
from torchcmdp.kernels.occupancy import policy_of
from torchcmdp.kernels.options import formula, kernel
from torchcmdp.kernels.padding import move
from torchcmdp.kernels.program import Work, is_sound, mix_pairs, optimise_one, workspace
from torchcmdp.status import INFEASIBLE, INVALID

TAGS = (*solver_tags("infeasible"), "Learner/planned_value", "Learner/max_multiplier")
BELIEF_TAGS = ("Learner/gamma_active", "Learner/max_beta")


class Settings(NamedTuple):
    """What is the same in every run and episode.

    Attributes:
        kind: Of the confidence set, around which the program has a box.
        greedy: Whether the averages are taken as exact, 0 or 1.
        hopeful: Whether rewards have a prior in place of a radius, 0 or 1.
        prior, margin, drift: Whether costs have a model, which has a prior, a margin in it, and a test for drift, 0 or 1 each.
        slack, height, memory: Of the drift test, in units of costs and of samples.
        iota: The logarithm in the transitions' radii.
        logarithm: That in the radii of rewards and costs.
        max_iterations: Of the program.
        cost_low: The smallest that each mean cost can be, in padded memory, `(1 or runs x m x pairs)`.
        reward_high: The largest that each mean reward can be, `(1 or runs x pairs)`.
    """

    kind: int
    greedy: int
    hopeful: int
    prior: int
    margin: int
    drift: int
    slack: float
    height: float
    memory: float
    iota: float
    logarithm: float
    max_iterations: int
    cost_low: np.ndarray
    reward_high: np.ndarray


class Hyperparameters(NamedTuple):
    """One value a run, `(runs,)` each."""

    bonus_scale: np.ndarray
    radius_scale: np.ndarray
    margin: np.ndarray


class Buffers(NamedTuple):
    """The learner's state, of all runs, in the padded memory of its tensors with the axes after the runs (and m) flattened."""

    plan: np.ndarray
    visits: np.ndarray
    transition_visits: np.ndarray
    reward_sum: np.ndarray
    cost_sum: np.ndarray
    planned: np.ndarray
    cost_estimate: np.ndarray
    samples: np.ndarray
    surprises: np.ndarray
    low_end: np.ndarray


# The axes of buffers that not every learner has.
AXES = {**beliefs.AXES, "planned": 2}


def tags(settings: Settings) -> tuple[str, ...]:
    """What is reported of learners with these settings."""
    return (*TAGS, *BELIEF_TAGS * settings.prior, *(MARGIN_TAG,) * settings.margin, *(DRIFT_TAG,) * settings.drift)


class State(NamedTuple):
    """The state of one run without padding, the program that follows from it, its answer, and room to find that.

    `faults` has one at the pairs where the program has bad numbers, which only visits can bring.
    """

    plan: np.ndarray
    visits: np.ndarray
    transition_visits: np.ndarray
    reward_sum: np.ndarray
    cost_sum: np.ndarray
    rewards: np.ndarray
    costs: np.ndarray
    planned: np.ndarray
    samples: np.ndarray
    faults: np.ndarray
    cost_estimate: np.ndarray
    low_end: np.ndarray
    margined: np.ndarray
    surprise: np.ndarray
    kernels: KernelSet
    multipliers: np.ndarray
    work: Work


def empty_state(geometry: Geometry, constraints: int, kind: int) -> State:
    """Room for the state of one run."""
    pairs, entries, m = len(geometry.pair_at), len(geometry.successor), constraints
    sizes = (pairs, pairs, entries, pairs, (m, pairs), pairs, (m, pairs), pairs, pairs, pairs, *((m, pairs),) * 3, m)
    arrays = [np.zeros(size) for size in sizes]
    return State(*arrays, kernel_set(kind, geometry), np.zeros(m), workspace(geometry, m))


@kernel
def carry(geometry, settings, run, buffers, state, back):
    """A run's state from the buffers, or `back` into them."""
    move_sums(geometry, run, buffers, state, back)
    move(geometry.pair_at, buffers.plan, run, state.plan, back)
    if settings.prior == 1:
        move(geometry.pair_at, buffers.planned, run, state.planned, back)
        move_beliefs(geometry, settings, run, buffers, state, back)


@kernel
def plan(geometry, state, policy):
    """policy <- what the last program found."""
    for p in range(policy.shape[0]):
        policy[p] = state.plan[p]


@formula
def believe(geometry, settings, hyper, run, p, state):
    """What the program has for rewards and costs at pair p: optimistic ones, or the averages where the learner is greedy."""
    visits, place = state.visits[p], geometry.pair_at[p]
    samples, width = max(visits, 1.0), bonus(visits, settings.logarithm, hyper.bonus_scale[run])
    lowest = settings.cost_low[run % settings.cost_low.shape[0]]
    highest = settings.reward_high[run % settings.reward_high.shape[0], place]
    reward = state.reward_sum[p] / samples
    if settings.hopeful == 1:
        reward = prior_cost(reward, visits, highest)
    elif settings.greedy == 0:
        reward = min(reward + 0.5 * width, highest) if visits > 0.0 else highest
    state.rewards[p] = reward
    for i in range(state.costs.shape[0]):
        cost = state.cost_sum[i, p] / samples
        if settings.prior == 1:
            cost = prior_cost(state.cost_estimate[i, p], state.samples[p], state.low_end[i, p])
        elif settings.greedy == 0:
            cost = optimistic_cost(cost, width, visits, lowest[i, place])
        state.costs[i, p] = cost


@kernel
def follow(geometry, settings, hyper, run, p, state):
    """What the program has at pair p: rewards, costs, and kernels, or their averages where the learner is greedy."""
    believe(geometry, settings, hyper, run, p, state)
    kernels = state.kernels
    if settings.greedy == 0:
        confidence_row(geometry, p, state.visits, state.transition_visits, settings.iota, hyper.radius_scale[run], kernels)
    else:
        empirical_row(geometry, p, state.visits, state.transition_visits, kernels.center)
        for e in range(geometry.row[p], geometry.row[p + 1]):
            kernels.lower[e] = kernels.center[e]
            kernels.upper[e] = kernels.center[e]
        line_up(geometry, p, kernels)
    state.faults[p] = 0.0 if is_sound(geometry, p, state.rewards, kernels.lower, kernels.upper, state.costs) else 1.0


@formula
def revise_all(steps, state):
    """The samples and the estimates with the episode counted; returns the largest beta."""
    largest = 0.0
    for k in range(steps.pairs.shape[0]):
        state.samples[steps.pairs[k]] += 1.0
    for i in range(state.cost_estimate.shape[0]):
        largest = max(largest, revise(0.0, i, steps, state))
    return largest


@formula
def boxes(kernels, greedy):
    """The boxes of a set alone, which around a ball are more than the ball."""
    _, center, lower, upper, radius, left, low, spare, least, most = kernels
    return KernelSet(EXACT if greedy == 1 else ENTRYWISE, center, lower, upper, radius, left, low, spare, least, most)


@formula
def are_sound(state, error):
    """Whether the program has no bad numbers at any pair, nor in the margin."""
    faults = 0.0
    for p in range(state.faults.shape[0]):
        faults += state.faults[p]
    return faults == 0.0 and abs(error) < math.inf


@kernel
def update(geometry, settings, hyper, run, episode, policy, steps, buffers, state, last):
    """Count the episode and plan the next one; arguments and result as in `wcops.update`."""
    largest, error, rung, costs = 0.0, 0.0, 0, state.costs
    if settings.prior == 1:
        surprises(steps, state)
        largest = revise_all(steps, state)
    count(steps, state)
    if settings.drift == 1:
        rung = ring(settings, run, buffers, state)
    if rung > 0:
        for p in range(state.samples.shape[0]):
            follow(geometry, settings, hyper, run, p, state)
    else:
        for k in range(steps.pairs.shape[0]):
            follow(geometry, settings, hyper, run, steps.pairs[k], state)
    if settings.margin == 1:
        error = spare(geometry, hyper.margin[run], state.planned, state)
        costs = state.margined
    status, iterations, value, _, residual = INVALID, 0, 0.0, 0.0, 0.0
    if are_sound(state, error):
        status, iterations, value, _, residual = optimise_one(
            geometry,
            state.rewards,
            boxes(state.kernels, settings.greedy),
            costs,
            settings.max_iterations,
            state.work,
            state.multipliers,
        )
        mix_pairs(state.work, state.planned)
        policy_of(geometry, state.planned, state.plan)
    highest = 0.0
    for i in range(state.multipliers.shape[0]):
        highest = max(highest, state.multipliers[i])
    tell_solver(run, iterations, residual, status, INFEASIBLE, last)
    last[5, run] = value
    last[6, run] = highest
    if settings.prior == 1:
        last[7, run] = 0.0
        last[8, run] = largest
    if settings.margin == 1:
        last[9, run] = error
    if settings.drift == 1:
        last[9 + settings.margin, run] = rung
    return status
