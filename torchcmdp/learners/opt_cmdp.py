"""OptCMDP: each episode, the best policy of the most favourable CMDP that the data leave plausible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcmdp.confidence import CONFIDENCE_KINDS
from torchcmdp.costs import CostEvidence, CostModel, cost_model, path_costs
from torchcmdp.errors import InvalidInput
from torchcmdp.estimation import optimistic_cost, prior_cost
from torchcmdp.learners import compiled
from torchcmdp.learners.empirical import RADIUS_MODES, EmpiricalLearner
from torchcmdp.learners.practical import overridden, practical_costs
from torchcmdp.occupancy import policy_of, uniform_occupancy
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
        rewards: "radius", or "prior": the mean reward with one sample more, of 1, in place of its radius.
        confidence: With matched radii, the kind of transition confidence set; the tightest box around it where it is no box.
        solver: Of the program: a solver with settings, such as `ColumnGeneration(max_iterations=100)`.
        costs: What it believes of the costs, such as `PriorCosts(margin=1.0)`; by default the averages and radii of `radii`.
    """

    name = "OptCMDP"
    hyperparameters = {"bonus_scale": 1.0, "radius_scale": 1.0}
    choices = {"radii": RADIUS_MODES, "rewards": ("radius", "prior"), "confidence": CONFIDENCE_KINDS}
    uses = ("known_rewards", "known_costs")
    parts: ClassVar[Sequence[str]] = ("solver", "costs")
    rewards: str = "radius"
    plan: Tensor
    planned: Tensor

    def __init__(
        self, *args: Any, solver: str | ProgramSolver = "column_generation", costs: CostModel | None = None, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.solver = program_solver(solver)
        self.add_uniform_policy("plan")
        self.costs = None if costs is None and self.known_costs is None else cost_model(self, costs, {})
        if self.known_rewards is not None and self.rewards == "prior":
            raise InvalidInput("rewards is 'prior', an estimate of what known_rewards says; leave one of them out.")
        if self.costs is not None:
            occupancy = uniform_occupancy(self.layout, dtype=self.dtype, device=self.device).sum(-1)
            self.register_buffer("planned", occupancy.expand_as(self.plan).contiguous())

    @classmethod
    def practical(cls, *args: Any, **overrides: Any) -> Self:
        """OptCMDP with the changes of `WCOPS.practical` that it can have, for horizons that people can run.

        What each loses of the guarantees: radii at a hundredth may leave the true transitions out of the confidence set. The priors
        in place of the radii of costs and rewards may leave their true means out, with a probability that delta does not bound. The
        margin may cut the best safe policy off, by as much as one standard error of what it costs. The drift test may ring where
        nothing has changed, and then forgets samples that were worth keeping. Any option may be given otherwise.
        """
        recipe: dict[str, Any] = {"radius_scale": 0.01, "rewards": "prior", "costs": practical_costs()}
        return cls(*args, **overridden(recipe, overrides))

    @property
    def policy(self) -> Tensor:
        """The policy of the last linear program, `(runs x L x S x A)`; uniform in states that its occupancy does not reach."""
        return self.plan

    def update(self, trajectory: Trajectory) -> None:
        """Count the episode and plan the next one."""
        if compiled.update(self, trajectory):
            return
        if self.costs is not None:
            paths, costs = path_costs(trajectory, self.dtype)
            evidence = CostEvidence(self.visited(trajectory)[0], paths, costs)
            self.costs.observe(evidence, self)
        self.count(trajectory)
        self.take(optimistic_optimum(*self.program(), solver=self.solver))

    def take(self, optimum: OptimisticOptimum) -> None:
        """Plan the next episode by what the linear program found."""
        self.plan = policy_of(optimum.occupancy, self.layout)
        if self.costs is not None:
            self.planned = optimum.occupancy.sum(-1).to(self.dtype)
        self._last = optimum

    def program(self) -> tuple[Tensor, SafeSet]:
        """What the next plan maximises, `(runs x L x S x A)`, and over what: the optimistic rewards, costs and kernels."""
        reward_radius, cost_radius = self.feedback_radii()
        if self.costs is None:
            costs = optimistic_cost(self.cost_mean, cost_radius, self.visits, self.layout, self.cost_low)
        else:
            costs = self.costs.optimistic(self)
        highest = self.reward_high
        if self.known_rewards is not None:
            rewards = self.known_rewards.expand_as(self.visits)
        elif self.rewards == "prior":
            rewards = prior_cost(self.reward_mean.unsqueeze(-4), self.visits, highest).squeeze(-4)
        else:
            rewards = torch.where(self.visits > 0, torch.minimum(self.reward_mean + reward_radius, highest), highest)
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
            **({} if self.costs is None else self.costs.diagnostics(self)),
        }
