"""What a run measured."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchcmdp import plotting
from torchcmdp.errors import TorchCMDPError
from torchcmdp.metrics import mean_and_interval, worst_constraint
from torchcmdp.run.notices import PAST_HORIZON
from torchcmdp.status import Status

CURVES = (
    *("regret", "anytime_regret", "alpha_regret", "violation", "positive_violation", "unsafe_share"),
    *("violation_by_constraint", "positive_violation_by_constraint"),
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class RunResult:
    """What a run measured, in the user's units where the CMDP has any.

    Attributes:
        episodes: Episodes played at each logging point, `(points,)`.
        regret: Against the best safe policy for the means of fixed processes, or in hindsight, of all episodes up to the last
            point, for changing ones; cumulative, `(runs x points)`; NaN where no policy is safe.
        anytime_regret: Each point against the best safe policy of the episodes up to it; the same for fixed processes.
        alpha_regret: Against alpha times the reward of the best policy, safe or not, up to the last point.
        violation, positive_violation: Cumulative, of the worst constraint, `(runs x points)`.
        realised_violation: The same of the costs met along the paths walked, where `violation` sums the means.
        unsafe_share: Share of the episodes up to each point in which the expected cost of some constraint was above zero, and that
            by more than rounding (1e-9), `(runs x points)`.
        violation_by_constraint, positive_violation_by_constraint, realised_violation_by_constraint: `(runs x points x m)`.
        rho, alpha: Of all episodes up to the last point, `(runs,)`.
        safe_value, best_value: Reward an episode of the best safe policy and of the best one, safe or not, in the mean over the
            episodes up to the last point, `(runs,)`.
        bounds: At the same episodes, `(points,)` each, the bound "trivial", and those that the learner has a theorem for, of
            "regret", "violation", "positive_violation".
        diagnostics: Mean over all episodes of each of the learner's diagnostics, `(runs,)` each.
        counts: In how many episodes each of them was positive, `(runs,)` each.
        units: How the numbers above relate to the normal form of the CMDP, which `scaled` has: "reward_scale" and "reward_offset",
            `(runs,)`, and "cost_scale", `(runs x m)`; empty where the normal form is all there is.
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
    unsafe_share: Tensor
    violation_by_constraint: Tensor
    positive_violation_by_constraint: Tensor
    realised_violation_by_constraint: Tensor
    rho: Tensor
    alpha: Tensor
    safe_value: Tensor
    best_value: Tensor
    bounds: dict[str, Tensor]
    diagnostics: dict[str, Tensor]
    counts: dict[str, Tensor]
    units: dict[str, Tensor]
    config: dict[str, Any]
    completed: bool
    seconds: float

    def __repr__(self) -> str:
        runs, points = self.regret.shape
        played = f"{runs} runs of {int(self.episodes[-1]):,} episodes" + ("" if self.completed else ", interrupted")
        numbers = ", ".join(f"{name} {_with_interval(getattr(self, name)[:, -1])}" for name in ("regret", "violation"))
        return f"RunResult({self.name}: {played}, {points} points; {numbers})"

    @property
    def name(self) -> str:
        """What the learner is called."""
        return str(self.config["learner"]["name"])

    @property
    def scaled(self) -> RunResult:
        """The same in the normal form of the CMDP: rewards in [0, 1] and costs in [-1, 1] a step."""
        if not self.units:
            return self
        reward, cost = self.units["reward_scale"], self.units["cost_scale"]
        shown: dict[str, Any] = {
            name: getattr(self, name) / reward[:, None] for name in ("regret", "anytime_regret", "alpha_regret")
        }
        for name in ("violation", "positive_violation", "realised_violation"):
            shown[f"{name}_by_constraint"] = getattr(self, f"{name}_by_constraint") / cost[:, None]
            shown[name] = worst_constraint(shown[f"{name}_by_constraint"])
        for name in ("safe_value", "best_value"):
            shown[name] = (getattr(self, name) - self.units["reward_offset"]) / reward
        bounds = {name: bound / (cost.max() if "violation" in name else reward.max()) for name, bound in self.bounds.items()}
        return replace(self, **shown, bounds=bounds, units={})

    def summary(self) -> str:
        """A table to read: what was measured at the last point, with 95% intervals over runs, and what happened how often."""
        runs, _ = self.regret.shape
        rows = [("learner", self.name), ("runs", f"{runs:,}"), ("after episode", f"{int(self.episodes[-1]):,}")]
        rows += [] if self.completed else [("of episodes", f"{self.config['episodes']:,}, interrupted")]
        for name in ("regret", "violation", "positive_violation"):
            rows.append((name.replace("_", " "), _with_interval(getattr(self, name)[:, -1])))
        if self.unsafe_runs:
            rows.append(("runs without a safe policy", f"{self.unsafe_runs:,}"))
        counted = [tag for tag in self.counts if tag.removeprefix("Solver/").upper() in Status.__members__ or tag == PAST_HORIZON]
        rows += [(f"episodes with {tag}", f"{self.count(tag):,} of {runs * int(self.episodes[-1]):,}") for tag in counted]
        rows.append(("time", f"{self.seconds:.1f} s"))
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Regret, violation and positive violation side by side, with 95% bands; also written to `path`, if one is given."""
        figure = plotting.draw(plotting.panels({self.name: self}))
        if path is not None:
            plotting.save(path, figure)
        return figure

    def to_pandas(self) -> Any:
        """A `DataFrame` with a row for each run and logging point and a column for each curve, by constraint where it has them."""
        try:
            import pandas
        except ImportError:
            raise TorchCMDPError("to_pandas needs pandas, which is not installed: pip install 'torchcmdp[pandas]'.") from None
        runs, points = self.regret.shape
        columns: dict[str, Any] = {}
        for name in CURVES:
            curve = getattr(self, name).cpu()
            if curve.dim() == 2:
                columns[name] = curve.flatten().numpy()
            else:
                each = enumerate(curve.unbind(-1))
                columns |= {f"{name.removesuffix('_by_constraint')}_{i}": values.flatten().numpy() for i, values in each}
        index = pandas.MultiIndex.from_product([range(runs), self.episodes.tolist()], names=["run", "episode"])
        return pandas.DataFrame(columns, index=index)

    def count(self, tag: str) -> int | None:
        """In how many episodes, over all runs, a diagnostic was positive; None for a learner that does not report it.

        With "Solver/elastic" the elastic projections, with "Learner/gamma_active" the episodes in which some constraint had
        Gamma > 0, with "Solver/infeasible" the infeasible programs.
        """
        return int(self.counts[tag].sum()) if tag in self.counts else None

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """The figures "regret" and "violation", drawn once for everybody who wants them."""
        return plotting.figures({self.name: self})

    @property
    def unsafe_runs(self) -> int:
        """In how many runs no policy is safe, so that their regret is NaN."""
        return int((self.regret[:, -1].isnan() & ~self.rho.isnan()).sum())

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


def _with_interval(values: Tensor) -> str:
    """The mean over the runs, with the half-width of its 95% interval where there are several."""
    mean, half = (float(x) for x in mean_and_interval(values))
    return f"{mean:,.4g}" if half != half else f"{mean:,.4g} ± {half:,.2g}"
