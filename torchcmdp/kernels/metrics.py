"""What is measured of one episode of one run: the sums of `torchcmdp.metrics`, of `torchcmdp.comparators`, and the tally."""

from __future__ import annotations

from torchcmdp.kernels.limits import UNSAFE_ABOVE
from torchcmdp.kernels.occupancy import expected_value
from torchcmdp.kernels.options import formula, kernel
from torchcmdp.kernels.processes import largest
from torchcmdp.status import INVALID, MAX_ITERATIONS


@formula
def episode_regret(rewards, comparator, occupancy):
    """<r_t, q* - q_t>."""
    total = 0.0
    for p in range(occupancy.shape[0]):
        total += rewards[0, p] * (comparator[p] - occupancy[p])
    return total


@kernel
def track(run, occupancy, comparator, reward_values, cost_values, steps, sums):
    """Add an episode to a run's row of the tracker's sums, in its order of columns.

    Args:
        occupancy, comparator: `(P,)`.
        reward_values, cost_values: `(1 x P)` and `(m x P)`.
        steps: What was walked.
        sums: `(runs x (5 + 3 m))`.
    """
    m = cost_values.shape[0]
    sums[run, 0] += episode_regret(reward_values, comparator, occupancy)
    sums[run, 1] += expected_value(reward_values, 0, occupancy)
    sums[run, 2] += expected_value(reward_values, 0, comparator)
    realised = 0.0
    for k in range(steps.rewards.shape[0]):
        realised += steps.rewards[k]
    sums[run, 3] += realised
    unsafe = 0.0
    for i in range(m):
        violation = expected_value(cost_values, i, occupancy)
        sums[run, 5 + i] += violation
        sums[run, 5 + m + i] += max(violation, 0.0)
        if violation > UNSAFE_ABOVE:
            unsafe = 1.0
        realised = 0.0
        for k in range(steps.costs.shape[0]):
            realised += steps.costs[k, i]
        sums[run, 5 + 2 * m + i] += realised
    sums[run, 4] += unsafe


@kernel
def track_values(geometry, run, costs, reward_values, cost_values, reward_sum, cost_sum, worst_cost):
    """Add an episode's values to a run's sums in the comparators, `(runs x m x L S A)` each and without m for rewards."""
    for p in range(reward_values.shape[1]):
        place = geometry.pair_at[p]
        reward_sum[run, place] += reward_values[0, p]
        for i in range(cost_values.shape[0]):
            value = cost_values[i, p]
            cost_sum[run, i, place] += value
            worst_cost[run, i, place] = max(worst_cost[run, i, place], largest(costs, value))


def solver_tags(fallback: str) -> tuple[str, ...]:
    """What `tell_solver` reports; `fallback` is what the solver calls the status of a set that is empty."""
    return tuple(f"Solver/{name}" for name in ("iterations", "residual", fallback, "max_iterations", "invalid"))


@formula
def tell_solver(run, iterations, residual, status, fallback, last):
    """The first five diagnostics of a learner with a solver, `(tags x runs)`."""
    last[0, run] = iterations
    last[1, run] = residual
    last[2, run] = 1.0 if status == fallback else 0.0
    last[3, run] = 1.0 if status == MAX_ITERATIONS else 0.0
    last[4, run] = 1.0 if status == INVALID else 0.0


@formula
def tally(run, last, window, total, positive):
    """Add a run's last diagnostics to the sums, `(tags x runs)` each."""
    for j in range(last.shape[0]):
        now = last[j, run]
        window[j, run] += now
        total[j, run] += now
        positive[j, run] += 1.0 if now > 0.0 else 0.0
