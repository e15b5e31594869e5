"""Where rewards and costs come from, in one run: the built-in processes, as `torchcmdp.processes` has them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.options import formula, kernel

# how the values change over the episodes
CONSTANT, SWITCHING, CYCLIC, REPLAY, OGD = range(5)


class Process(NamedTuple):
    """A process of all runs, in the padded memory of its tensors; rewards are a process of one constraint.

    Attributes:
        kind: How the values change.
        episode: How many episodes it has played.
        noisy: Whether feedback is Bernoulli noise around the values, 0 or 1.
        low: Smallest value: of the noise, or of an adversary.
        at: Of "switching", after how many episodes each block but the first begins.
        length: Of "cyclic", episodes of a block.
        rate: Of an adversary, sign times step.
        horizon: Of an adversary with a fixed step T, else 0.
        blocks: `(blocks x (1 or runs) x m x L S A)`; of an adversary its base alone.
        high: Of an adversary, the upper ends, `((1 or runs) x m x L S A)`.
        values: Of an adversary, those of the episode to come, `(runs x m x L S A)`, written to.
        played: Of an adversary, those of the episode played last, `(runs x m x L S A)`, written to.
        kept: Where the values of the first episodes are kept, `(episodes x runs x m x L S A)`, written to; none of most.
    """

    kind: int
    episode: int
    noisy: int
    low: float
    at: np.ndarray
    length: int
    rate: float
    horizon: int
    blocks: np.ndarray
    high: np.ndarray
    values: np.ndarray
    played: np.ndarray
    kept: np.ndarray


@formula
def block_in_force(process, episode):
    """Which block gives the values after `episode` episodes."""
    blocks = process.blocks.shape[0]
    if process.kind == CYCLIC:
        return episode // process.length % blocks
    if process.kind == REPLAY:
        return min(episode, blocks - 1)
    block = 0
    if process.kind == SWITCHING:
        for j in range(process.at.shape[0]):
            if process.at[j] <= episode:
                block += 1
    return block


@kernel
def load_values(geometry, process, run, episode, values):
    """values <- those of a run after `episode` episodes, `(m x P)`; of an adversary the ones it has come to."""
    block = block_in_force(process, episode)
    row = run if process.blocks.shape[1] > 1 else 0
    for i in range(values.shape[0]):
        for p in range(values.shape[1]):
            place = geometry.pair_at[p]
            values[i, p] = process.values[run, i, place] if process.kind == OGD else process.blocks[block, row, i, place]


@formula
def observe(process, value, number):
    """The feedback at a visited pair of this value: 1 or `low` with this mean where the process is noisy."""
    if process.noisy == 0:
        return value
    success = 1.0 if number * (1.0 - process.low) < value - process.low else 0.0
    return success * (1.0 - process.low) + process.low


@formula
def largest(process, value):
    """The largest feedback that a pair of this value can give."""
    return 1.0 if process.noisy == 1 and value > process.low else value


@kernel
def advance(geometry, process, run, episode, policy, values):
    """Move values on from episode `episode`, counted from 0, to the one after it, knowing the policy just played."""
    if process.kind == CONSTANT:
        return
    if process.kind == OGD:
        descend(geometry, process, run, episode + 1, policy, values)
    elif block_in_force(process, episode + 1) != block_in_force(process, episode):
        load_values(geometry, process, run, episode + 1, values)


@formula
def descend(geometry, process, run, episode, policy, values):
    """The adversary's step after episode `episode`, counted from 1: v + rate pi base, clipped to [low, high]."""
    rate = process.rate / math.sqrt(float(episode if process.horizon == 0 else process.horizon))
    row = run if process.blocks.shape[1] > 1 else 0
    for i in range(values.shape[0]):
        for p in range(values.shape[1]):
            place = geometry.pair_at[p]
            moved = values[i, p] + rate * policy[p] * process.blocks[0, row, i, place]
            values[i, p] = min(max(moved, process.low), process.high[row, i, place])
