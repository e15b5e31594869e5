"""WC-OPS, weighted constrained optimistic policy search: OMD over occupancies in an optimistic safe set (Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchcmdp.confidence import (
    CONFIDENCE_KINDS,
    KernelSet,
    confidence_set,
    upper_occupancy,
    upper_occupancy_visited,
    visited_pairs,
    visited_transitions,
)
from torchcmdp.errors import check_delta, choice, whole_number
from torchcmdp.estimation import (
    bonus,
    empirical_threshold,
    excess,
    expected_learning_rate,
    learning_rate,
    loss_estimate,
    optimistic_cost,
    step_uncertainty,
    update_cost_estimate,
    violation_threshold,
)
from torchcmdp.layout import Layout
from torchcmdp.learners.base import Learner
from torchcmdp.learners.practical import PRACTICAL_SCALES
from torchcmdp.occupancy import uniform_occupancy
from torchcmdp.projection import LOG_FLOOR, ProjectionResult, ProjectionSolver, project, projection_solver
from torchcmdp.safe_set import SafeSet
from torchcmdp.status import Status, shares
from torchcmdp.trajectory import Trajectory

THRESHOLDS = ("paper", "empirical")

# Floor of the stored reference on real transitions, so that a coordinate that one safe set forbids can return in a later one (D9).
OCCUPANCY_FLOOR = 1e-14


def default_step(layout: Layout, horizon: int, delta: float) -> float:
    """eta = gamma = sqrt(L ln(L |X| |A| / delta) / (T |X| |A|)), the paper's choice."""
    horizon = whole_number("horizon", horizon, least=1)
    check_delta(delta)
    pairs = layout.total_states * layout.actions
    return math.sqrt(layout.layers * math.log(layout.layers * pairs / delta) / (horizon * pairs))


@dataclass
class _Derived:
    """What follows from the buffers, kept until they change, and the last projection with its Gamma and beta."""

    policy: Tensor | None = None
    kernels: KernelSet | None = None
    last: tuple[ProjectionResult, Tensor, Tensor] | None = None


class WCOPS(Learner):
    """WC-OPS in every run of a batch; with `constraints=0` it is UOB-REPS with a set update every episode.

    Where the safe set is empty the projection is elastic, which `diagnostics()["Solver/elastic"]` says.

    Args:
        layout: Layer widths and actions.
        constraints: m.
        horizon: T, which the confidence terms and the default step sizes are made for.
        delta: Failure probability.
        runs: How many independent learners there are.
        eta: OMD step, the paper's by default. This and the following: a float, or a tensor with one value a run.
        gamma: Implicit exploration, the paper's by default.
        bonus_scale: Multiplies the cost bonus b_t.
        radius_scale: Multiplies the transition widths.
        threshold_scale: Multiplies C_t where Gamma starts.
        cap_scale: Multiplies C_t where Gamma ends.
        violation_threshold: "paper", or "empirical": C_t computed from the widths in force.
        confidence: "entrywise" (the paper's), "l1" or "bernstein". Of an L1 ball the projection sees the tightest box around it.
        solver: Of the projection: "newton", "cvxpy", or a solver with settings, such as `Newton(tolerance=1e-9)`.
    """

    name = "WC-OPS"
    log_occupancy: Tensor
    visits: Tensor
    transition_visits: Tensor
    cost_estimate: Tensor
    path_violation: Tensor
    uncertainty: Tensor
    _floor: Tensor

    def __init__(
        self,
        layout: Layout,
        constraints: int,
        horizon: int,
        delta: float = 0.01,
        runs: int = 1,
        *,
        eta: Tensor | float | None = None,
        gamma: Tensor | float | None = None,
        bonus_scale: Tensor | float = 1.0,
        radius_scale: Tensor | float = 1.0,
        threshold_scale: Tensor | float = 1.0,
        cap_scale: Tensor | float = 1.0,
        violation_threshold: str = "paper",
        confidence: str = "entrywise",
        solver: str | ProjectionSolver = "newton",
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(layout, constraints, horizon, delta, runs, dtype=dtype, device=device)
        step = default_step(layout, self.horizon, self.delta)
        self.add_hyperparameter("eta", step if eta is None else eta)
        self.add_hyperparameter("gamma", step if gamma is None else gamma)
        self.add_hyperparameter("bonus_scale", bonus_scale)
        self.add_hyperparameter("radius_scale", radius_scale)
        self.add_hyperparameter("threshold_scale", threshold_scale)
        self.add_hyperparameter("cap_scale", cap_scale)
        self.violation_threshold = choice("violation_threshold", violation_threshold, THRESHOLDS)
        self.confidence = choice("confidence", confidence, CONFIDENCE_KINDS)
        self.solver = projection_solver(solver)
        self._register_state()
        self._forget()

    @classmethod
    def scaled(
        cls,
        layout: Layout,
        constraints: int,
        horizon: int,
        delta: float = 0.01,
        runs: int = 1,
        *,
        eta_scale: Tensor | float = 1.0,
        gamma_scale: Tensor | float = 1.0,
        **options: Any,
    ) -> WCOPS:
        """WC-OPS with all its constants as multiples of the paper's: `eta_scale`, `gamma_scale` and the scales it has anyway."""
        step = default_step(layout, horizon, delta)
        steps = {"eta": eta_scale * step, "gamma": gamma_scale * step}
        return cls(layout, constraints, horizon, delta, runs, **{**steps, **options})

    @classmethod
    def practical(
        cls, layout: Layout, constraints: int, horizon: int, delta: float = 0.01, runs: int = 1, **overrides: Any
    ) -> WCOPS:
        """WC-OPS with constants that a study by gradient found, for horizons people can run; they carry no worst-case guarantee.

        Args:
            layout, constraints, horizon, delta, runs: As in the constructor.
            overrides: Any of its options, or of the scales in `learners/practical.py`, which says how they were found.
        """
        return cls.scaled(layout, constraints, horizon, delta, runs, **{**PRACTICAL_SCALES, **overrides})

    def _register_state(self) -> None:
        """The state before the first episode: the uniform occupancy, no visits, no costs seen."""
        like: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        mask = self.layout.transition_mask(self.device)
        # finite in the padding too: ln 0 would turn the gradients of log-sum-exp into NaN there
        padding = torch.full(self.layout.transition_shape, LOG_FLOOR, **like)
        self.register_buffer("_floor", torch.where(mask, math.log(OCCUPANCY_FLOOR), padding), persistent=False)
        uniform = torch.where(mask, uniform_occupancy(self.layout, **like).log(), padding)
        pairs, m = self.layout.pair_shape, self.constraints
        self.register_buffer("log_occupancy", uniform.expand(self.runs, -1, -1, -1, -1).contiguous())
        self.register_buffer("visits", torch.zeros(self.runs, *pairs, **like))
        self.register_buffer("transition_visits", torch.zeros(self.runs, *self.layout.transition_shape, **like))
        self.register_buffer("cost_estimate", torch.zeros(self.runs, m, *pairs, **like))
        self.register_buffer("path_violation", torch.zeros(self.runs, m, **like))
        if self.violation_threshold == "empirical":
            self.register_buffer("uncertainty", torch.zeros(self.runs, **like))

    def _forget(self) -> None:
        """Drop what was computed from the buffers, because they changed."""
        self._derived = _Derived()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in `nn.Module`; the learner then continues bit for bit where the state was taken."""
        keys = super().load_state_dict(*args, **kwargs)
        self._forget()
        return keys

    def _apply(self, fn: Any, recurse: bool = True) -> WCOPS:
        super()._apply(fn, recurse)
        self._forget()
        return self

    @property
    def occupancy(self) -> Tensor:
        """qhat_t, `(runs x L x S x A x S)`."""
        return self.log_occupancy.exp() * self.layout.transition_mask(self.device)

    @property
    def policy(self) -> Tensor:
        """The policy of qhat_t, `(runs x L x S x A)`; uniform where a state has no mass, since the floor is the same everywhere."""
        if self._derived.policy is None:
            joint = self.log_occupancy.flatten(-2).softmax(-1)  # over actions and successors, in the state's own scale
            self._derived.policy = joint.view_as(self.log_occupancy).sum(-1) * self.layout.pair_mask(self.device)
        return self._derived.policy

    @property
    def kernels(self) -> KernelSet:
        """P_{t-1}, the transition kernels that the episodes so far leave plausible."""
        if self._derived.kernels is None:
            self._derived.kernels = confidence_set(
                self.confidence,
                self.visits,
                self.transition_visits,
                self.layout,
                horizon=self.horizon,
                delta=self.delta,
                radius_scale=self.hyperparameter("radius_scale"),
            )
        return self._derived.kernels

    def update(self, trajectory: Trajectory) -> None:
        """One episode of Algorithm 1 after the roll-out: estimate, count, rebuild the safe set, project."""
        self.check_trajectory(trajectory)
        transitions = visited_transitions(trajectory, self.layout, self.dtype)
        visited, costs = transitions.sum(-1), trajectory.costs.to(self.dtype)
        loss = self._estimate_loss(trajectory, visited)
        self._count(visited, transitions, costs.sum(-2))
        self._move(loss, *self._estimate_costs(visited, costs))

    def update_expected(self, occupancy: Tensor, rewards: Tensor, costs: Tensor, sample: Trajectory | None = None) -> None:
        """One episode with its expectation in place of a sample: every pair is visited as often as the policy leads one to expect.

        Nothing is random then, so that a run is a smooth function of its hyperparameters, kinks aside.

        Args:
            occupancy: q^{P,pi}(x,a,y) of the policy just played under the true transitions, `(runs x L x S x A x S)`.
            rewards: Mean rewards, `(runs x L x S x A)` or `(L x S x A)`.
            costs: Mean costs, `(runs x m x L x S x A)` or `(m x L x S x A)`.
            sample: What came of it. With it all values are those of `update(sample)`, and only the derivatives of what the episode
                adds to the learner's state are those of its expectation.
        """
        self.layout.check_shape("occupancy", occupancy, kind="transition")
        visited = occupancy.sum(-1)
        weights = 1 / (upper_occupancy(self.kernels, self.policy, self.layout) + self.hyperparameter("gamma")[:, None, None, None])
        new = [(1 - rewards) * visited * weights, visited, occupancy, (costs * visited.unsqueeze(-4)).sum((-3, -2, -1))]
        if sample is not None:
            new = [_valued(value, mean) for value, mean in zip(self._seen(sample, weights), new, strict=True)]
        loss, *counts = new
        self._count(*counts)
        gamma_excess = self._excess()
        rate = expected_learning_rate(gamma_excess, self.visits, visited)
        estimate = self.cost_estimate + rate * (costs - self.cost_estimate)
        if sample is not None:
            seen = visited_pairs(sample, self.layout, self.dtype)
            rate = learning_rate(gamma_excess, self.visits) * seen.unsqueeze(-4)
            observed = sample.costs.to(self.dtype).transpose(-1, -2)[..., None, None]
            estimate = _valued(self.cost_estimate + rate * (observed - self.cost_estimate), estimate)
        self.cost_estimate = estimate
        self._move(loss, gamma_excess, rate)

    def _seen(self, sample: Trajectory, weights: Tensor) -> tuple[Tensor, ...]:
        """Loss estimate, visited pairs and transitions, and the costs summed along the path, of a sampled episode."""
        self.check_trajectory(sample)
        transitions = visited_transitions(sample, self.layout, self.dtype)
        visited = transitions.sum(-1)
        loss = (1 - sample.rewards.to(self.dtype))[..., None, None] * visited * weights
        return loss, visited, transitions, sample.costs.sum(-2, dtype=self.dtype)

    def fade(self, keep: float) -> None:
        """Scale the derivatives that the state carries, and nothing else: what happened long ago then hardly counts in them."""
        for name, value in self.named_buffers():
            if name not in self._hyperparameters and value.is_floating_point():
                setattr(self, name, torch.lerp(value.detach(), value, keep))
        self._derived.policy = self._derived.kernels = None

    def _move(self, loss: Tensor, gamma_excess: Tensor, rate: Tensor) -> None:
        """Line 9 and what follows from it."""
        result = self._project(loss, self.safe_set())
        self.log_occupancy = torch.maximum(result.log_occupancy, self._floor)
        self._derived.policy = None
        self._derived.last = (result, gamma_excess, rate)

    def _estimate_loss(self, trajectory: Trajectory, visited: Tensor) -> Tensor:
        """Lines 4 and 5, with the upper occupancy over P_{t-1}: it must not know episode t (D5)."""
        upper = upper_occupancy_visited(self.kernels, self.policy, self.layout, trajectory.states, trajectory.actions)
        return loss_estimate(visited, trajectory.rewards.to(self.dtype), upper, self.hyperparameter("gamma"))

    def _count(self, visited: Tensor, transitions: Tensor, path_costs: Tensor) -> None:
        """N, M, S_i and t with the episode counted; P_t follows from them when it is asked for."""
        if self.violation_threshold == "empirical":  # with the widths that the episode was planned with
            step = step_uncertainty(self.kernels.lower, self.kernels.upper, self._bonus(), self.visits, self.layout)
            self.uncertainty = self.uncertainty + (step * visited).sum((-3, -2, -1))
        self.episode = self.episode + 1
        self.visits = self.visits + visited
        self.transition_visits = self.transition_visits + transitions
        self.path_violation = self.path_violation + path_costs
        self._derived.kernels = None

    def _estimate_costs(self, visited: Tensor, costs: Tensor) -> tuple[Tensor, Tensor]:
        """Line 6: Gamma_i `(runs x m)`, then beta at the visited pairs `(runs x m x L x S x A)`, then ghat."""
        gamma_excess = self._excess()
        rate = learning_rate(gamma_excess, self.visits)
        self.cost_estimate = update_cost_estimate(self.cost_estimate, rate, visited, costs)
        return gamma_excess, rate * visited.unsqueeze(-4)

    def _excess(self) -> Tensor:
        """Gamma_i, `(runs x m)`."""
        like: dict[str, Any] = {"horizon": self.horizon, "delta": self.delta}
        if self.violation_threshold == "empirical":
            threshold = empirical_threshold(self.uncertainty, self.episode, self.layout, self.constraints, **like)
        else:
            threshold = violation_threshold(self.episode, self.layout, self.constraints, **like)
        return excess(self.path_violation, threshold, self.hyperparameter("threshold_scale"), self.hyperparameter("cap_scale"))

    def _bonus(self) -> Tensor:
        """b_t, `(runs x L x S x A)`."""
        scale = self.hyperparameter("bonus_scale")
        return bonus(self.visits, self.layout, self.constraints, horizon=self.horizon, delta=self.delta, bonus_scale=scale)

    def safe_set(self) -> SafeSet:
        """Lines 7 and 8: the occupancies of P_t that the optimistic costs call safe."""
        costs = optimistic_cost(self.cost_estimate, self._bonus(), self.visits, self.layout)
        return SafeSet(self.layout, self.kernels.lower, self.kernels.upper, costs)

    def _project(self, loss: Tensor, safe_set: SafeSet) -> ProjectionResult:
        """Line 9: argmin eta <loss, q> + KL(q, qhat_t) over the safe set."""
        return project(
            loss, None, safe_set, self.hyperparameter("eta"), log_reference=self.log_occupancy, solver=self.solver
        )  # fmt: skip

    def diagnostics(self) -> dict[str, Tensor]:
        """Of the last update: solver iterations, residual and status, constraints with Gamma > 0, and the largest beta."""
        if self._derived.last is None:
            return {}
        result, gamma_excess, rate = self._derived.last
        dtype = self.dtype
        return {
            "Solver/iterations": result.iterations.to(dtype),
            "Solver/residual": result.residual.detach().to(dtype),
            **shares(result.status, Status.ELASTIC, Status.MAX_ITERATIONS, Status.INVALID, dtype=dtype),
            "Learner/gamma_active": (gamma_excess.detach() > 0).sum(-1).to(dtype),
            "Learner/max_beta": rate.detach().flatten(1).amax(-1) if self.constraints else rate.new_zeros(self.runs),
        }

    def config(self) -> dict[str, Any]:
        """Everything that the learner was made with, ready for JSON."""
        kinds = {
            "violation_threshold": self.violation_threshold,
            "confidence": self.confidence,
            "solver": self.solver.config(),
        }
        return {**super().config(), **kinds}


def _valued(value: Tensor, mean: Tensor) -> Tensor:
    """The value of the one and the derivatives of the other."""
    return value.detach() + (mean - mean.detach())
