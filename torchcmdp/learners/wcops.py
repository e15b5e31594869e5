"""WC-OPS, weighted constrained optimistic policy search: OMD over occupancies in an optimistic safe set (Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from torchcmdp.confidence import CONFIDENCE_KINDS, upper_occupancy_visited
from torchcmdp.errors import check_delta, whole_number
from torchcmdp.estimation import (
    bonus,
    empirical_threshold,
    excess,
    loss_estimate,
    optimistic_cost,
    step_uncertainty,
    violation_threshold,
)
from torchcmdp.layout import Layout
from torchcmdp.learners import compiled
from torchcmdp.learners.base import Learner, PerRun
from torchcmdp.learners.evidence import Evidence
from torchcmdp.learners.practical import PRACTICAL_SCALES
from torchcmdp.occupancy import uniform_occupancy
from torchcmdp.projection import LOG_FLOOR, ProjectionResult, ProjectionSolver, project, projection_solver
from torchcmdp.safe_set import SafeSet
from torchcmdp.status import Status, shares
from torchcmdp.trajectory import Trajectory

# Floor of the stored reference on real transitions, so that a coordinate that one safe set forbids can return in a later one (D9).
OCCUPANCY_FLOOR = 1e-14


def default_step(layout: Layout, horizon: int, delta: float) -> float:
    """eta = gamma = sqrt(L ln(L |X| |A| / delta) / (T |X| |A|)), the paper's choice."""
    horizon = whole_number("horizon", horizon, least=1)
    check_delta(delta)
    pairs = layout.total_states * layout.actions
    return math.sqrt(layout.layers * math.log(layout.layers * pairs / delta) / (horizon * pairs))


def _paper_step(learner: Learner) -> float:
    return default_step(learner.layout, learner.horizon, learner.delta)


class WCOPS(Learner):
    """WC-OPS in every run of a batch; with `constraints=0` it is UOB-REPS with a set update every episode.

    Where the safe set is empty the projection is elastic, which `diagnostics()["Solver/elastic"]` says. Lines of Algorithm 1 are
    counted without the head of its loop: line 5 estimates the loss, line 10 projects.

    Args:
        layout, constraints, horizon, delta, runs, dtype, device: As for every `Learner`.
        eta: OMD step, the paper's by default. This and the following: a float, or a tensor with one value a run.
        gamma: Implicit exploration, the paper's by default.
        bonus_scale: Multiplies the cost bonus b_t.
        radius_scale: Multiplies the transition radii.
        threshold_scale: Multiplies C_t where Gamma starts.
        cap_scale: Multiplies C_t where Gamma ends.
        violation_threshold: "paper", or "empirical": C_t computed from the radii in force.
        confidence: "entrywise" (the paper's), "l1" or "bernstein". Of an L1 ball the projection sees the tightest box around it.
        solver: Of the projection: "newton", "cvxpy", or a solver with settings, such as `Newton(tolerance=1e-9)`.
    """

    name = "WC-OPS"
    theorems: ClassVar[Sequence[str]] = ("regret", "violation", "positive_violation")
    hyperparameters = {
        "eta": _paper_step,
        "gamma": _paper_step,
        "bonus_scale": 1.0,
        "radius_scale": 1.0,
        "threshold_scale": 1.0,
        "cap_scale": 1.0,
    }
    choices = {"violation_threshold": ("paper", "empirical"), "confidence": CONFIDENCE_KINDS}
    violation_threshold: str
    log_occupancy: Tensor
    cost_estimate: Tensor
    path_violation: Tensor
    uncertainty: Tensor
    _floor: Tensor

    def __init__(
        self,
        *args: Any,
        solver: str | ProjectionSolver = "newton",
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.solver = projection_solver(solver)
        self._register_state()

    @classmethod
    def scaled(cls, *args: Any, eta_scale: PerRun = 1.0, gamma_scale: PerRun = 1.0, **options: Any) -> Self:
        """WC-OPS with all its constants as multiples of the paper's: `eta_scale`, `gamma_scale` and the scales it has anyway."""
        steps = {"eta": lambda made: eta_scale * _paper_step(made), "gamma": lambda made: gamma_scale * _paper_step(made)}
        return cls(*args, **{**steps, **options})

    @classmethod
    def practical(cls, *args: Any, **overrides: Any) -> Self:
        """WC-OPS with constants that a study by gradient found, for horizons people can run; they carry no worst-case guarantee.

        Args:
            args: As in the constructor.
            overrides: Any of its options, or of the scales in `learners/practical.py`, which says how they were found.
        """
        return cls.scaled(*args, **{**PRACTICAL_SCALES, **overrides})

    def _register_state(self) -> None:
        """The state before the first episode: the uniform occupancy, no visits, no costs seen."""
        like: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        mask = self.layout.transition_mask(self.device)
        # finite in the padding too: ln 0 would turn the gradients of log-sum-exp into NaN there
        padding = torch.full(self.layout.transition_shape, LOG_FLOOR, **like)
        self.register_buffer("_floor", torch.where(mask, math.log(OCCUPANCY_FLOOR), padding), persistent=False)
        uniform = torch.where(mask, uniform_occupancy(self.layout, **like).log(), padding)
        self.register_buffer("log_occupancy", uniform.expand(self.runs, -1, -1, -1, -1).contiguous())
        self.add_zeros("cost_estimate", self.constraints, *self.layout.pair_shape)
        self.add_zeros("path_violation", self.constraints)
        if self.violation_threshold == "empirical":
            self.add_zeros("uncertainty")

    @property
    def occupancy(self) -> Tensor:
        """qhat_t, `(runs x L x S x A x S)`."""
        return self.log_occupancy.exp() * self.layout.transition_mask(self.device)

    @property
    def policy(self) -> Tensor:
        """The policy of qhat_t, `(runs x L x S x A)`; uniform where a state has no mass, since the floor is the same everywhere."""
        return self._kept("policy", self._policy, self.log_occupancy)

    def _policy(self) -> Tensor:
        joint = self.log_occupancy.flatten(-2).softmax(-1)  # over actions and successors, in the state's own scale
        return joint.view_as(self.log_occupancy).sum(-1) * self.layout.pair_mask(self.device)

    def update(self, trajectory: Trajectory) -> None:
        """One episode of Algorithm 1 after the roll-out."""
        if not compiled.update(self, trajectory):
            self.learn(self.observe(trajectory))

    def observe(self, trajectory: Trajectory) -> Evidence:
        """Lines 4 and 5, with the upper occupancy over P_{t-1}: it must not know episode t (D5)."""
        visited, transitions = self.visited(trajectory)
        upper = upper_occupancy_visited(self.kernels, self.policy, self.layout, trajectory.states, trajectory.actions)
        loss = loss_estimate(visited, trajectory.rewards.to(self.dtype), upper, self.hyperparameter("gamma"))
        costs = trajectory.costs.to(self.dtype)
        return Evidence(loss, visited, transitions, costs.sum(-2), costs.transpose(-1, -2)[..., None, None])

    def learn(self, evidence: Evidence) -> None:
        """Lines 6 to 10: count, estimate the costs, rebuild the safe set, project."""
        self._count(evidence)
        gamma_excess = self._excess()
        self.cost_estimate, rate = evidence.revise(self.cost_estimate, gamma_excess, self.visits)
        result = self._project(evidence.loss, self.safe_set())
        self.log_occupancy = torch.maximum(result.log_occupancy, self._floor)
        self._last = (result, gamma_excess, rate)

    def _count(self, evidence: Evidence) -> None:
        """N, M, S_i and t with the episode counted; P_t follows from them when it is asked for."""
        if self.violation_threshold == "empirical":  # with the radii that the episode was planned with
            step = step_uncertainty(self.kernels.lower, self.kernels.upper, self._bonus(), self.visits, self.layout)
            self.uncertainty = self.uncertainty + (step * evidence.visited).sum((-3, -2, -1))
        self.count_visits(evidence.visited, evidence.transitions)
        self.path_violation = self.path_violation + evidence.path_costs

    def _excess(self) -> Tensor:
        """Gamma_i, `(runs x m)`."""
        size = (self.episode, self.layout, self.constraints)
        if self.violation_threshold == "empirical":
            threshold = empirical_threshold(self.uncertainty, *size, **self._made_for)
        else:
            threshold = violation_threshold(*size, **self._made_for)
        return excess(self.path_violation, threshold, self.hyperparameter("threshold_scale"), self.hyperparameter("cap_scale"))

    def _bonus(self) -> Tensor:
        """b_t, `(runs x L x S x A)`."""
        scale = self.hyperparameter("bonus_scale")
        return bonus(self.visits, self.layout, self.constraints, bonus_scale=scale, **self._made_for)

    def safe_set(self) -> SafeSet:
        """Lines 8 and 9: the occupancies of P_t that the optimistic costs call safe."""
        costs = optimistic_cost(self.cost_estimate, self._bonus(), self.visits, self.layout)
        return SafeSet(self.layout, self.kernels.lower, self.kernels.upper, costs)

    def _project(self, loss: Tensor, safe_set: SafeSet) -> ProjectionResult:
        """Line 10: argmin eta <loss, q> + KL(q, qhat_t) over the safe set."""
        return project(
            loss, None, safe_set, self.hyperparameter("eta"), log_reference=self.log_occupancy, solver=self.solver
        )  # fmt: skip

    def _diagnose(self) -> dict[str, Tensor]:
        """Of the last update: solver iterations, residual and status, constraints with Gamma > 0, and the largest beta."""
        result, gamma_excess, rate = self._last
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
        return {**super().config(), "solver": self.solver.config()}
