"""Greedy: each episode, the best policy of the CMDP that the averages describe, as if they were exact."""

from __future__ import annotations

from torch import Tensor

from torchcmdp.learners.opt_cmdp import OptCMDP
from torchcmdp.safe_set import SafeSet


class Greedy(OptCMDP):
    """OptCMDP without confidence intervals.

    The averages of a pair that was never visited are reward 0, costs 0 and uniform transitions, so nothing makes it curious: it may
    never try the action that it needs, and then its regret is linear.

    Args:
        layout, constraints, runs, dtype, device: As for every `Learner`.
        horizon, delta: Unused, since there are no radii.
        solver, costs: As in `OptCMDP`.
    """

    name = "Greedy"
    hyperparameters = {}
    choices = {}

    def program(self) -> tuple[Tensor, SafeSet]:
        """The averages: rewards `(runs x L x S x A)`, and one kernel with costs."""
        costs = self.cost_mean if self.costs is None else self.costs.optimistic(self)
        rewards = self.reward_mean if self.known_rewards is None else self.known_rewards.expand_as(self.visits)
        return rewards, SafeSet(self.layout, self.kernel, self.kernel, costs)
