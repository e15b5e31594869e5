"""One update of OptPrimalDual in one run: `torchcmdp.learners.opt_primal_dual` compiled.

An episode changes the averages and the bonuses of its visited pairs only; the values of the policy are computed anew.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.confidence import empirical_row, half_width
from torchcmdp.kernels.empirical import count, move_sums, plan_of_logits
from torchcmdp.kernels.estimation import bonus
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.occupancy import log_softmax
from torchcmdp.kernels.options import kernel
from torchcmdp.kernels.padding import move
from torchcmdp.status import SOLVED

TAGS = ("Learner/max_multiplier", "Learner/optimistic_reward", "Learner/optimistic_violation")
plan = plan_of_logits


class Settings(NamedTuple):
    """What is the same in every run and episode.

    Attributes:
        kind: Of the transitions' radii.
        capped: Whether multipliers have a largest value, 0 or 1.
        iota: The logarithm in the transitions' radii.
        logarithm: That in the radii of rewards and costs.
        lowest, highest: What the rest of an episode can earn, and cost, from each layer on, `(1 or runs x (1 + m) x L)`.
    """

    kind: int
    capped: int
    iota: float
    logarithm: float
    lowest: np.ndarray
    highest: np.ndarray


class Hyperparameters(NamedTuple):
    """One value a run, `(runs,)` each; the cap is zero where there is none."""

    primal_step: np.ndarray
    dual_step: np.ndarray
    bonus_scale: np.ndarray
    radius_scale: np.ndarray
    multiplier_cap: np.ndarray


class Buffers(NamedTuple):
    """The learner's state, of all runs, in the padded memory of its tensors with the axes after the runs (and m) flattened."""

    logits: np.ndarray
    multipliers: np.ndarray
    visits: np.ndarray
    transition_visits: np.ndarray
    reward_sum: np.ndarray
    cost_sum: np.ndarray


class State(NamedTuple):
    """The state of one run without padding, what follows from it, and room for an update.

    Attributes:
        center: Empirical transitions, `(E,)`.
        feedback: Optimistic rewards and costs, `((1 + m) x P)`.
        action_values: `((1 + m) x P)`.
        values: `((1 + m) x (n + 1))`.
        shares: Room, `(P,)`.
    """

    logits: np.ndarray
    visits: np.ndarray
    transition_visits: np.ndarray
    reward_sum: np.ndarray
    cost_sum: np.ndarray
    center: np.ndarray
    feedback: np.ndarray
    action_values: np.ndarray
    values: np.ndarray
    shares: np.ndarray


def empty_state(geometry: Geometry, constraints: int, kind: int) -> State:
    """Room for the state of one run."""
    states, pairs, entries, m = int(geometry.first[-1]), len(geometry.pair_at), len(geometry.successor), constraints
    sizes = (pairs, pairs, entries, pairs, (m, pairs), entries, (1 + m, pairs), (1 + m, pairs), (1 + m, states + 1), pairs)
    return State(*(np.zeros(size) for size in sizes))


@kernel
def carry(geometry, settings, run, buffers, state, back):
    """A run's state from the buffers, or `back` into them."""
    move_sums(geometry, run, buffers, state, back)
    move(geometry.pair_at, buffers.logits, run, state.logits, back)


@kernel
def follow(geometry, settings, hyper, run, p, state):
    """The optimistic feedback of pair p: reward and costs with their bonuses."""
    begin, end = geometry.row[p], geometry.row[p + 1]
    visits, layers = state.visits[p], geometry.first.shape[0] - 1
    cost_width = bonus(visits, settings.logarithm, hyper.bonus_scale[run])
    reward_width = 0.5 * cost_width
    empirical_row(geometry, p, state.visits, state.transition_visits, state.center)
    width = 0.0
    for e in range(begin, end):
        radius = half_width(settings.kind, state.center[e], visits, float(end - begin), settings.iota, hyper.radius_scale[run])
        width += min(radius, 1.0)
    # a lone successor is certain, whatever the width says
    model_bonus = layers * width if end - begin > 1 else 0.0
    state.feedback[0, p] = state.reward_sum[p] / max(visits, 1.0) + reward_width + model_bonus
    for i in range(state.cost_sum.shape[0]):
        state.feedback[1 + i, p] = state.cost_sum[i, p] / max(visits, 1.0) - (cost_width + model_bonus)


@kernel
def evaluate(geometry, settings, run, policy, state):
    """The optimistic values of the policy: Q^r, Q^g_1 .. Q^g_m, and their V."""
    lowest, highest = settings.lowest[run % settings.lowest.shape[0]], settings.highest[run % settings.highest.shape[0]]
    first, row, successor, actions = geometry.first, geometry.row, geometry.successor, geometry.actions
    layers = first.shape[0] - 1
    for j in range(state.values.shape[0]):
        state.values[j, first[layers]] = 0.0
        for k in range(layers - 1, -1, -1):
            for x in range(first[k], first[k + 1]):
                value = 0.0
                for p in range(x * actions, (x + 1) * actions):
                    expected = 0.0
                    for e in range(row[p], row[p + 1]):
                        expected += state.center[e] * state.values[j, successor[e]]
                    action_value = min(max(state.feedback[j, p] + expected, lowest[j, k]), highest[j, k])
                    state.action_values[j, p] = action_value
                    value += policy[p] * action_value
                state.values[j, x] = value


@kernel
def update(geometry, settings, hyper, run, episode, policy, steps, buffers, state, last):
    """Evaluate the policy that was played, move it and the multipliers, and only then count the episode.

    Arguments and result as in `wcops.update`; of the buffers `multipliers` are kept up to date.
    """
    evaluate(geometry, settings, run, policy, state)
    for p in range(state.logits.shape[0]):
        ascent = state.action_values[0, p]
        for i in range(state.cost_sum.shape[0]):
            ascent += -buffers.multipliers[run, i] * state.action_values[1 + i, p]
        state.logits[p] += hyper.primal_step[run] * ascent
    log_softmax(geometry, state.logits, state.shares)
    highest, violation = 0.0, 0.0
    for i in range(state.cost_sum.shape[0]):
        multiplier = max(buffers.multipliers[run, i] + hyper.dual_step[run] * state.values[1 + i, 0], 0.0)
        if settings.capped == 1:
            multiplier = min(multiplier, hyper.multiplier_cap[run])
        buffers.multipliers[run, i] = multiplier
        highest = max(highest, multiplier)
        violation = max(violation, state.values[1 + i, 0])
    last[0, run] = highest
    last[1, run] = state.values[0, 0]
    last[2, run] = violation
    count(steps, state)
    for k in range(steps.pairs.shape[0]):
        follow(geometry, settings, hyper, run, steps.pairs[k], state)
    return SOLVED
