"""One episode of one run, as `torchcmdp.simulator` plays it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from torchcmdp.kernels.options import kernel
from torchcmdp.kernels.processes import observe
from torchcmdp.kernels.sampling import draw, draw_from
from torchcmdp.kernels.streams import SLOTS, uniform
from torchcmdp.occupancy import ROW_SUM_TOLERANCE as ROW_SUM_TOLERANCES

ROW_SUM_TOLERANCE = ROW_SUM_TOLERANCES[torch.float64]
ACTION, NEXT_STATE, REWARD, COST = 0, 1, 2, 3  # the purpose of a number; constraint i uses COST + i


class Steps(NamedTuple):
    """What an episode leaves: visited pairs and transitions by number, `(L,)` each, rewards `(L,)` and costs `(L x m)`."""

    pairs: np.ndarray
    entries: np.ndarray
    rewards: np.ndarray
    costs: np.ndarray


def steps(layers: int, constraints: int) -> Steps:
    """Room for an episode."""
    return Steps(np.zeros(layers, np.int64), np.zeros(layers, np.int64), np.zeros(layers), np.zeros((layers, constraints)))


@kernel
def is_policy(policy):
    """Whether all entries are finite and none is negative."""
    good = True
    for p in range(policy.shape[0]):
        good = good and policy[p] >= 0.0 and policy[p] < math.inf
    return good


@kernel
def sums_to_one(geometry, policy):
    """Whether the row of every state does, up to what a policy may miss it by."""
    good = True
    for x in range(geometry.first[-1]):
        total = 0.0
        for p in range(x * geometry.actions, (x + 1) * geometry.actions):
            total += policy[p]
        good = good and abs(total - 1.0) <= ROW_SUM_TOLERANCE
    return good


@kernel
def rollout(geometry, policy, thresholds, seed, run, episode, rewards, costs, reward_values, cost_values, out):
    """out <- an episode: actions, successors, and the feedback at the visited pairs.

    Args:
        policy: `(P,)`.
        thresholds: Those of the true transitions, `(E,)`.
        seed, run, episode: Which random numbers are used.
        rewards, costs: The processes.
        reward_values, cost_values: Their values, `(1 x P)` and `(m x P)`.
        out: `Steps`.
    """
    row, actions = geometry.row, geometry.actions
    state = 0
    for k in range(geometry.first.shape[0] - 1):
        begin = state * actions
        p = begin + draw_from(policy, begin, begin + actions, uniform(seed, run, episode, k + SLOTS * ACTION))
        e = row[p] + draw(thresholds, row[p], row[p + 1], uniform(seed, run, episode, k + SLOTS * NEXT_STATE))
        out.pairs[k] = p
        out.entries[k] = e
        # noise alone needs numbers, and a number depends on nothing but its place, so the others need not be made
        number = uniform(seed, run, episode, k + SLOTS * REWARD) if rewards.noisy == 1 else 0.0
        out.rewards[k] = observe(rewards, reward_values[0, p], number)
        for i in range(cost_values.shape[0]):
            number = uniform(seed, run, episode, k + SLOTS * (COST + i)) if costs.noisy == 1 else 0.0
            out.costs[k, i] = observe(costs, cost_values[i, p], number)
        state = geometry.successor[e]
