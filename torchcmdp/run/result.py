"""What a run measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchcmdp import plotting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class RunResult:
    """What a run measured.

    Attributes:
        episodes: Episodes played at each logging point, `(points,)`.
        regret: Against the best safe policy for the means of fixed processes, or in hindsight, of all episodes up to the last
            point, for changing ones; cumulative, `(runs x points)`; NaN where no policy is safe.
        anytime_regret: Each point against the best safe policy of the episodes up to it; the same for fixed processes.
        alpha_regret: Against alpha times the reward of the best policy, safe or not, up to the last point.
        violation, positive_violation: Cumulative, of the worst constraint, `(runs x points)`.
        realised_violation: The same of the costs met along the paths walked, where `violation` sums the means.
        violation_by_constraint, positive_violation_by_constraint: `(runs x points x m)`.
        rho, alpha: Of all episodes up to the last point, `(runs,)`.
        safe_value, best_value: Reward an episode of the best safe policy and of the best one, safe or not, in the mean over the
            episodes up to the last point, `(runs,)`.
        bounds: The theorems' bounds at the same episodes and the trivial one, `(points,)` each: keys "regret", "violation",
            "positive_violation", "trivial".
        diagnostics: Mean over all episodes of each of the learner's diagnostics, `(runs,)` each.
        counts: In how many episodes each of them was positive, `(runs,)` each.
        config: Everything that determined the numbers.
        completed: False when the run was interrupted.
        seconds: Time spent playing, over all sittings.
    """

    episodes: Tensor
    regret: Tensor
    anytime_regret: Tensor
    alpha_regret: Tensor
    violation: Tensor
    positive_violation: Tensor
    realised_violation: Tensor
    violation_by_constraint: Tensor
    positive_violation_by_constraint: Tensor
    rho: Tensor
    alpha: Tensor
    safe_value: Tensor
    best_value: Tensor
    bounds: dict[str, Tensor]
    diagnostics: dict[str, Tensor]
    counts: dict[str, Tensor]
    config: dict[str, Any]
    completed: bool
    seconds: float

    def count(self, tag: str) -> int | None:
        """In how many episodes, over all runs, a diagnostic was positive; None for a learner that does not report it.

        With "Solver/elastic" the elastic projections, with "Learner/gamma_active" the episodes in which some constraint had
        Gamma > 0, with "Solver/infeasible" the infeasible programs.
        """
        return int(self.counts[tag].sum()) if tag in self.counts else None

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """The figures "regret" and "violation", drawn once for everybody who wants them."""
        return plotting.figures({self.config["learner"]["name"]: self})

    @property
    def elastic_fraction(self) -> float:
        """The share of projections that were elastic; NaN for a learner that does not say."""
        return self._mean("Solver/elastic")

    @property
    def elastic_count(self) -> int | None:
        """How many projections were elastic, over all runs; None for a learner that does not say."""
        return self.count("Solver/elastic")

    @property
    def mean_iterations(self) -> float:
        """Solver iterations per projection; NaN where the learner or its solver does not say."""
        mean = self._mean("Solver/iterations")
        return mean if mean >= 0 else float("nan")  # a solver that does not count reports -1

    def _mean(self, tag: str) -> float:
        return float(self.diagnostics[tag].mean()) if tag in self.diagnostics else float("nan")
