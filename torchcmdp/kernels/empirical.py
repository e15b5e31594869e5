"""Visit counts, and the sums of what was seen, of one run: `torchcmdp.learners.empirical` compiled."""

from __future__ import annotations

from torchcmdp.kernels.occupancy import policy_of_logits
from torchcmdp.kernels.options import formula, kernel
from torchcmdp.kernels.padding import put, put_each, take, take_each


@formula
def load_visits(geometry, run, buffers, state):
    """N and M of a run."""
    take(geometry.entry_at, buffers.transition_visits, run, state.transition_visits)
    take(geometry.pair_at, buffers.visits, run, state.visits)


@formula
def store_visits(geometry, run, buffers, state):
    """N and M of a run, back into the buffers."""
    put(geometry.entry_at, state.transition_visits, run, buffers.transition_visits)
    put(geometry.pair_at, state.visits, run, buffers.visits)


@formula
def load_sums(geometry, run, buffers, state):
    """N, M, and the sums of rewards and costs of a run."""
    load_visits(geometry, run, buffers, state)
    take(geometry.pair_at, buffers.reward_sum, run, state.reward_sum)
    take_each(geometry.pair_at, buffers.cost_sum, run, state.cost_sum)


@formula
def store_sums(geometry, run, buffers, state):
    """N, M, and the sums of rewards and costs of a run, back into the buffers."""
    store_visits(geometry, run, buffers, state)
    put(geometry.pair_at, state.reward_sum, run, buffers.reward_sum)
    put_each(geometry.pair_at, state.cost_sum, run, buffers.cost_sum)


@formula
def count(steps, state):
    """Add one episode to the counts and sums."""
    for k in range(steps.pairs.shape[0]):
        p = steps.pairs[k]
        state.visits[p] += 1.0
        state.transition_visits[steps.entries[k]] += 1.0
        state.reward_sum[p] += steps.rewards[k]
        for i in range(state.cost_sum.shape[0]):
            state.cost_sum[i, p] += steps.costs[k, i]


@kernel
def plan_of_logits(geometry, state, policy):
    """policy <- pi_t, of learners that keep its logits."""
    policy_of_logits(geometry, state.logits, policy)
