"""Regret and violations of what was played, from exact occupancies under the true transitions."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from torchcmdp.baselines import Mixture
from torchcmdp.comparators import Comparators, check_entry, stacked
from torchcmdp.errors import InvalidInput
from torchcmdp.kernels.engine import engine
from torchcmdp.kernels.limits import UNSAFE_ABOVE
from torchcmdp.kernels.memory import compact, room
from torchcmdp.occupancy import expected_value, pair_occupancy_of, shaped_policy
from torchcmdp.planning import alpha_of
from torchcmdp.protocols import Axes, EnvironmentLike
from torchcmdp.simulator import Simulator
from torchcmdp.statistics import growth_exponent, mean_and_interval, worst_constraint
from torchcmdp.trajectory import Trajectory
from torchcmdp.units import Units, units_of

__all__ = ["Curves", "Tracker", "episode_regret", "in_units", "is_unsafe"]
__all__ += ["growth_exponent", "mean_and_interval", "worst_constraint"]

# What is summed up over the episodes, one number a run and one for each constraint.
SUMS = ("regret", "reward", "comparator_reward", "realised_reward", "unsafe")
SUMS_BY_CONSTRAINT = ("violation", "positive_violation", "realised_cost")

# What `Curves.curves` returns beside rho and alpha.
CURVES = (
    *("regret", "anytime_regret", "alpha_regret", "violation", "positive_violation", "violation_by_constraint"),
    *("positive_violation_by_constraint", "comparator_reward", "best_reward", "episode_return", "episode_cost"),
    *("realised_violation", "realised_violation_by_constraint", "unsafe_share"),
)


def episode_regret(rewards: Tensor, comparator: Tensor, occupancy: Tensor) -> Tensor:
    """<r_t, q* - q_t>, one term of the regret: `(...)`, of `(... x L x S x A)` each; batch shapes broadcast."""
    return expected_value(rewards, comparator - occupancy)


def is_unsafe(costs: Tensor) -> Tensor:
    """Whether the cost of some constraint, `(... x m)`, exceeds zero by more than rounding, 1e-9: `(...)`."""
    return (costs > UNSAFE_ABOVE).any(-1)


def _summed(name: str, meaning: str) -> property:
    """The curve of one of the sums."""
    return property(lambda curves: curves._sum(name), doc=meaning)


def _worst(name: str, meaning: str) -> property:
    """The curve of one of the sums by constraint, of the worst constraint."""
    return property(lambda curves: worst_constraint(curves._sum(name)), doc=meaning)


def _since(name: str, meaning: str) -> property:
    """The mean of one of the sums over the episodes since the previous point."""
    return property(lambda curves: curves._per_episode(name), doc=meaning)


def _compared(name: str, meaning: str) -> property:
    """What the comparators know."""
    return property(lambda curves: getattr(curves.comparators, name), doc=meaning)


class Curves:
    """Sums over the episodes of an environment's runs, kept at chosen episodes, and the curves that follow from them.

    Sums are in float64 whatever the CMDP's type, so that a million episodes add up. Memory grows with the number of points, not
    with that of episodes.

    Attributes:
        updates: How many episodes were summed up.
        sums: All sums up to now, `(runs x (5 + 3 m))` in the order of `SUMS` and `SUMS_BY_CONSTRAINT`.
        comparators: What the policies are compared with.
    """

    reward = _summed("reward", "Sum of <r_t, q_t>, `(runs x points)`.")
    violation_by_constraint = _summed("violation", "Sum of <g_t, q_t>, `(runs x points x m)`.")
    positive_violation_by_constraint = _summed("positive_violation", "Sum of [<g_t, q_t>]^+, `(runs x points x m)`.")
    realised_reward = _summed("realised_reward", "Rewards along the paths walked, of updates with a trajectory, `(runs x points)`.")
    realised_cost = _summed("realised_cost", "Costs along the paths walked, of updates with a trajectory, `(runs x points x m)`.")
    realised_violation_by_constraint = realised_cost  # the name that results have for it
    violation = _worst("violation", "V_t, the largest over the constraints of the sum of <g_t, q_t>, `(runs x points)`.")
    positive_violation = _worst("positive_violation", "The largest over the constraints of the sum of [<g_t, q_t>]^+.")
    realised_violation = _worst("realised_cost", "The largest over the constraints of the costs met along the paths walked.")
    episode_return = _since("reward", "Mean of <r_t, q_t> over the episodes since the previous point, `(runs x points)`.")
    episode_cost = _since("violation", "Mean of <g_t, q_t> over the episodes since the previous point, `(runs x points x m)`.")
    comparator = _compared("safe", "q*, the state-action occupancy of the best safe policy, `([runs x] L x S x A)`.")
    feasible = _compared("feasible", "Whether a safe policy exists, `(runs,)`.")
    rho = _compared("rho", "How safe the safest policy is in its worst pair and episode, up to the last point, `(runs,)`.")

    def __init__(self, env: EnvironmentLike, comparators: Comparators) -> None:
        self.comparators, self.updates = comparators, 0
        self._units = units_of(env)
        self._columns: dict[str, int | slice] = {name: j for j, name in enumerate(SUMS)}
        end = len(SUMS)
        for name in SUMS_BY_CONSTRAINT:
            self._columns[name], end = slice(end, end + env.constraints), end + env.constraints
        self.sums = torch.zeros(env.runs, end, dtype=torch.float64, device=env.device)
        self._points: list[Tensor] = []
        self._episodes: list[int] = []
        self._counts: list[int] = []
        self._first = 0  # the curves begin with this point

    def _add(self, terms: Mapping[str, Tensor]) -> None:
        """Add an episode's terms: of every sum, by its name, `(runs,)` or `(runs x m)`."""
        self.sums += torch.cat([terms[name][:, None] if name in SUMS else terms[name] for name in self._columns], dim=1)
        self.updates += 1

    def record(self, t: int | None = None) -> None:
        """Keep a point of all curves at episode `t`, by default the number of updates so far.

        Where a process changes this solves a linear program for every run.
        """
        t = self.updates if t is None else int(t)
        if self._episodes and t <= self._episodes[-1]:
            raise InvalidInput(f"A point at episode {t} cannot follow one at episode {self._episodes[-1]}; points must increase.")
        self._points.append(self.sums.clone())
        self._episodes.append(t)
        self._counts.append(self.updates)
        self.comparators.record(self.updates)

    def total(self, name: str) -> Tensor:
        """One of the sums up to now, by the name of its curve: `(runs,)`, or `(runs x m)` for a sum by constraint."""
        return self.sums[:, self._columns[name.removesuffix("_by_constraint")]].clone()

    def curves(self) -> dict[str, Tensor]:
        """All that `run` keeps, by the names below: rho and alpha, `(runs,)`, and the curves, in the user's units.

        The properties of this class, rho and alpha are in the normal form of the CMDP.
        """
        found = {"rho": self.rho, "alpha": self.alpha, **{name: getattr(self, name) for name in CURVES}}
        if self._units is None:
            return found
        return in_units(found, self._units, self._played)

    @property
    def _played(self) -> Tensor:
        """Episodes up to each point, `(points,)`."""
        return torch.tensor(self._counts[self._first :], dtype=torch.float64, device=self.sums.device)

    def newest(self) -> dict[str, Tensor]:
        """The same at the last point alone, `(runs [x m])` each; its cost does not grow with the number of points."""
        last = copy.copy(self)
        last._first = len(self._counts) - 1
        return {name: value if value.dim() == 1 else value[:, -1] for name, value in last.curves().items()}

    @property
    def episodes(self) -> Tensor:
        """At which episodes points were recorded, `(points,)` int64."""
        return torch.tensor(self._episodes, dtype=torch.int64, device=self.sums.device)

    @property
    def alpha(self) -> Tensor:
        """rho^+ / (1 + rho^+), `(runs,)`."""
        return alpha_of(self.rho)

    @property
    def regret(self) -> Tensor:
        """R_t, `(runs x points)`; NaN where no policy is safe."""
        return self.comparator_reward - self.reward if self.comparators.changing else self._sum("regret")

    @property
    def anytime_regret(self) -> Tensor:
        """t OPT_t minus the sum of <r_t, q_t>, each point compared with the best safe policy of its own past, `(runs x points)`.

        The same as `regret` where no process changes, and at the last point.
        """
        changing = self.comparators.changing
        return self.comparators.anytime_reward(self._first) - self.reward if changing else self.regret

    @property
    def alpha_regret(self) -> Tensor:
        """alpha times the sum of <r_t, q> for the best policy, safe or not, minus the sum of <r_t, q_t>, `(runs x points)`."""
        return self.alpha.to(torch.float64)[:, None] * self.best_reward - self.reward  # type: ignore[no-any-return]

    @property
    def comparator_reward(self) -> Tensor:
        """Sum of <r_t, q*>, `(runs x points)`."""
        changing = self.comparators.changing
        return self._reward_of(self.comparators.safe) if changing else self._sum("comparator_reward")

    @property
    def best_reward(self) -> Tensor:
        """Sum of <r_t, q> for the best policy of all episodes up to the last point, safe or not, `(runs x points)`."""
        return self._reward_of(self.comparators.best)

    @property
    def unsafe_share(self) -> Tensor:
        """Share of the episodes so far in which <g_t, q_t> was above zero for some constraint, `(runs x points)`."""
        return self._sum("unsafe") / self._played

    def state_dict(self) -> dict[str, Tensor]:
        """Everything measured so far, and what it is compared with."""
        return {
            **self.comparators.state_dict(),
            "sums": self.sums.clone(),
            "points": stacked(self._points, self.sums),
            "episodes": torch.tensor(self._episodes, dtype=torch.int64),
            "counts": torch.tensor(self._counts, dtype=torch.int64),
            "updates": torch.tensor(self.updates),
        }

    def state_axes(self) -> Axes:
        """Where the runs are in each entry."""
        return {**self.comparators.state_axes(), "sums": 0, "points": 1, **dict.fromkeys(("episodes", "counts", "updates"))}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state_dict` returned."""
        counts = state["counts"].tolist() if "counts" in state else []
        self.comparators.load_state_dict(state, len(counts))
        for name, shape in {"counts": (len(counts),), "episodes": (len(counts),), "updates": ()}.items():
            check_entry(state, name, shape)
        check_entry(state, "sums", tuple(self.sums.shape))
        check_entry(state, "points", (len(counts), *self.sums.shape))
        self.sums = state["sums"].to(self.sums).clone()
        self._points = list(state["points"].to(self.sums).unbind(0))
        self._episodes, self._counts, self.updates = state["episodes"].tolist(), counts, int(state["updates"])

    def _sum(self, name: str) -> Tensor:
        """`(runs x points)`, or `(runs x points x m)` for a sum by constraint."""
        return stacked(self._points[self._first :], self.sums)[..., self._columns[name]].transpose(0, 1)

    def _reward_of(self, occupancy: Tensor) -> Tensor:
        return self.comparators.reward_of(occupancy, self._counts, self._first)

    def _per_episode(self, name: str) -> Tensor:
        """Differences of a sum between points, divided by the episodes in between; NaN where there were none."""
        first, before, count = self._first, torch.zeros_like(self.sums), 0
        if first:
            before, count = self._points[first - 1], self._counts[first - 1]
        sums = torch.stack([before, *self._points[first:]])[..., self._columns[name]].transpose(0, 1)
        episodes = torch.tensor([count, *self._counts[first:]], dtype=torch.float64, device=sums.device).diff()
        return sums.diff(dim=1) / (episodes if name in SUMS else episodes[:, None])


def in_units(curves: Mapping[str, Tensor], units: Units, counts: Tensor) -> dict[str, Tensor]:
    """Curves in normal form, by the names of `CURVES`, as the user's units have them; rho and alpha stay what they are.

    `(runs x points [x m])`; `counts` are the episodes up to each point, `(points,)`.
    """
    scale, offset = (each.reshape(-1, 1) for each in (units.reward_scale, units.reward_offset))
    cost_scale, budget = (each.reshape(-1, 1, each.shape[-1]) for each in (units.cost_scale, units.budget))
    shown = dict(curves)
    for name in ("regret", "anytime_regret", "alpha_regret"):
        shown[name] = curves[name] * scale
    for name in ("comparator_reward", "best_reward"):
        shown[name] = curves[name] * scale + counts * offset
    shown["episode_return"] = curves["episode_return"] * scale + offset
    shown["episode_cost"] = budget + units.sign * cost_scale * curves["episode_cost"]
    for name in ("violation", "positive_violation", "realised_violation"):
        shown[f"{name}_by_constraint"] = curves[f"{name}_by_constraint"] * cost_scale
        shown[name] = worst_constraint(shown[f"{name}_by_constraint"])
    return shown


class Tracker(Curves):
    """Sums up regret and violations of the policies played in a simulator, and keeps them at chosen episodes.

    The regret compares with one safe policy for all episodes. Where neither process changes, it is the best for the CMDP's mean
    rewards and costs. Where one does, it is the best in hindsight: for the mean rewards and mean costs of all episodes up to the
    last recorded point. Where no policy is safe the regret is NaN.
    """

    def __init__(self, env: Simulator) -> None:
        super().__init__(env, Comparators(env))
        self.env = env

    measures_mixtures = True

    def update(self, policy: Tensor | Mixture, trajectory: Trajectory | None = None) -> None:
        """Add the episode that the simulator has just played.

        Args:
            policy: The policy that was played, `(runs x L x S x A)` or `(L x S x A)`; or the mixture that it was drawn from, whose
                expectations are then measured, exactly.
            trajectory: What came of it; needed for the realised sums only.
        """
        env, runs = self.env, self.env.runs
        if not isinstance(policy, Mixture):
            policy = shaped_policy(policy, env.layout, runs)
        seen = [] if trajectory is None else [trajectory.rewards, trajectory.costs]
        if isinstance(policy, Mixture):
            occupancy = policy.occupancy(env.cmdp.transitions, env.layout).detach()
        elif engine() != "torch" and _flattenable(policy, env.cmdp.transitions, env.reward_values, env.cost_values, *seen):
            self._update_compiled(policy, seen)
            return
        else:
            # what stands in the padding, such as the NaN of logits that are all -inf, is nobody's policy
            own = torch.where(env.layout.pair_mask(policy.device), policy.detach(), 0).to(env.dtype)
            occupancy = pair_occupancy_of(own, env.cmdp.transitions, env.layout)
        rewards, comparator = env.reward_values, self.comparators.safe
        violation = expected_value(env.cost_values, occupancy.unsqueeze(-4)).expand(runs, -1)
        self._add(
            {
                # of a changing process the regret and the comparator's reward mean nothing: its comparator is not known yet
                "regret": episode_regret(rewards, comparator, occupancy).expand(runs),
                "reward": expected_value(rewards, occupancy).expand(runs),
                "comparator_reward": expected_value(rewards, comparator).expand(runs),
                "realised_reward": self.sums.new_zeros(runs) if trajectory is None else trajectory.rewards.sum(1),
                "unsafe": is_unsafe(violation),
                "violation": violation,
                "positive_violation": violation.clamp_min(0),
                "realised_cost": torch.zeros_like(violation) if trajectory is None else trajectory.costs.sum(1),
            }
        )
        self.comparators.update()

    def _update_compiled(self, policy: Tensor, seen: list[Tensor]) -> None:
        """`update` in one compiled call; `seen` has the rewards and costs of the trajectory, if there is one."""
        from torchcmdp.kernels.block import empty_stage
        from torchcmdp.kernels.geometry import geometry_of
        from torchcmdp.kernels.single import track_range
        from torchcmdp.kernels.threads import over_batch

        env, m = self.env, self.env.constraints
        layout, geometry = env.layout, geometry_of(env.layout)
        rewards, costs = seen or (self.sums.new_zeros(env.runs, layout.layers), self.sums.new_zeros(env.runs, layout.layers, m))
        # as many rows as there are runs, or one for all
        tables = (policy.flatten(-3), env.reward_values.flatten(-3).unsqueeze(-2), env.cost_values.flatten(-3))
        rows = (table if table.dim() == axes else table.unsqueeze(0) for table, axes in zip(tables, (2, 3, 3), strict=True))
        arrays = [tensor.detach().contiguous().numpy() for tensor in (*rows, rewards, costs)]
        true, best = compact(geometry, env.cmdp.transitions, 4), compact(geometry, self.comparators.safe, 3)
        sums = self.sums.numpy()

        def piece(start: int, stop: int) -> None:
            stage = room((layout, m), lambda: empty_stage(geometry, m))
            track_range(start, stop, geometry, true, best, *arrays, sums, stage)

        over_batch(piece, env.runs, len(geometry.successor))
        self.updates += 1
        self.comparators.update()


def _flattenable(*tensors: Tensor) -> bool:
    """Whether kernels can read these: float64 on the CPU."""
    return all(tensor.dtype == torch.float64 and tensor.device.type == "cpu" for tensor in tensors)
