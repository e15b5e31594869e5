"""Visit counts, and the sums of what was seen, of one run: `torchcmdp.learners.empirical` compiled."""

from __future__ import annotations

from torchcmdp.kernels.occupancy import policy_of_logits
from torchcmdp.kernels.options import formula, kernel
from torchcmdp.kernels.padding import move, move_each


@formula
def move_visits(geometry, run, buffers, state, back):
    """N and M of a run, from the buffers or `back` into them."""
    move(geometry.entry_at, buffers.transition_visits, run, state.transition_visits, back)
    move(geometry.pair_at, buffers.visits, run, state.visits, back)


@formula
def move_sums(geometry, run, buffers, state, back):
    """N, M, and the sums of rewards and costs of a run, from the buffers or `back` into them."""
    move_visits(geometry, run, buffers, state, back)
    move(geometry.pair_at, buffers.reward_sum, run, state.reward_sum, back)
    move_each(geometry.pair_at, buffers.cost_sum, run, state.cost_sum, back)


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
