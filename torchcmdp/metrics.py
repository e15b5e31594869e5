"""Regret and violations of what was played, from exact occupancies under the true transitions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from scipy import stats
from torch import Tensor

from torchcmdp.errors import InvalidInput
from torchcmdp.occupancy import pair_occupancy_of
from torchcmdp.planning import safe_optimum
from torchcmdp.simulator import Simulator
from torchcmdp.trajectory import Trajectory


def expected_value(values: Tensor, occupancy: Tensor) -> Tensor:
    """<v, q>, the expected sum of `values` over an episode: `(...)`.

    Args:
        values, occupancy: `(... x L x S x A)`; batch shapes broadcast.
    """
    return (values * occupancy).sum(dim=(-1, -2, -3))


def episode_regret(rewards: Tensor, comparator: Tensor, occupancy: Tensor) -> Tensor:
    """<r_t, q* - q_t>, one term of the regret (ALGORITHMS section h): `(...)`.

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
    if not 0 < level < 1:
        raise InvalidInput(f"level is {level}; it must lie strictly between 0 and 1.")
    runs = x.shape[0]
    if runs < 2:
        return x.mean(0), torch.full_like(x[0], torch.nan)
    quantile = float(stats.t.ppf((1 + level) / 2, runs - 1))
    return x.mean(0), x.std(0) * (quantile / runs**0.5)


class Tracker:
    """Sums up regret and violations of the policies played in a simulator, and keeps them at chosen episodes.

    The regret compares with the best safe policy for the CMDP's mean rewards and costs, fixed for all episodes. Where no policy
    is safe it is NaN. Sums are kept in float64 whatever the CMDP's type, so that a million episodes add up.

    Attributes:
        feasible: Whether a safe policy exists, `(runs,)`.
        comparator: Its state-action occupancy q*, `(L x S x A)` or `(runs x L x S x A)`.
        updates: How many episodes were summed up.

    Args:
        env: The simulator whose episodes are measured.
        points: How many points will be recorded, if known: room for them is made at once.
    """

    def __init__(self, env: Simulator, points: int | None = None) -> None:
        self.env = env
        optimum = safe_optimum(env.cmdp)
        self.comparator = optimum.occupancy.sum(-1)
        self.feasible = optimum.feasible.expand(env.runs)
        self.updates = 0
        m = env.cmdp.constraints
        # regret, reward, comparator's reward, realised reward; then violation, positive violation and realised cost by constraint
        self._sums = torch.zeros(env.runs, 4 + 3 * m, dtype=torch.float64, device=env.device)
        self._points = self._sums.new_zeros(max(1, points or 16), *self._sums.shape)
        self._episodes: list[int] = []
        self._counts: list[int] = []

    def update(self, policy: Tensor, trajectory: Trajectory | None = None) -> None:
        """Add the episode that the simulator has just played.

        Args:
            policy: The policy that was played, `(runs x L x S x A)` or `(L x S x A)`.
            trajectory: What came of it; needed for the realised sums only.
        """
        env = self.env
        occupancy = pair_occupancy_of(policy.detach().to(env.dtype), env.cmdp.transitions)
        rewards = env.reward_values
        scalars = torch.stack(
            [
                episode_regret(rewards, self.comparator, occupancy).expand(env.runs),
                expected_value(rewards, occupancy).expand(env.runs),
                expected_value(rewards, self.comparator).expand(env.runs),
                self._realised(trajectory),
            ],
            dim=1,
        )
        violation = expected_value(env.cost_values, occupancy.unsqueeze(-4)).expand(env.runs, -1)
        costs = torch.zeros_like(violation) if trajectory is None else trajectory.costs.sum(1)
        self._sums += torch.cat([scalars, violation, violation.clamp_min(0), costs], dim=1)
        self.updates += 1

    def _realised(self, trajectory: Trajectory | None) -> Tensor:
        """Reward along the path, `(runs,)`; zero if there is no trajectory."""
        return self._sums.new_zeros(self.env.runs) if trajectory is None else trajectory.rewards.sum(1)

    def record(self, t: int | None = None) -> None:
        """Keep a point of all curves at episode `t`, by default the number of updates so far."""
        t = self.updates if t is None else int(t)
        if self._episodes and t <= self._episodes[-1]:
            raise InvalidInput(f"A point at episode {t} cannot follow one at episode {self._episodes[-1]}; points must increase.")
        used = len(self._episodes)
        if used == len(self._points):
            self._points = torch.cat([self._points, torch.zeros_like(self._points)])
        self._points[used] = self._sums
        self._episodes.append(t)
        self._counts.append(self.updates)

    @property
    def episodes(self) -> Tensor:
        """At which episodes points were recorded, `(points,)` int64."""
        return torch.tensor(self._episodes, dtype=torch.int64, device=self._sums.device)

    @property
    def regret(self) -> Tensor:
        """R_t, `(runs x points)`; NaN where no policy is safe."""
        return self._curve(0)

    @property
    def reward(self) -> Tensor:
        """Sum of <r_t, q_t>, `(runs x points)`."""
        return self._curve(1)

    @property
    def comparator_reward(self) -> Tensor:
        """Sum of <r_t, q*>, `(runs x points)`."""
        return self._curve(2)

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
        """Everything measured so far, and the comparator, so that resuming does not depend on the LP solver's rounding."""
        return {
            "comparator": self.comparator.clone(),
            "feasible": self.feasible.clone(),
            "sums": self._sums.clone(),
            "points": self._points[: len(self._episodes)].clone(),
            "episodes": torch.tensor(self._episodes, dtype=torch.int64),
            "counts": torch.tensor(self._counts, dtype=torch.int64),
            "updates": torch.tensor(self.updates),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state_dict` returned."""
        for name, own in (("comparator", self.comparator), ("feasible", self.feasible), ("sums", self._sums)):
            if name not in state or state[name].shape != own.shape:
                found = tuple(state[name].shape) if name in state else "nothing"
                raise InvalidInput(f"The tracker's state has {found} for {name}; expected a tensor of shape {tuple(own.shape)}.")
        device = self._sums.device
        self.comparator, self.feasible = state["comparator"].to(self.comparator), state["feasible"].to(device)
        self._sums = state["sums"].to(device).clone()
        self._episodes, self._counts = state["episodes"].tolist(), state["counts"].tolist()
        self.updates = int(state["updates"])
        self._points = torch.zeros(
            max(len(self._points), len(self._episodes)), *self._sums.shape, dtype=torch.float64, device=device
        )
        self._points[: len(self._episodes)] = state["points"].to(device)

    def _curve(self, column: int) -> Tensor:
        return self._points[: len(self._episodes), :, column].T.clone()

    def _block(self, block: int) -> Tensor:
        m = self.env.cmdp.constraints
        return self._points[: len(self._episodes), :, 4 + block * m : 4 + (block + 1) * m].transpose(0, 1).clone()

    def _per_episode(self, sums: Tensor) -> Tensor:
        """Differences of `(runs x points x n)` between points, divided by the episodes in between; NaN where there were none."""
        counts = torch.tensor([0, *self._counts], dtype=torch.float64, device=sums.device).diff()
        return torch.cat([sums[:, :1], sums.diff(dim=1)], dim=1) / counts[:, None]
