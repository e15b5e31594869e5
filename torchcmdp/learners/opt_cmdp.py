"""OptCMDP: each episode, the best policy of the most favourable CMDP that the data leave plausible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchcmdp.confidence import CONFIDENCE_KINDS, confidence_set
from torchcmdp.errors import choice
from torchcmdp.estimation import optimistic_cost
from torchcmdp.layout import Layout
from torchcmdp.learners.empirical import EmpiricalLearner
from torchcmdp.learners.widths import WIDTH_MODES, feedback_widths, transition_kind
from torchcmdp.occupancy import policy_of, uniform_policy
from torchcmdp.optimistic import OptimisticOptimum, ProgramSolver, optimistic_optimum, program_solver
from torchcmdp.safe_set import SafeSet
from torchcmdp.status import Status, shares
from torchcmdp.trajectory import Trajectory


class OptCMDP(EmpiricalLearner):
    """OptCMDP (Efroni, Mannor and Pirotta, Algorithm 1) in every run of a batch.

    Where no plausible occupancy is safe, the linear program allows the least violation, and `diagnostics()["Solver/infeasible"]`
    says so. Before the first episode every policy is optimal; it plays the uniform one.

    Args:
        layout: Layer widths and actions.
        constraints: m.
        horizon: T, which the widths are made for.
        delta: Failure probability.
        runs: How many independent learners there are.
        bonus_scale: Multiplies the widths of rewards and costs. This and the next: a float, or a tensor with one value a run.
        radius_scale: Multiplies the widths of the transitions.
        widths: "published", or "matched" to WC-OPS: the same bonus on the costs, half of it on the rewards, the same kernels.
        confidence: With matched widths, the kind of transition confidence set; the tightest box around it where it is no box.
        solver: Of the program: a solver with settings, such as `ColumnGeneration(max_iterations=100)`.
    """

    name = "OptCMDP"
    plan: Tensor

    def __init__(
        self,
        layout: Layout,
        constraints: int,
        horizon: int,
        delta: float = 0.01,
        runs: int = 1,
        *,
        bonus_scale: Tensor | float = 1.0,
        radius_scale: Tensor | float = 1.0,
        widths: str = "published",
        confidence: str = "entrywise",
        solver: str | ProgramSolver = "column_generation",
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(layout, constraints, horizon, delta, runs, dtype=dtype, device=device)
        self.add_hyperparameter("bonus_scale", bonus_scale)
        self.add_hyperparameter("radius_scale", radius_scale)
        self.widths = choice("widths", widths, WIDTH_MODES)
        self.confidence = choice("confidence", confidence, CONFIDENCE_KINDS)
        self.solver = program_solver(solver)
        uniform = uniform_policy(layout, dtype=self.dtype, device=self.device)
        self.register_buffer("plan", uniform.expand(self.runs, -1, -1, -1).contiguous())
        self._last: OptimisticOptimum | None = None

    @property
    def policy(self) -> Tensor:
        """The policy of the last linear program, `(runs x L x S x A)`; uniform in states that its occupancy does not reach."""
        return self.plan

    def update(self, trajectory: Trajectory) -> None:
        """Count the episode and plan the next one."""
        self.count(trajectory)
        self._last = optimistic_optimum(*self.program(), solver=self.solver)
        self.plan = policy_of(self._last.occupancy, self.layout)

    def program(self) -> tuple[Tensor, SafeSet]:
        """What the next plan maximises, `(runs x L x S x A)`, and over what: the optimistic rewards, costs and kernels."""
        like: dict[str, Any] = {"horizon": self.horizon, "delta": self.delta}
        scale = self.hyperparameter("bonus_scale")
        reward_width, cost_width = feedback_widths(
            self.widths, self.visits, self.layout, self.constraints, bonus_scale=scale, **like
        )
        costs = optimistic_cost(self.cost_mean, cost_width, self.visits, self.layout)
        highest = self.layout.pair_mask(self.device).to(self.dtype)
        rewards = torch.where(self.visits > 0, (self.reward_mean + reward_width).clamp_max(1), highest)
        kernels = confidence_set(
            transition_kind(self.widths, self.confidence),
            self.visits,
            self.transition_visits,
            self.layout,
            radius_scale=self.hyperparameter("radius_scale"),
            **like,
        )
        return rewards, SafeSet(self.layout, kernels.lower, kernels.upper, costs)

    def diagnostics(self) -> dict[str, Tensor]:
        """Of the last plan: policies tried, what its certificate leaves open, its status, value and largest multiplier."""
        if self._last is None:
            return {}
        last, none = self._last, self._last.value.new_zeros(self.runs)
        return {
            "Solver/iterations": last.iterations.to(self.dtype),
            "Solver/residual": last.residual,
            **shares(last.status, Status.INFEASIBLE, Status.MAX_ITERATIONS, Status.INVALID, dtype=self.dtype),
            "Learner/planned_value": last.value,
            "Learner/max_multiplier": last.multipliers.amax(-1) if self.constraints else none,
        }

    def config(self) -> dict[str, Any]:
        """Everything that the learner was made with, ready for JSON."""
        kinds = {"widths_mode": self.widths, "confidence": self.confidence, "solver": self.solver.config()}
        return {**super().config(), **kinds}
