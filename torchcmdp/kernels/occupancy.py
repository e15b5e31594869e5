"""Policies and occupancies of one run, as `torchcmdp.occupancy` and the learners have them."""

from __future__ import annotations

import math

from torchcmdp.kernels.exponentials import exponentials
from torchcmdp.kernels.options import formula, kernel


@kernel
def policy_of_log(geometry, log_occupancy, shares, policy):
    """policy <- that of an occupancy given by its logarithm: a softmax over actions and successors, in the state's own scale.

    `shares` is room, `(E,)`.
    """
    row, actions = geometry.row, geometry.actions
    for x in range(geometry.first[-1]):
        largest = -math.inf
        for e in range(row[x * actions], row[(x + 1) * actions]):
            largest = max(largest, log_occupancy[e])
        for e in range(row[x * actions], row[(x + 1) * actions]):
            shares[e] = log_occupancy[e] - largest
    exponentials(shares, 0, shares.shape[0], 0.0, shares)
    for x in range(geometry.first[-1]):
        total = 0.0
        for p in range(x * actions, (x + 1) * actions):
            mass = 0.0
            for e in range(row[p], row[p + 1]):
                mass += shares[e]
            policy[p] = mass
            total += mass
        for p in range(x * actions, (x + 1) * actions):
            policy[p] /= total


@formula
def actions_of(geometry, x):
    """How many actions a state has."""
    own = 0
    for p in range(x * geometry.actions, (x + 1) * geometry.actions):
        own += geometry.row[p + 1] > geometry.row[p]
    return own


@kernel
def policy_of(geometry, masses, policy):
    """policy <- q(x,a) / q(x), and uniform where q(x) = 0; of an occupancy by its pairs."""
    row, actions = geometry.row, geometry.actions
    for x in range(geometry.first[-1]):
        total = total_of(geometry, x, masses)
        if total > 0.0:
            for p in range(x * actions, (x + 1) * actions):
                policy[p] = masses[p] / total
        else:
            own = actions_of(geometry, x)
            for p in range(x * actions, (x + 1) * actions):
                policy[p] = 1.0 / own if row[p] < row[p + 1] else 0.0


@formula
def relative(geometry, logits, out):
    """out <- logits minus the largest of their state, and -inf at actions that it does not have."""
    row, actions = geometry.row, geometry.actions
    for x in range(geometry.first[-1]):
        largest = -math.inf
        for p in range(x * actions, (x + 1) * actions):
            if row[p] < row[p + 1]:
                largest = max(largest, logits[p])
        for p in range(x * actions, (x + 1) * actions):
            out[p] = logits[p] - largest if row[p] < row[p + 1] else -math.inf


@formula
def total_of(geometry, x, shares):
    """The sum over the actions of a state."""
    total = 0.0
    for p in range(x * geometry.actions, (x + 1) * geometry.actions):
        total += shares[p]
    return total


@kernel
def policy_of_logits(geometry, logits, policy):
    """policy <- softmax of the logits over the actions that each state has."""
    relative(geometry, logits, policy)
    exponentials(policy, 0, policy.shape[0], 0.0, policy)
    for x in range(geometry.first[-1]):
        total = total_of(geometry, x, policy)
        for p in range(x * geometry.actions, (x + 1) * geometry.actions):
            policy[p] /= total


@kernel
def log_softmax(geometry, logits, shares):
    """logits <- their log-softmax over the actions that each state has, and zero at the others; `shares` is room, `(P,)`."""
    relative(geometry, logits, logits)
    exponentials(logits, 0, logits.shape[0], 0.0, shares)
    for x in range(geometry.first[-1]):
        shift = math.log(total_of(geometry, x, shares))
        for p in range(x * geometry.actions, (x + 1) * geometry.actions):
            logits[p] = logits[p] - shift if geometry.row[p] < geometry.row[p + 1] else 0.0


@kernel
def pair_occupancy_of(geometry, policy, transitions, mass, occupancy):
    """occupancy <- q^{P,pi}(x,a), by the forward recursion; `mass` is room for a number a state and one for the terminal one."""
    row, successor, actions = geometry.row, geometry.successor, geometry.actions
    states = geometry.first[-1]
    for x in range(states + 1):
        mass[x] = 0.0
    mass[0] = 1.0
    for x in range(states):  # in the order of the layers, so that all that flows into x has arrived
        for p in range(x * actions, (x + 1) * actions):
            pair = mass[x] * policy[p]
            occupancy[p] = pair
            for e in range(row[p], row[p + 1]):
                mass[successor[e]] += pair * transitions[e]


@formula
def expected_value(values, i, occupancy):
    """<v_i, q>."""
    total = 0.0
    for p in range(occupancy.shape[0]):
        total += values[i, p] * occupancy[p]
    return total
