"""Policies and occupancies of one run, as `torchcmdp.occupancy` and the learners have them."""

from __future__ import annotations

import math

from torchcmdp.kernels.options import formula, kernel


@kernel
def policy_of_log(geometry, log_occupancy, policy):
    """policy <- that of an occupancy given by its logarithm: a softmax over actions and successors, in the state's own scale."""
    row, actions = geometry.row, geometry.actions
    for x in range(geometry.first[-1]):
        largest = -math.inf
        for e in range(row[x * actions], row[(x + 1) * actions]):
            largest = max(largest, log_occupancy[e])
        total = 0.0
        for p in range(x * actions, (x + 1) * actions):
            mass = 0.0
            for e in range(row[p], row[p + 1]):
                mass += math.exp(log_occupancy[e] - largest)
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
def policy_of(geometry, occupancy, policy):
    """policy <- q(x,a) / q(x), and uniform where q(x) = 0."""
    row, actions = geometry.row, geometry.actions
    for x in range(geometry.first[-1]):
        total = 0.0
        for p in range(x * actions, (x + 1) * actions):
            policy[p] = 0.0
            for e in range(row[p], row[p + 1]):
                policy[p] += occupancy[e]
            total += policy[p]
        own = actions_of(geometry, x)
        for p in range(x * actions, (x + 1) * actions):
            if total > 0.0:
                policy[p] /= total
            elif row[p] < row[p + 1]:
                policy[p] = 1.0 / own


@formula
def exponentials(geometry, x, logits):
    """The largest logit of a state, and the sum of exp(logit - largest) over the actions that it has."""
    row, actions = geometry.row, geometry.actions
    largest, total = -math.inf, 0.0
    for p in range(x * actions, (x + 1) * actions):
        if row[p] < row[p + 1]:
            largest = max(largest, logits[p])
    for p in range(x * actions, (x + 1) * actions):
        total += math.exp(logits[p] - largest) if row[p] < row[p + 1] else 0.0
    return largest, total


@kernel
def policy_of_logits(geometry, logits, policy):
    """policy <- softmax of the logits over the actions that each state has."""
    row, actions = geometry.row, geometry.actions
    for x in range(geometry.first[-1]):
        largest, total = exponentials(geometry, x, logits)
        for p in range(x * actions, (x + 1) * actions):
            policy[p] = math.exp(logits[p] - largest) / total if row[p] < row[p + 1] else 0.0


@kernel
def log_softmax(geometry, logits):
    """logits <- their log-softmax over the actions that each state has, and zero at the others."""
    row, actions = geometry.row, geometry.actions
    for x in range(geometry.first[-1]):
        largest, total = exponentials(geometry, x, logits)
        shift = largest + math.log(total)
        for p in range(x * actions, (x + 1) * actions):
            logits[p] = logits[p] - shift if row[p] < row[p + 1] else 0.0


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
