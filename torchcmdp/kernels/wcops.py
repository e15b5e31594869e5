"""One update of WC-OPS, and of UOB-REPS, in one run: `torchcmdp.learners.wcops` compiled.

An episode changes the counts, intervals, bonuses and cost estimates of its visited pairs only, and nothing else is computed again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.confidence import KernelSet, Room, confidence_row, empty_room, kernel_set, upper_occupancy_visited
from torchcmdp.kernels.estimation import (
    bonus,
    empirical_threshold,
    excess,
    learning_rate,
    loss_estimate,
    optimistic_cost,
    step_uncertainty,
    update_cost_estimate,
    violation_threshold,
)
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.newton import Work
from torchcmdp.kernels.options import formula, kernel
from torchcmdp.kernels.projection import ELASTIC, INVALID, MAX_ITERATIONS, Limits, workspace
from torchcmdp.kernels.solver import project_at

TAGS = (
    "Solver/iterations",
    "Solver/residual",
    "Solver/elastic",
    "Solver/max_iterations",
    "Solver/invalid",
    "Learner/gamma_active",
    "Learner/max_beta",
)


class Settings(NamedTuple):
    """What is the same in every run and episode.

    Attributes:
        kind: Of the confidence set.
        empirical: Whether C_t is computed from the widths in force, 0 or 1.
        iota: ln(T |X| |A| / delta), of the transitions' widths.
        bonus_logarithm: ln(2 m |X| |A| T / delta), of the bonus.
        threshold_constant: C_1 of the paper's threshold.
        luck_factor, luck_logarithm: 4L + 6L L' and ln(3 m T / delta), of the empirical threshold.
        log_floor: ln of the floor of the stored reference.
        target_floor: ln of the smallest reference that a solver is shown.
        limits: Of the projection.
        solver: The address of the projection.
    """

    kind: int
    empirical: int
    iota: float
    bonus_logarithm: float
    threshold_constant: float
    luck_factor: float
    luck_logarithm: float
    log_floor: float
    target_floor: float
    limits: Limits
    solver: int


class Hyperparameters(NamedTuple):
    """One value a run, `(runs,)` each."""

    eta: np.ndarray
    gamma: np.ndarray
    bonus_scale: np.ndarray
    radius_scale: np.ndarray
    threshold_scale: np.ndarray
    cap_scale: np.ndarray


class Buffers(NamedTuple):
    """The learner's state, of all runs, in the padded memory of its tensors with the axes after the runs (and m) flattened."""

    log_occupancy: np.ndarray
    visits: np.ndarray
    transition_visits: np.ndarray
    cost_estimate: np.ndarray
    path_violation: np.ndarray
    uncertainty: np.ndarray


class State(NamedTuple):
    """The state of one run without padding, what follows from it, and room for an update."""

    log_occupancy: np.ndarray
    visits: np.ndarray
    transition_visits: np.ndarray
    cost_estimate: np.ndarray
    costs: np.ndarray
    kernels: KernelSet
    room: Room
    upper: np.ndarray
    gamma_excess: np.ndarray
    target: np.ndarray
    occupancy: np.ndarray
    potentials: np.ndarray
    multipliers: np.ndarray
    work: Work


def empty_state(geometry: Geometry, constraints: int, kind: int) -> State:
    """Room for the state of one run."""
    states, pairs, entries = len(geometry.state_at), len(geometry.pair_at), len(geometry.successor)
    return State(
        np.zeros(entries),
        np.zeros(pairs),
        np.zeros(entries),
        np.zeros((constraints, pairs)),
        np.zeros((constraints, pairs)),
        kernel_set(kind, geometry),
        empty_room(geometry),
        np.zeros(len(geometry.first) - 1),
        np.zeros(constraints),
        np.zeros(entries),
        np.zeros(entries),
        np.zeros(states),
        np.zeros(constraints),
        workspace(geometry, constraints),
    )


@kernel
def load(geometry, settings, hyper, run, buffers, state):
    """state <- a run's buffers, and what follows from them."""
    m = state.cost_estimate.shape[0]
    for e in range(state.log_occupancy.shape[0]):
        place = geometry.entry_at[e]
        state.log_occupancy[e] = buffers.log_occupancy[run, place]
        state.transition_visits[e] = buffers.transition_visits[run, place]
    for p in range(state.visits.shape[0]):
        place = geometry.pair_at[p]
        state.visits[p] = buffers.visits[run, place]
        for i in range(m):
            state.cost_estimate[i, p] = buffers.cost_estimate[run, i, place]
        follow(geometry, settings, hyper, run, p, state)


@kernel
def store(geometry, run, buffers, state):
    """A run's state back into the buffers."""
    for e in range(state.log_occupancy.shape[0]):
        place = geometry.entry_at[e]
        buffers.log_occupancy[run, place] = state.log_occupancy[e]
        buffers.transition_visits[run, place] = state.transition_visits[e]
    for p in range(state.visits.shape[0]):
        place = geometry.pair_at[p]
        buffers.visits[run, place] = state.visits[p]
        for i in range(state.cost_estimate.shape[0]):
            buffers.cost_estimate[run, i, place] = state.cost_estimate[i, p]


@kernel
def follow(geometry, settings, hyper, run, p, state):
    """Lines 7 and 8 at pair p: its plausible transitions and its optimistic costs."""
    confidence_row(geometry, p, state.visits, state.transition_visits, settings.iota, hyper.radius_scale[run], state.kernels)
    cost_bonus = bonus(state.visits[p], settings.bonus_logarithm, hyper.bonus_scale[run])
    for i in range(state.costs.shape[0]):
        state.costs[i, p] = optimistic_cost(state.cost_estimate[i, p], cost_bonus, state.visits[p])


@formula
def count(geometry, settings, hyper, run, steps, buffers, state):
    """N, M and S_i with the episode counted, and the uncertainty with the widths that it was planned with."""
    for k in range(steps.pairs.shape[0]):
        p = steps.pairs[k]
        if settings.empirical == 1:
            cost_bonus = bonus(state.visits[p], settings.bonus_logarithm, hyper.bonus_scale[run])
            kernels = state.kernels
            buffers.uncertainty[run] += step_uncertainty(geometry, p, kernels.lower, kernels.upper, cost_bonus, state.visits[p])
        state.visits[p] += 1.0
        state.transition_visits[steps.entries[k]] += 1.0
    for i in range(state.cost_estimate.shape[0]):
        met = 0.0
        for k in range(steps.pairs.shape[0]):
            met += steps.costs[k, i]
        buffers.path_violation[run, i] += met


@formula
def estimate_costs(settings, hyper, run, episode, steps, buffers, state):
    """Line 6: Gamma_i, then ghat at the visited pairs; returns the largest beta."""
    if settings.empirical == 1:
        threshold = empirical_threshold(buffers.uncertainty[run], settings.luck_factor, settings.luck_logarithm, episode)
    else:
        threshold = violation_threshold(settings.threshold_constant, episode)
    largest = 0.0
    for i in range(state.cost_estimate.shape[0]):
        gamma_excess = excess(buffers.path_violation[run, i], threshold, hyper.threshold_scale[run], hyper.cap_scale[run])
        state.gamma_excess[i] = gamma_excess
        for k in range(steps.pairs.shape[0]):
            p = steps.pairs[k]
            rate = learning_rate(gamma_excess, state.visits[p])
            state.cost_estimate[i, p] = update_cost_estimate(state.cost_estimate[i, p], rate, steps.costs[k, i])
            largest = max(largest, rate)
    return largest


@formula
def aim(geometry, settings, eta, gamma, steps, state):
    """Line 5: target <- ln qhat_t - eta loss, from which line 9 projects."""
    for e in range(state.target.shape[0]):
        state.target[e] = max(state.log_occupancy[e], settings.target_floor)
    for k in range(steps.pairs.shape[0]):
        p = steps.pairs[k]
        step = eta * loss_estimate(steps.rewards[k], state.upper[k], gamma)
        for e in range(geometry.row[p], geometry.row[p + 1]):
            state.target[e] -= step


@kernel
def update(geometry, settings, hyper, run, episode, policy, steps, buffers, state, last):
    """One episode of Algorithm 1 after the roll-out: estimate, count, rebuild the safe set, project.

    Args:
        run: Whose hyperparameters and buffers.
        episode: t, with this one counted.
        policy: What was played, `(P,)`.
        steps: What came of it.
        buffers: Of these `path_violation` and `uncertainty` are kept up to date.
        state: The rest of the run's state.
        last: The diagnostics, `(tags x runs)`.

    Returns:
        The projection's status.
    """
    # over P_{t-1}: the estimate must not know episode t (D5)
    upper_occupancy_visited(geometry, state.kernels, policy, steps.pairs, state.room, state.upper)
    aim(geometry, settings, hyper.eta[run], hyper.gamma[run], steps, state)
    count(geometry, settings, hyper, run, steps, buffers, state)
    largest = estimate_costs(settings, hyper, run, episode, steps, buffers, state)
    for k in range(steps.pairs.shape[0]):
        follow(geometry, settings, hyper, run, steps.pairs[k], state)
    status, iterations, residual, _ = project_at(
        settings.solver, geometry, state.target, state.kernels.lower, state.kernels.upper, state.costs, settings.limits, state.work,
        state.occupancy, state.log_occupancy, state.potentials, state.multipliers,
    )  # fmt: skip
    for e in range(state.log_occupancy.shape[0]):
        state.log_occupancy[e] = max(state.log_occupancy[e], settings.log_floor)
    active = 0.0
    for i in range(state.gamma_excess.shape[0]):
        active += 1.0 if state.gamma_excess[i] > 0.0 else 0.0
    last[0, run] = iterations
    last[1, run] = residual
    last[2, run] = 1.0 if status == ELASTIC else 0.0
    last[3, run] = 1.0 if status == MAX_ITERATIONS else 0.0
    last[4, run] = 1.0 if status == INVALID else 0.0
    last[5, run] = active
    last[6, run] = largest
    return status
