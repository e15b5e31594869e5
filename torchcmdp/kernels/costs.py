"""What a learner believes of its costs, in one run: `torchcmdp.costs` compiled, for every learner that has a cost model."""

from __future__ import annotations

import math

from torchcmdp.kernels.estimation import cumulative_surprise, learning_rate, squared_error, update_cost_estimate
from torchcmdp.kernels.options import formula
from torchcmdp.kernels.padding import move, move_each

# The axes of the buffers of a cost model that not every one has.
AXES = {"cost_estimate": 3, "path_violation": 2, "uncertainty": 1, "samples": 2, "surprises": 2, "low_end": 3}
MARGIN_TAG, DRIFT_TAG = "Learner/standard_error", "Learner/drift_alarms"


@formula
def move_beliefs(geometry, settings, run, buffers, state, back):
    """A run's estimates, what they are worth and where their prior sits, from the buffers or `back` into them."""
    move_each(geometry.pair_at, buffers.cost_estimate, run, state.cost_estimate, back)
    if settings.prior == 1:
        move_each(geometry.pair_at, buffers.low_end, run, state.low_end, back)
    if settings.drift == 1:
        move(geometry.pair_at, buffers.samples, run, state.samples, back)
    elif not back:  # every visit is a sample
        move(geometry.pair_at, buffers.visits, run, state.samples, back)


@formula
def surprises(steps, state):
    """D_i, the costs of the path beyond what the estimates said, at the pairs seen before; the episode is not counted yet."""
    for i in range(state.surprise.shape[0]):
        total = 0.0
        for k in range(steps.pairs.shape[0]):
            p = steps.pairs[k]
            if state.samples[p] > 0.0:
                total += steps.costs[k, i] - state.cost_estimate[i, p]
        state.surprise[i] = total


@formula
def revise(gamma_excess, i, steps, state):
    """ghat_i at the visited pairs, which are counted; returns the largest beta."""
    largest = 0.0
    for k in range(steps.pairs.shape[0]):
        p = steps.pairs[k]
        rate = learning_rate(gamma_excess, state.samples[p])
        state.cost_estimate[i, p] = update_cost_estimate(state.cost_estimate[i, p], rate, steps.costs[k, i])
        largest = max(largest, rate)
    return largest


@formula
def ring(settings, run, buffers, state):
    """The drift test; where it rings, every pair keeps `memory` samples at most. Returns in how many constraints it rang."""
    rung = 0
    for i in range(state.surprise.shape[0]):
        above = cumulative_surprise(buffers.surprises[run, 2 * i], state.surprise[i], settings.slack)
        below = cumulative_surprise(buffers.surprises[run, 2 * i + 1], -state.surprise[i], settings.slack)
        if above > settings.height or below > settings.height:
            rung += 1
            above = 0.0
            below = 0.0
        buffers.surprises[run, 2 * i] = above
        buffers.surprises[run, 2 * i + 1] = below
    if rung > 0:
        for p in range(state.samples.shape[0]):
            state.samples[p] = min(state.samples[p], settings.memory)
    return rung


@formula
def spare(geometry, scale, masses, state):
    """margined <- the costs with `scale` standard errors of what the occupancy costs spread over them; returns the largest."""
    layers, largest = geometry.first.shape[0] - 1, 0.0
    for i in range(state.costs.shape[0]):
        square = 0.0
        for p in range(state.samples.shape[0]):
            square += squared_error(masses[p], state.cost_estimate[i, p], state.samples[p])
        error = min(math.sqrt(square), 1.0)
        largest = max(largest, error)
        for p in range(state.samples.shape[0]):
            state.margined[i, p] = state.costs[i, p] + scale * error / layers
    return largest
