"""S-OPS, safe optimistic policy search: WC-OPS's mirror descent, mixed with a baseline so that no episode violates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from torchcmdp.baselines import baseline_weight
from torchcmdp.confidence import CONFIDENCE_KINDS, upper_occupancy_visited
from torchcmdp.costs import MeanCosts
from torchcmdp.learners.base import Learner
from torchcmdp.learners.guarded import Guarded
from torchcmdp.learners.wcops import WCOPS
from torchcmdp.trajectory import Trajectory


def safe_step(learner: Learner, horizon: float) -> float:
    """sqrt(L ln(8 m |X|^2 |A| T / delta) / (T |X| |A|)), the step and the implicit exploration for a horizon T."""
    layout, m = learner.layout, max(learner.constraints, 1)
    pairs = layout.total_states * layout.actions
    logarithm = math.log(8 * m * layout.total_states * pairs * horizon / learner.delta)
    return math.sqrt(layout.layers * logarithm / (horizon * pairs))


def _step(learner: Learner) -> float:
    return safe_step(learner, learner.horizon)


class SOPS(Guarded, WCOPS):
    """S-OPS (Stradi, Castiglioni, Marchesi and Gatti, ICML 2025) in every run of a batch.

    With probability 1 - delta no episode's expected cost is above zero, from the first on, for stochastic costs and any rewards;
    and regret is O(sqrt(T) / d), with d the margin of the baseline. WC-OPS's mirror descent over an optimistic set gives its own
    policy; the most that this policy may cost, by pessimistic costs and the worst plausible kernel, gives the probability of the
    baseline.

    Args:
        layout, constraints, horizon, delta, runs, dtype, device: As for every `Learner`.
        baseline, seed, first_run, distinct_runs: As for every `Guarded` learner.
        eta: Step, sqrt(L ln(8 m |X|^2 |A| T / delta) / (T |X| |A|)) by default. This and the following: a float, or one a run.
        gamma: Implicit exploration, the same by default.
        bonus_scale, radius_scale: Multiply the cost bonus and the transition radii; below one the promise is weaker.
        share, loss, confidence, solver: As in `WCOPS`.
        costs: What it believes of the costs, on both sides; `MeanCosts()` by default, and the promise is about that.
    """

    name = "S-OPS"
    theorems: ClassVar[Sequence[str]] = ()  # `theory` has WC-OPS's bounds
    hyperparameters = {"eta": _step, "gamma": _step, "bonus_scale": 1.0, "radius_scale": 1.0, "share": None}
    choices = {"loss": ("paper", "doubly-robust"), "confidence": CONFIDENCE_KINDS}
    usual_costs = MeanCosts

    @property
    def own_policy(self) -> Tensor:
        """The policy of qhat_t, `(runs x L x S x A)`."""
        return self._kept("own_policy", self._policy, self.log_occupancy)

    @property
    def baseline_weight(self) -> Tensor:
        """lambda of the mixing rule, `(runs,)`."""
        return self._kept("baseline_weight", self._weigh, *self._sources)

    @property
    def _sources(self) -> tuple[Tensor, ...]:
        """What lambda follows from."""
        return self.log_occupancy, self.visits, self.transition_visits, self.costs.cost_estimate, self.baseline_bounds

    def _weigh(self) -> Tensor:
        return baseline_weight(self.worst_costs(self.own_policy), self.baseline_bounds)

    def upper_occupancy(self, trajectory: Trajectory) -> Tensor:
        """u_t of the mixture at the visited pairs, `(runs x L)`: the sum of both policies', weighted, at least the mixture's."""
        mixture = self.mixture
        policies, weights = mixture.policies.transpose(0, 1), mixture.weights.T.unsqueeze(-1)
        both = [part.expand(2, *part.shape) for part in (trajectory.states, trajectory.actions)]
        return (weights * upper_occupancy_visited(self.kernels, policies, self.layout, *both)).sum(0)
