"""One update of WC-OPS, and of UOB-REPS, in one run: `torchcmdp.learners.wcops` compiled.

An episode changes the counts, intervals, bonuses and cost estimates of its visited pairs only, and nothing else is computed again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchcmdp.kernels import costs as beliefs
from torchcmdp.kernels.confidence import (
    KernelSet,
    Room,
    confidence_row,
    empty_room,
    find_extremes,
    kernel_set,
    upper_occupancy_visited,
)
from torchcmdp.kernels.costs import DRIFT_TAG, MARGIN_TAG, move_beliefs, revise, ring, spare, surprises
from torchcmdp.kernels.empirical import move_visits
from torchcmdp.kernels.estimation import (
    bonus,
    empirical_threshold,
    excess,
    hopeful_loss,
    loss_correction,
    loss_estimate,
    optimistic_cost,
    prior_cost,
    step_uncertainty,
    violation_threshold,
)
from torchcmdp.kernels.exponentials import exponentials
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.metrics import solver_tags, tell_solver
from torchcmdp.kernels.occupancy import policy_of_log
from torchcmdp.kernels.options import formula, kernel
from torchcmdp.kernels.padding import move
from torchcmdp.kernels.projection import ELASTIC, Limits
from torchcmdp.kernels.solver import project_at
from torchcmdp.kernels.work import Work, workspace

TAGS = (*solver_tags("elastic"), "Learner/gamma_active", "Learner/max_beta")


class Settings(NamedTuple):
    """What is the same in every run and episode.

    Attributes:
        kind: Of the confidence set.
        empirical: Whether C_t is computed from the widths in force, 0 or 1.
        prior, margin, drift: Whether costs have a prior in place of a bonus, a margin, and a test for drift, 0 or 1 each.
        robust, shared: Whether losses are doubly robust, and whether the reference has a uniform share, 0 or 1 each.
        iota: ln(T |X| |A| / delta), of the transitions' widths.
        bonus_logarithm: ln(2 m |X| |A| T / delta), of the bonus.
        threshold_constant: C_1 of the paper's threshold.
        luck_factor, luck_logarithm: 4L + 6L L' and ln(3 m T / delta), of the empirical threshold.
        slack, height, memory: Of the drift test, in units of costs and of samples.
        log_floor: ln of the floor of the stored reference.
        target_floor: ln of the smallest reference that a solver is shown.
        limits: Of the projection.
        solver: The address of the projection.
        cost_low: The smallest that each mean cost can be, in padded memory, `(1 or runs x m x pairs)`.
    """

    kind: int
    empirical: int
    prior: int
    margin: int
    drift: int
    robust: int
    shared: int
    iota: float
    bonus_logarithm: float
    threshold_constant: float
    luck_factor: float
    luck_logarithm: float
    slack: float
    height: float
    memory: float
    log_floor: float
    target_floor: float
    limits: Limits
    solver: int
    cost_low: np.ndarray


class Hyperparameters(NamedTuple):
    """One value a run, `(runs,)` each."""

    eta: np.ndarray
    gamma: np.ndarray
    bonus_scale: np.ndarray
    radius_scale: np.ndarray
    threshold_scale: np.ndarray
    cap_scale: np.ndarray
    share: np.ndarray
    margin: np.ndarray


class Buffers(NamedTuple):
    """The learner's state, of all runs, in the padded memory of its tensors with the axes after the runs (and m) flattened."""

    log_occupancy: np.ndarray
    visits: np.ndarray
    transition_visits: np.ndarray
    cost_estimate: np.ndarray
    path_violation: np.ndarray
    uncertainty: np.ndarray
    loss_sum: np.ndarray
    samples: np.ndarray
    surprises: np.ndarray
    low_end: np.ndarray


# The axes of buffers that not every learner has.
AXES = {**beliefs.AXES, "loss_sum": 2}


def tags(settings: Settings) -> tuple[str, ...]:
    """What is reported of learners with these settings."""
    return (*TAGS, *(MARGIN_TAG,) * settings.margin, *(DRIFT_TAG,) * settings.drift)


class State(NamedTuple):
    """The state of one run without padding, what follows from it, and room for an update."""

    log_occupancy: np.ndarray
    visits: np.ndarray
    transition_visits: np.ndarray
    cost_estimate: np.ndarray
    costs: np.ndarray
    low_end: np.ndarray
    margined: np.ndarray
    samples: np.ndarray
    loss_sum: np.ndarray
    loss: np.ndarray
    masses: np.ndarray
    surprise: np.ndarray
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
    states, pairs, entries, m = len(geometry.state_at), len(geometry.pair_at), len(geometry.successor), constraints
    sizes = (entries, pairs, entries, *((m, pairs),) * 4, *(pairs,) * 4, m)
    rest = (len(geometry.first) - 1, m, entries, entries, states, m)
    return State(
        *(np.zeros(size) for size in sizes),
        kernel_set(kind, geometry),
        empty_room(geometry),
        *(np.zeros(size) for size in rest),
        workspace(geometry, m),
    )


@kernel
def carry(geometry, settings, run, buffers, state, back):
    """A run's state from the buffers, or `back` into them."""
    move_visits(geometry, run, buffers, state, back)
    move(geometry.entry_at, buffers.log_occupancy, run, state.log_occupancy, back)
    move_beliefs(geometry, settings, run, buffers, state, back)
    if settings.robust == 1:
        move(geometry.pair_at, buffers.loss_sum, run, state.loss_sum, back)


@kernel
def plan(geometry, state, policy):
    """policy <- pi_t, the policy of qhat_t."""
    policy_of_log(geometry, state.log_occupancy, state.occupancy, policy)


@kernel
def follow(geometry, settings, hyper, run, p, state):
    """Lines 7 and 8 at pair p: its plausible transitions and its optimistic costs."""
    if geometry.row[p] == geometry.row[p + 1]:
        return
    confidence_row(geometry, p, state.visits, state.transition_visits, settings.iota, hyper.radius_scale[run], state.kernels)
    find_extremes(geometry, p, state.kernels)
    samples = state.samples[p]
    cost_bonus = bonus(samples, settings.bonus_logarithm, hyper.bonus_scale[run])
    lowest, place = settings.cost_low[run % settings.cost_low.shape[0]], geometry.pair_at[p]
    for i in range(state.costs.shape[0]):
        if settings.prior == 1:
            state.costs[i, p] = prior_cost(state.cost_estimate[i, p], samples, state.low_end[i, p])
        else:
            state.costs[i, p] = optimistic_cost(state.cost_estimate[i, p], cost_bonus, samples, lowest[i, place])


@formula
def count(geometry, settings, hyper, run, steps, buffers, state):
    """N, M and S_i with the episode counted, and the uncertainty with the widths that it was planned with."""
    for k in range(steps.pairs.shape[0]):
        p = steps.pairs[k]
        if settings.empirical == 1:
            cost_bonus = bonus(state.samples[p], settings.bonus_logarithm, hyper.bonus_scale[run])
            kernels = state.kernels
            buffers.uncertainty[run] += step_uncertainty(geometry, p, kernels.lower, kernels.upper, cost_bonus, state.samples[p])
        state.visits[p] += 1.0
        state.samples[p] += 1.0
        state.loss_sum[p] += 1.0 - steps.rewards[k]
        state.transition_visits[steps.entries[k]] += 1.0
    if settings.prior == 0:
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
        gamma_excess = 0.0
        if settings.prior == 0:
            gamma_excess = excess(buffers.path_violation[run, i], threshold, hyper.threshold_scale[run], hyper.cap_scale[run])
        state.gamma_excess[i] = gamma_excess
        largest = max(largest, revise(gamma_excess, i, steps, state))
    return largest


@formula
def pair_masses(geometry, log_occupancy, occupancy, masses):
    """masses <- q(x,a), `(P,)`; `occupancy` is room, `(E,)`."""
    exponentials(log_occupancy, 0, occupancy.shape[0], 0.0, occupancy)
    for p in range(masses.shape[0]):
        masses[p] = 0.0
        for e in range(geometry.row[p], geometry.row[p + 1]):
            masses[p] += occupancy[e]


@formula
def refer(geometry, settings, share, state):
    """target <- ln of the reference: qhat_t, with its share of the uniform occupancy."""
    first, actions = geometry.first, geometry.actions
    kept, given = math.log1p(-share), math.log(share) if share > 0.0 else -math.inf
    for k in range(first.shape[0] - 1):
        begin, end = geometry.row[first[k] * actions], geometry.row[first[k + 1] * actions]
        other = given + math.log(1.0 / (end - begin))
        for e in range(begin, end):
            found = state.log_occupancy[e]
            if settings.shared == 1:
                mine = kept + found
                found = max(mine, other) + math.log1p(math.exp(-abs(mine - other)))
            state.target[e] = max(found, settings.target_floor)


@formula
def aim(geometry, settings, eta, gamma, steps, state):
    """Line 5: target <- target - eta loss, from which line 9 projects."""
    if settings.robust == 1:
        for p in range(state.loss.shape[0]):
            state.loss[p] = hopeful_loss(state.loss_sum[p] / max(state.visits[p], 1.0), state.visits[p])
        for k in range(steps.pairs.shape[0]):
            p = steps.pairs[k]
            mean = state.loss_sum[p] / max(state.visits[p], 1.0)
            state.loss[p] += loss_correction(steps.rewards[k], state.upper[k], gamma, mean)
        for p in range(state.loss.shape[0]):
            for e in range(geometry.row[p], geometry.row[p + 1]):
                state.target[e] -= eta * state.loss[p]
        return
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
    refer(geometry, settings, hyper.share[run], state)
    aim(geometry, settings, hyper.eta[run], hyper.gamma[run], steps, state)
    surprises(steps, state)
    count(geometry, settings, hyper, run, steps, buffers, state)
    largest = estimate_costs(settings, hyper, run, episode, steps, buffers, state)
    for k in range(steps.pairs.shape[0]):
        follow(geometry, settings, hyper, run, steps.pairs[k], state)
    rung = ring(settings, run, buffers, state) if settings.drift == 1 else 0
    if rung > 0:
        for p in range(state.samples.shape[0]):
            follow(geometry, settings, hyper, run, p, state)
    costs, error = state.costs, 0.0
    if settings.margin == 1:
        pair_masses(geometry, state.log_occupancy, state.occupancy, state.masses)
        error = spare(geometry, hyper.margin[run], state.masses, state)
        costs = state.margined
    status, iterations, residual, _ = project_at(
        settings.solver, geometry, state.target, state.kernels.lower, state.kernels.upper, costs, settings.limits, state.work,
        state.occupancy, state.log_occupancy, state.potentials, state.multipliers,
    )  # fmt: skip
    for e in range(state.log_occupancy.shape[0]):
        state.log_occupancy[e] = max(state.log_occupancy[e], settings.log_floor)
    active = 0.0
    for i in range(state.gamma_excess.shape[0]):
        active += 1.0 if state.gamma_excess[i] > 0.0 else 0.0
    tell_solver(run, iterations, residual, status, ELASTIC, last)
    last[5, run] = active
    last[6, run] = largest
    if settings.margin == 1:
        last[7, run] = error
    if settings.drift == 1:
        last[7 + settings.margin, run] = rung
    return status
