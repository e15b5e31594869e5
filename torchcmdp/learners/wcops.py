"""WC-OPS, weighted constrained optimistic policy search: OMD over occupancies in an optimistic safe set (Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from torchcmdp.confidence import CONFIDENCE_KINDS, upper_occupancy_visited
from torchcmdp.costs import CostEvidence, CostModel, PaperCosts, cost_model, path_costs
from torchcmdp.errors import InvalidInput
from torchcmdp.estimation import doubly_robust_loss, loss_estimate
from torchcmdp.hyperparameters import check_weights
from torchcmdp.layout import Layout
from torchcmdp.learners import compiled
from torchcmdp.learners.base import Learner
from torchcmdp.learners.practical import overridden, recipe_of
from torchcmdp.occupancy import uniform_occupancy, uniform_policy
from torchcmdp.projection import LOG_FLOOR, ProjectionResult, ProjectionSolver, project, projection_solver
from torchcmdp.safe_set import SafeSet
from torchcmdp.status import Status, shares
from torchcmdp.trajectory import Trajectory

# Floor of the stored reference on real transitions, so that a coordinate that one safe set forbids can return in a later one (D9).
OCCUPANCY_FLOOR = 1e-14


def default_step(layout: Layout, horizon: int, delta: float) -> float:
    """eta = gamma = sqrt(L ln(L |X| |A| / delta) / (T |X| |A|)), the paper's choice."""
    pairs = layout.total_states * layout.actions
    return math.sqrt(layout.layers * math.log(layout.layers * pairs / delta) / (horizon * pairs))


def _paper_step(learner: Learner) -> float:
    return default_step(learner.layout, learner.horizon, learner.delta)


@dataclass(frozen=True, eq=False, kw_only=True)
class Evidence(CostEvidence):
    """What lines 6 to 10 of Algorithm 1 need to know of one episode of every run: of the costs, and of everything else.

    Attributes:
        visited, path_costs, costs: As in `CostEvidence`.
        transitions: How often each transition was taken, `(runs x L x S x A x K)`.
        loss: The loss estimate, `(runs x L x S x A)`.
        losses: The losses 1 - r met at each pair, summed over its visits, `(runs x L x S x A)`; a doubly robust loss needs them.
    """

    transitions: Tensor
    loss: Tensor
    losses: Tensor | None = None


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
        share: Of the uniform occupancy in the reference of the projection; None for none, as in the paper.
        loss: "paper", or "doubly-robust": the mean loss so far, corrected at the visited pairs.
        violation_threshold: "paper", or "empirical": C_t computed from the radii in force.
        confidence: "entrywise" (the paper's), "l1" or "bernstein". Of an L1 ball the projection sees the tightest box around it.
        solver: Of the projection: "newton", "cvxpy", or a solver with settings, such as `Newton(tolerance=1e-9)`.
        costs: What it believes of the costs, such as `PriorCosts(margin=1.0)`; `PaperCosts()` by default, which alone has a bonus
            and a threshold.
    """

    name = "WC-OPS"
    theorems: ClassVar[Sequence[str]] = ("regret", "violation", "positive_violation")
    uses: ClassVar[Sequence[str]] = ("known_rewards", "known_costs")
    hyperparameters = {
        "eta": _paper_step,
        "gamma": _paper_step,
        "bonus_scale": 1.0,
        "radius_scale": 1.0,
        "threshold_scale": 1.0,
        "cap_scale": 1.0,
        "share": None,
    }
    choices = {"loss": ("paper", "doubly-robust"), "violation_threshold": ("paper", "empirical"), "confidence": CONFIDENCE_KINDS}
    parts: ClassVar[Sequence[str]] = ("solver", "costs")
    usual_costs: ClassVar[type[CostModel]] = PaperCosts
    loss: str
    violation_threshold: str
    share: Tensor | None
    log_occupancy: Tensor
    loss_sum: Tensor
    _floor: Tensor
    _uniform: Tensor

    def __init__(
        self, *args: Any, solver: str | ProjectionSolver = "newton", costs: CostModel | None = None, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.solver = projection_solver(solver)
        self.costs = cost_model(self, costs, settings, self.usual_costs)
        check_weights("share", self.share)
        if self.known_rewards is not None and self.loss != "paper":
            raise InvalidInput(f"loss is {self.loss!r}, an estimate of what known_rewards says; leave one of them out.")
        estimated = self.ties is None and self.known_rewards is None
        if not (
            type(self.costs) is PaperCosts and self.costs.is_plain and self.loss == "paper" and self.share is None and estimated
        ):
            self.theorems = ()  # type: ignore[misc]  # the paper proves nothing of such a learner
        self._register_state()

    @classmethod
    def practical(cls, *args: Any, scales: str | None = None, **overrides: Any) -> Self:
        """WC-OPS for horizons that people can run: the recipe that `python -m train study` judges, in `learners/practical.py`.

        What each change loses of the paper's guarantees: steps 20 times as long leave the regret bound, whose proof needs eta and
        gamma of the paper's size. Radii at a hundredth may leave the true transitions out of the confidence set. The prior in
        place of the bonus may leave the true costs out, with a probability that delta does not bound. The margin may cut the best
        safe policy off, by as much as one standard error of what it costs. The drift test may ring where nothing has changed, and
        then forgets samples that were worth keeping. The doubly robust loss is as biased as the paper's, but its bound needs
        losses that are not negative, which a correction can be. The share keeps the reference off the set by a ten-thousandth.

        Args:
            args: As in the constructor.
            scales: "fitted" for eta, gamma, radii and margin that follow the problem, for 30 to 1,000 episodes: `python -m train
                tune fit` judges them. They are safer in short runs, at more regret, and no better at 1,000 episodes, or worse.
            overrides: Any of its options, or of `eta_scale` and `gamma_scale`.
        """
        return cls.scaled(*args, **overridden(recipe_of(scales, *args, **overrides), overrides))

    def _register_state(self) -> None:
        """The state before the first episode: the uniform occupancy, no visits, no costs seen."""
        like: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        mask = self.layout.transition_mask(self.device)
        # finite in the padding too: ln 0 would turn the gradients of log-sum-exp into NaN there
        padding = torch.full(self.layout.transition_shape, LOG_FLOOR, **like)
        self.register_buffer("_floor", torch.where(mask, math.log(OCCUPANCY_FLOOR), padding), persistent=False)
        uniform = uniform_occupancy(self.layout, **like)
        # where it underflows the policy is uniform as well
        unreached = OCCUPANCY_FLOOR * uniform_policy(self.layout, **like).unsqueeze(-1) * self.layout.uniform_transitions(**like)
        uniform = torch.where(mask, torch.where(uniform > 0, uniform, unreached).log(), padding)
        self.register_buffer("log_occupancy", uniform.expand(self.runs, -1, -1, -1, -1).contiguous())
        self.register_buffer("_uniform", uniform, persistent=False)
        if self.loss == "doubly-robust":
            self.add_zeros("loss_sum", *self.layout.pair_shape)

    @property
    def occupancy(self) -> Tensor:
        """qhat_t, `(runs x L x S x A x K)`."""
        return self.log_occupancy.exp() * self.layout.transition_mask(self.device)

    @property
    def planned(self) -> Tensor:
        """qhat_t(x,a), `(runs x L x S x A)`."""
        return self.occupancy.sum(-1)

    @property
    def cost_estimate(self) -> Tensor:
        """ghat_i, `(runs x m x L x S x A)`."""
        return self.costs.cost_estimate

    @property
    def path_violation(self) -> Tensor:
        """S_i of the paper's cost model, `(runs x m)`."""
        return self.costs.path_violation  # type: ignore[return-value]

    @property
    def uncertainty(self) -> Tensor:
        """Of the paper's cost model with an empirical threshold, what the visits so far are worth, `(runs,)`."""
        return self.costs.uncertainty  # type: ignore[return-value]

    @property
    def mean_loss(self) -> Tensor:
        """Of a doubly robust loss, the mean of 1 - r at each pair, `(runs x L x S x A)`; zero where it was never visited."""
        return self.loss_sum / self.visits.clamp_min(1)

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
        paths, costs = path_costs(trajectory, self.dtype)
        loss, losses = self._losses(trajectory, visited)
        met: dict[str, Tensor] = {"visited": visited, "transitions": transitions, "path_costs": paths, "costs": costs}
        return Evidence(**met, loss=loss, losses=losses)

    def _losses(self, trajectory: Trajectory, visited: Tensor) -> tuple[Tensor, Tensor | None]:
        """The loss estimate, or the loss itself where rewards are known, and for a doubly robust one the losses met."""
        if self.known_rewards is not None:
            return ((1 - self.known_rewards) * self.layout.pair_mask(self.device)).expand_as(visited), None
        rewards = trajectory.rewards.to(self.dtype)
        seen = (visited, rewards, self.upper_occupancy(trajectory), self.hyperparameter("gamma"))
        if self.loss == "doubly-robust":
            return doubly_robust_loss(*seen, self.mean_loss, self.visits), visited * (1 - rewards)[..., None, None]
        return loss_estimate(*seen), None

    def upper_occupancy(self, trajectory: Trajectory) -> Tensor:
        """u_t, the largest probability with which what was played meets the visited pairs, `(runs x L)`."""
        return upper_occupancy_visited(self.kernels, self.policy, self.layout, trajectory.states, trajectory.actions)

    def learn(self, evidence: Evidence) -> None:
        """Lines 6 to 10: count, estimate the costs, rebuild the safe set, project."""
        self.costs.observe(evidence, self)
        if self.loss == "doubly-robust":
            assert evidence.losses is not None, "a doubly robust loss needs the losses that were met"
            self.loss_sum = self.loss_sum + self.pooled(evidence.losses)
        self.count_visits(evidence.visited, evidence.transitions)
        result = self._project(evidence.loss, self.safe_set())
        self.log_occupancy = torch.maximum(result.log_occupancy, self._floor)
        self._last = result

    def safe_set(self) -> SafeSet:
        """Lines 8 and 9: the occupancies of P_t that the optimistic costs call safe."""
        return SafeSet(self.layout, self.kernels.lower, self.kernels.upper, self.costs.optimistic(self))

    @property
    def log_reference(self) -> Tensor:
        """ln of what the next occupancy is projected from: qhat_t, with its share of the uniform one, `(runs x L x S x A x S)`."""
        if self.share is None:
            return self.log_occupancy
        share = self.hyperparameter("share")[:, None, None, None, None]
        return torch.logaddexp(torch.log1p(-share) + self.log_occupancy, share.log() + self._uniform)

    def _project(self, loss: Tensor, safe_set: SafeSet) -> ProjectionResult:
        """Line 10: argmin eta <loss, q> + KL(q, qhat_t) over the safe set."""
        eta, reference = self.hyperparameter("eta"), self.log_reference
        return project(loss, None, safe_set, eta, log_reference=reference, solver=self.solver)

    def _diagnose(self) -> dict[str, Tensor]:
        """Of the last update: solver iterations, residual and status, and what the cost model says."""
        result, dtype = self._last, self.dtype
        return {
            "Solver/iterations": result.iterations.to(dtype),
            "Solver/residual": result.residual.detach().to(dtype),
            **shares(result.status, Status.ELASTIC, Status.MAX_ITERATIONS, Status.INVALID, dtype=dtype),
            **self.costs.diagnostics(self),
        }
