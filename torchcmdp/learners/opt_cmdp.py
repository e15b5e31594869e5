"""OptCMDP: each episode, the best policy of the most favourable CMDP that the data leave plausible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcmdp.confidence import CONFIDENCE_KINDS
from torchcmdp.estimation import optimistic_cost
from torchcmdp.learners.empirical import EmpiricalLearner
from torchcmdp.learners.radii import RADIUS_MODES
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
        layout, constraints, horizon, delta, runs, dtype, device: As for every `Learner`.
        bonus_scale: Multiplies the radii of rewards and costs. This and the next: a float, or a tensor with one value a run.
        radius_scale: Multiplies the radii of the transitions.
        radii: "published", or "matched" to WC-OPS: the same bonus on the costs, half of it on the rewards, the same kernels.
        confidence: With matched radii, the kind of transition confidence set; the tightest box around it where it is no box.
        solver: Of the program: a solver with settings, such as `ColumnGeneration(max_iterations=100)`.
    """

    name = "OptCMDP"
    hyperparameters = {"bonus_scale": 1.0, "radius_scale": 1.0}
    choices = {"radii": RADIUS_MODES, "confidence": CONFIDENCE_KINDS}
    plan: Tensor

    def __init__(self, *args: Any, solver: str | ProgramSolver = "column_generation", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.solver = program_solver(solver)
        uniform = uniform_policy(self.layout, dtype=self.dtype, device=self.device)
        self.register_buffer("plan", uniform.expand(self.runs, -1, -1, -1).contiguous())

    @property
    def policy(self) -> Tensor:
        """The policy of the last linear program, `(runs x L x S x A)`; uniform in states that its occupancy does not reach."""
        return self.plan

    def update(self, trajectory: Trajectory) -> None:
        """Count the episode and plan the next one."""
        self.count(trajectory)
        optimum = optimistic_optimum(*self.program(), solver=self.solver)
        self.plan = policy_of(optimum.occupancy, self.layout)
        self._last = optimum

    def program(self) -> tuple[Tensor, SafeSet]:
        """What the next plan maximises, `(runs x L x S x A)`, and over what: the optimistic rewards, costs and kernels."""
        reward_radius, cost_radius = self.feedback_radii()
        costs = optimistic_cost(self.cost_mean, cost_radius, self.visits, self.layout)
        highest = self.layout.pair_mask(self.device).to(self.dtype)
        rewards = torch.where(self.visits > 0, (self.reward_mean + reward_radius).clamp_max(1), highest)
        return rewards, SafeSet(self.layout, self.kernels.lower, self.kernels.upper, costs)

    def _diagnose(self) -> dict[str, Tensor]:
        """Of the last plan: policies tried, what its certificate leaves open, its status, value and largest multiplier."""
        last: OptimisticOptimum = self._last
        return {
            "Solver/iterations": last.iterations.to(self.dtype),
            "Solver/residual": last.residual,
            **shares(last.status, Status.INFEASIBLE, Status.MAX_ITERATIONS, Status.INVALID, dtype=self.dtype),
            "Learner/planned_value": last.value,
            "Learner/max_multiplier": pad(last.multipliers, (1, 0)).amax(-1),
        }

    def config(self) -> dict[str, Any]:
        """Everything that the learner was made with, ready for JSON."""
        return {**super().config(), "solver": self.solver.config()}
