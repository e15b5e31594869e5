"""One update of PDB-PS in one run: `torchcmdp.learners.pdbps` compiled."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.confidence import KernelSet, Room, all_pairs, confidence_row, empty_room, expect, find_extremes, kernel_set
from torchcmdp.kernels.empirical import move_visits, plan_of_logits
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.occupancy import actions_of, log_softmax, total_of
from torchcmdp.kernels.options import formula, kernel
from torchcmdp.kernels.padding import move
from torchcmdp.status import SOLVED

TAGS = ("Learner/max_multiplier", "Learner/loss_range", "Learner/max_bonus")
plan = plan_of_logits

# the smallest positive number of full precision: no 0/0 where gamma is zero
TINY = float(np.finfo(np.float64).tiny)


class Settings(NamedTuple):
    """What is the same in every run and episode: the kind and the logarithm of the confidence set, and T^(1/4)."""

    kind: int
    iota: float
    largest_multiplier: float


class Hyperparameters(NamedTuple):
    """One value a run, `(runs,)` each."""

    eta: np.ndarray
    gamma: np.ndarray
    share: np.ndarray
    dual_step: np.ndarray
    radius_scale: np.ndarray


class Buffers(NamedTuple):
    """The learner's state, of all runs, in the padded memory of its tensors with the axes after the runs flattened."""

    logits: np.ndarray
    multipliers: np.ndarray
    loss_range: np.ndarray
    visits: np.ndarray
    transition_visits: np.ndarray


class State(NamedTuple):
    """The state of one run without padding, what follows from it, and room for an update."""

    logits: np.ndarray
    visits: np.ndarray
    transition_visits: np.ndarray
    kernels: KernelSet
    room: Room
    upper: np.ndarray
    lower: np.ndarray
    dilated: np.ndarray
    loss: np.ndarray


def empty_state(geometry: Geometry, constraints: int, kind: int) -> State:
    """Room for the state of one run."""
    pairs, entries = len(geometry.pair_at), len(geometry.successor)
    rest = (np.zeros(pairs) for _ in range(4))
    return State(
        np.zeros(pairs), np.zeros(pairs), np.zeros(entries), kernel_set(kind, geometry), empty_room(geometry), *rest
    )  # fmt: skip


@kernel
def follow(geometry, settings, hyper, run, p, state):
    """The plausible transitions of pair p."""
    confidence_row(geometry, p, state.visits, state.transition_visits, settings.iota, hyper.radius_scale[run], state.kernels)
    find_extremes(geometry, p, state.kernels)


@kernel
def carry(geometry, settings, run, buffers, state, back):
    """A run's state from the buffers, or `back` into them."""
    move_visits(geometry, run, buffers, state, back)
    move(geometry.pair_at, buffers.logits, run, state.logits, back)


@formula
def lagrangian_loss(run, k, steps, multipliers):
    """c_t + <lambda, g> - r with c_t = 1 + |lambda|_1 at the pair visited in layer k."""
    # as (1 - r) + <lambda, 1 + g>, in which no rounding can make it negative
    priced = 0.0
    for i in range(multipliers.shape[1]):
        priced += (1.0 + steps.costs[k, i]) * multipliers[run, i]
    return 1.0 - steps.rewards[k] + priced


@formula
def state_bonus(x, actions, gamma, scale, policy, upper, lower):
    """b_t(x) = sum_a pi(a|x) L Xi (3 gamma + u_upper - u_lower)(x,a) / (u_upper(x,a) + gamma), with L Xi the scale."""
    total = 0.0
    for p in range(x * actions, (x + 1) * actions):
        total += policy[p] * (3.0 * gamma + upper[p] - lower[p]) / max(upper[p] + gamma, TINY)
    return scale * total


@kernel
def dilated_bonus(geometry, kernels, policy, gamma, loss_range, upper, lower, room, dilated):
    """dilated <- B(x,a) = b(x) + (1 + 1/L) max_p sum_y p(y) sum_a' pi(a'|y) B(y,a'), backward from B = 0 at the terminal state."""
    first, actions, values = geometry.first, geometry.actions, room.values
    layers = first.shape[0] - 1
    ahead = room.ahead
    for k in range(layers - 1, -1, -1):
        if k < layers - 1:
            expect(geometry, kernels, k, room, ahead)
        for x in range(first[k], first[k + 1]):
            own = state_bonus(x, actions, gamma, layers * loss_range, policy, upper, lower)
            value = 0.0
            for p in range(x * actions, (x + 1) * actions):
                dilated[p] = own + (1.0 + 1.0 / layers) * ahead[p] if k < layers - 1 else own
                value += policy[p] * dilated[p]
            values[x] = value


@kernel
def step(geometry, eta, share, loss_range, loss, logits):
    """pi <- (1 - share) y + share / |A| with y ~ pi exp(-eta / Xi loss), in logarithms, where nothing underflows.

    What the share is added to may: it is nothing beside the share.
    """
    rate = eta / loss_range
    for p in range(logits.shape[0]):
        logits[p] -= rate * loss[p]
    shares, actions = loss, geometry.actions  # the time of the losses is over
    log_softmax(geometry, logits, shares)
    if share == 0.0:
        return
    for x in range(geometry.first[-1]):
        kept, mixed = (1.0 - share) / total_of(geometry, x, shares), share / actions_of(geometry, x)
        for p in range(x * actions, (x + 1) * actions):
            if geometry.row[p] < geometry.row[p + 1]:
                logits[p] = math.log(kept * shares[p] + mixed)


@kernel
def update(geometry, settings, hyper, run, episode, policy, steps, buffers, state, last):
    """One episode after the roll-out: estimate Q and its bonus with P_{t-1}, move policy and multipliers, count.

    Arguments and result as in `wcops.update`; of the buffers `multipliers` and `loss_range` are kept up to date.
    """
    gamma, multipliers, m = hyper.gamma[run], buffers.multipliers, buffers.multipliers.shape[1]
    priced = 0.0
    for i in range(m):
        priced += multipliers[run, i]
    loss_range = max(buffers.loss_range[run], 2.0 * (1.0 + priced))
    buffers.loss_range[run] = loss_range
    all_pairs(geometry, state.kernels, policy, 1.0, state.room, state.upper)
    all_pairs(geometry, state.kernels, policy, -1.0, state.room, state.lower)
    dilated_bonus(geometry, state.kernels, policy, gamma, loss_range, state.upper, state.lower, state.room, state.dilated)
    most = 0.0
    for p in range(state.loss.shape[0]):
        most = max(most, state.dilated[p])
        state.loss[p] = -state.dilated[p]
    to_go = 0.0
    for k in range(steps.pairs.shape[0] - 1, -1, -1):
        p = steps.pairs[k]
        to_go += lagrangian_loss(run, k, steps, multipliers)
        state.loss[p] += to_go / max(state.upper[p] + gamma, TINY)
    step(geometry, hyper.eta[run], hyper.share[run], loss_range, state.loss, state.logits)
    highest = 0.0
    for i in range(m):
        met = 0.0
        for k in range(steps.pairs.shape[0]):
            met += steps.costs[k, i]
        multipliers[run, i] = min(max(multipliers[run, i] + hyper.dual_step[run] * met, 0.0), settings.largest_multiplier)
        highest = max(highest, multipliers[run, i])
    for k in range(steps.pairs.shape[0]):
        p = steps.pairs[k]
        state.visits[p] += 1.0
        state.transition_visits[steps.entries[k]] += 1.0
        follow(geometry, settings, hyper, run, p, state)
    last[0, run] = highest
    last[1, run] = loss_range
    last[2, run] = most
    return SOLVED
