"""Regret and violations of what was played, from exact occupancies under the true transitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchcmdp.comparators import Comparators, check_entry
from torchcmdp.errors import InvalidInput, check_delta
from torchcmdp.occupancy import expected_value, pair_occupancy_of
from torchcmdp.planning import alpha_of
from torchcmdp.simulator import Simulator
from torchcmdp.trajectory import Trajectory

__all__ = ["Tracker", "episode_regret", "growth_exponent", "mean_and_interval", "worst_constraint"]


def episode_regret(rewards: Tensor, comparator: Tensor, occupancy: Tensor) -> Tensor:
    """<r_t, q* - q_t>, one term of the regret: `(...)`.

    Args:
        rewards, comparator, occupancy: `(... x L x S x A)`; batch shapes broadcast.
    """
    return expected_value(rewards, comparator - occupancy)


def worst_constraint(sums: Tensor) -> Tensor:
    """The largest over the constraints of `(... x m)`: `(...)`; zero without constraints."""
    return sums.amax(-1) if sums.shape[-1] else sums.new_zeros(sums.shape[:-1])


def mean_and_interval(x: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Mean over runs and the half-width of its confidence interval, t_{n-1} * s / sqrt(n); NaN for a single run.

    Args:
        x: `(runs x ...)`.
        level: Confidence level, in (0, 1).
    """
    check_delta(level, "level")
    runs = x.shape[0]
    if runs < 2:
        return x.mean(0), torch.full_like(x[0], torch.nan)
    from scipy.special import stdtrit  # Student's quantile; scipy is slow to import, and only intervals need it

    quantile = float(stdtrit(runs - 1, (1 + level) / 2))
    return x.mean(0), x.std(0) * (quantile / runs**0.5)


def growth_exponent(episodes: Tensor, curve: Tensor, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """How fast a curve grows: b in curve = c t^b over the last half of its points, the mean over runs and its half-width.

    Of every run the slope of log(curve) over log(t) by least squares, at those of the points where the curve is positive. Both
    results are NaN if some run has fewer than two: such a run has no exponent, and leaving it out would flatter the others.

    Args:
        episodes: t at each point, `(points,)`.
        curve: `(runs x points)`.
        level: Confidence level of the interval.
    """
    half = curve.shape[-1] // 2
    t, y = episodes[half:].to(curve), curve[:, half:]
    used = y > 0
    x, y = t.log().expand_as(y), torch.where(used, y, 1).log()
    count = used.sum(-1, keepdim=True)
    x = torch.where(used, x - (x * used).sum(-1, keepdim=True) / count, 0)
    slopes = (x * y).sum(-1) / x.square().sum(-1)
    return mean_and_interval(torch.where(count.squeeze(-1) > 1, slopes, torch.nan), level)


class Tracker:
    """Sums up regret and violations of the policies played in a simulator, and keeps them at chosen episodes.

    The regret compares with one safe policy for all episodes. Where neither process changes, it is the best for the CMDP's mean
    rewards and costs. Where one does, it is the best in hindsight: for the mean rewards and mean costs of all episodes up to the
    last recorded point. Where no policy is safe the regret is NaN. Sums are kept in float64 whatever the CMDP's type, so that a
    million episodes add up. Memory grows with the number of points, not with that of episodes.

    Attributes:
        updates: How many episodes were summed up.

    Args:
        env: The simulator whose episodes are measured.
        points: How many points will be recorded, if known: room for them is made at once.
    """

    def __init__(self, env: Simulator, points: int | None = None) -> None:
        self.env = env
        self._comparators = self._make_comparators(points or 16)
        self.updates = 0
        m = env.constraints
        # regret, reward, comparator's reward, realised reward; then violation, positive violation and realised cost by constraint
        self._sums = torch.zeros(env.runs, 4 + 3 * m, dtype=torch.float64, device=env.device)
        self._points = self._sums.new_zeros(max(1, points or 16), *self._sums.shape)
        self._episodes: list[int] = []
        self._counts: list[int] = []

    def _make_comparators(self, points: int) -> Any:
        """What the policies are compared with; a subclass for environments without a known CMDP has something else."""
        return Comparators(self.env, points)

    def update(self, policy: Tensor, trajectory: Trajectory | None = None) -> None:
        """Add the episode that the simulator has just played.

        Args:
            policy: The policy that was played, `(runs x L x S x A)` or `(L x S x A)`.
            trajectory: What came of it; needed for the realised sums only.
        """
        env = self.env
        occupancy = pair_occupancy_of(policy.detach().to(env.dtype), env.cmdp.transitions)
        rewards, comparator = env.reward_values, self._comparators.safe
        scalars = torch.stack(
            [
                # of a changing process the first and third mean nothing: its comparator is not known yet
                episode_regret(rewards, comparator, occupancy).expand(env.runs),
                expected_value(rewards, occupancy).expand(env.runs),
                expected_value(rewards, comparator).expand(env.runs),
                self._realised(trajectory),
            ],
            dim=1,
        )
        violation = expected_value(env.cost_values, occupancy.unsqueeze(-4)).expand(env.runs, -1)
        costs = torch.zeros_like(violation) if trajectory is None else trajectory.costs.sum(1)
        self._sums += torch.cat([scalars, violation, violation.clamp_min(0), costs], dim=1)
        self._comparators.update()
        self.updates += 1

    def _realised(self, trajectory: Trajectory | None) -> Tensor:
        """Reward along the path, `(runs,)`; zero if there is no trajectory."""
        return self._sums.new_zeros(self.env.runs) if trajectory is None else trajectory.rewards.sum(1)

    def record(self, t: int | None = None) -> None:
        """Keep a point of all curves at episode `t`, by default the number of updates so far.

        Where a process changes this solves a linear program for every run.
        """
        t = self.updates if t is None else int(t)
        if self._episodes and t <= self._episodes[-1]:
            raise InvalidInput(f"A point at episode {t} cannot follow one at episode {self._episodes[-1]}; points must increase.")
        used = len(self._episodes)
        if used == len(self._points):
            self._points = torch.cat([self._points, torch.zeros_like(self._points)])
        self._points[used] = self._sums
        self._episodes.append(t)
        self._counts.append(self.updates)
        self._comparators.record(self.updates)

    @property
    def episodes(self) -> Tensor:
        """At which episodes points were recorded, `(points,)` int64."""
        return torch.tensor(self._episodes, dtype=torch.int64, device=self._sums.device)

    @property
    def comparator(self) -> Tensor:
        """q*, the state-action occupancy of the best safe policy, `(L x S x A)` or `(runs x L x S x A)`."""
        return self._comparators.safe

    @property
    def feasible(self) -> Tensor:
        """Whether a safe policy exists, `(runs,)`."""
        return self._comparators.feasible

    @property
    def rho(self) -> Tensor:
        """How safe the safest policy is in its worst pair and episode, up to the last point, `(runs,)`."""
        return self._comparators.rho

    @property
    def alpha(self) -> Tensor:
        """rho^+ / (1 + rho^+), `(runs,)`."""
        return alpha_of(self.rho)

    @property
    def regret(self) -> Tensor:
        """R_t, `(runs x points)`; NaN where no policy is safe."""
        return self.comparator_reward - self.reward if self._comparators.changing else self._curve(0)

    @property
    def anytime_regret(self) -> Tensor:
        """t OPT_t minus the sum of <r_t, q_t>, each point compared with the best safe policy of its own past, `(runs x points)`.

        The same as `regret` where no process changes, and at the last point.
        """
        return self._comparators.anytime_reward - self.reward if self._comparators.changing else self.regret

    @property
    def alpha_regret(self) -> Tensor:
        """alpha times the sum of <r_t, q> for the best policy, safe or not, minus the sum of <r_t, q_t>, `(runs x points)`."""
        return self.alpha.to(torch.float64)[:, None] * self.best_reward - self.reward

    @property
    def reward(self) -> Tensor:
        """Sum of <r_t, q_t>, `(runs x points)`."""
        return self._curve(1)

    @property
    def comparator_reward(self) -> Tensor:
        """Sum of <r_t, q*>, `(runs x points)`."""
        return self._comparators.reward_of(self.comparator) if self._comparators.changing else self._curve(2)

    @property
    def best_reward(self) -> Tensor:
        """Sum of <r_t, q> for the best policy of all episodes up to the last point, safe or not, `(runs x points)`."""
        return self._comparators.reward_of(self._comparators.best)

    @property
    def realised_reward(self) -> Tensor:
        """Rewards summed along the paths that were walked, `(runs x points)`; counts only updates with a trajectory."""
        return self._curve(3)

    @property
    def violation(self) -> Tensor:
        """V_t, the largest over the constraints of the sum of <g_t, q_t>, `(runs x points)`."""
        return worst_constraint(self.violation_by_constraint)

    @property
    def positive_violation(self) -> Tensor:
        """The largest over the constraints of the sum of [<g_t, q_t>]^+, `(runs x points)`."""
        return worst_constraint(self.positive_violation_by_constraint)

    @property
    def violation_by_constraint(self) -> Tensor:
        """Sum of <g_t, q_t>, `(runs x points x m)`."""
        return self._block(0)

    @property
    def positive_violation_by_constraint(self) -> Tensor:
        """Sum of [<g_t, q_t>]^+, `(runs x points x m)`."""
        return self._block(1)

    @property
    def realised_cost(self) -> Tensor:
        """Costs summed along the paths that were walked, `(runs x points x m)`; counts only updates with a trajectory."""
        return self._block(2)

    @property
    def episode_return(self) -> Tensor:
        """Mean of <r_t, q_t> over the episodes since the previous point, `(runs x points)`."""
        return self._per_episode(self.reward.unsqueeze(-1)).squeeze(-1)

    @property
    def episode_cost(self) -> Tensor:
        """Mean of <g_t, q_t> over the episodes since the previous point, `(runs x points x m)`."""
        return self._per_episode(self.violation_by_constraint)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything measured so far, and what it is compared with."""
        return {
            **self._comparators.state_dict(),
            "sums": self._sums.clone(),
            "points": self._points[: len(self._episodes)].clone(),
            "episodes": torch.tensor(self._episodes, dtype=torch.int64),
            "counts": torch.tensor(self._counts, dtype=torch.int64),
            "updates": torch.tensor(self.updates),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state_dict` returned."""
        counts = state["counts"].tolist() if "counts" in state else []
        self._comparators.load_state_dict(state, counts)
        check_entry(state, "sums", tuple(self._sums.shape))
        device = self._sums.device
        self._sums = state["sums"].to(device).clone()
        self._episodes, self._counts = state["episodes"].tolist(), counts
        self.updates = int(state["updates"])
        self._points = torch.zeros(
            max(len(self._points), len(self._episodes)), *self._sums.shape, dtype=torch.float64, device=device
        )
        self._points[: len(self._episodes)] = state["points"].to(device)

    def _curve(self, column: int) -> Tensor:
        return self._points[: len(self._episodes), :, column].T.clone()

    def _block(self, block: int) -> Tensor:
        m = self.env.constraints
        return self._points[: len(self._episodes), :, 4 + block * m : 4 + (block + 1) * m].transpose(0, 1).clone()

    def _per_episode(self, sums: Tensor) -> Tensor:
        """Differences of `(runs x points x n)` between points, divided by the episodes in between; NaN where there were none."""
        counts = torch.tensor([0, *self._counts], dtype=torch.float64, device=sums.device).diff()
        return torch.cat([sums[:, :1], sums.diff(dim=1)], dim=1) / counts[:, None]
