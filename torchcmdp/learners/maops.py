"""MA-OPS, margin-aware: look for a baseline with half of the largest margin there is, then play S-OPS with it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from torchcmdp.baselines import margin_of
from torchcmdp.learners.sops import SOPS, safe_step
from torchcmdp.learners.wcops import Evidence
from torchcmdp.occupancy import policy_of
from torchcmdp.optimistic import ProgramSolver, largest_margin, program_solver
from torchcmdp.projection import ProjectionResult, project
from torchcmdp.safe_set import SafeSet
from torchcmdp.trajectory import Trajectory


class MAOPS(SOPS):
    """MA-OPS (Zuo and Stradi, arXiv 2610.12153) in every run of a batch; each run is in a phase of its own.

    In phase 1 a run explores with the policy that optimism calls safest, mixed with the baseline by the rule of S-OPS, until its
    margin, by pessimism, or that of the baseline is at least half of the largest that optimism allows. Phase 2 is S-OPS with the
    better baseline. It promises what S-OPS promises, with regret O(sqrt(T) / rho + 1 / (d rho)) for the largest margin rho there
    is.

    Args:
        layout, constraints, horizon, runs, dtype, device: As for every `Learner`.
        delta: Failure probability, half of it for each phase.
        baseline, seed, first_run, distinct_runs, bonus_scale, radius_scale, share, loss, confidence, solver, costs: As in `SOPS`.
        eta, gamma: Of phase 2, as in `SOPS`; where that begins late, they grow to what they would be for the episodes left.
        margin_solver: Of the linear program of phase 1, as the solver of `OptCMDP`.

    Attributes:
        exploring: Whether a run is in phase 1, `(runs,)` bool.
        plan: What phase 1 explores with, `(runs x L x S x A)`.
        step_factor: What multiplies eta and gamma, `(runs,)`.
    """

    name = "MA-OPS"
    phases = 2
    parts = (*SOPS.parts, "margin_solver")
    exploring: Tensor
    plan: Tensor
    step_factor: Tensor

    def __init__(self, *args: Any, margin_solver: str | ProgramSolver = "column_generation", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.margin_solver = program_solver(margin_solver)
        self.add_uniform_policy("plan")
        self.register_buffer("exploring", 2 * margin_of(self.baseline_bounds) < self.layout.layers)
        self.register_buffer("step_factor", torch.ones(self.runs, dtype=self.dtype, device=self.device))

    @property
    def own_policy(self) -> Tensor:
        """What phase 1 explores with, or the policy of qhat_t in phase 2, `(runs x L x S x A)`."""
        exploring = self.exploring[:, None, None, None]
        sources = (self.log_occupancy, self.plan, self.exploring)
        return self._kept("own_policy", lambda: torch.where(exploring, self.plan, self._policy()), *sources)

    @property
    def _sources(self) -> tuple[Tensor, ...]:
        return (*super()._sources, self.plan, self.exploring)

    def hyperparameter(self, name: str) -> Tensor:
        """The values of a hyperparameter, the steps for the episodes that are left to phase 2: `(runs,)`."""
        value = super().hyperparameter(name)
        return value * self.step_factor if name in ("eta", "gamma") and "step_factor" in self._buffers else value

    def observe(self, trajectory: Trajectory) -> Evidence:
        """What an episode tells; nothing where phase 1 played the baseline."""
        evidence = super().observe(trajectory)
        counts = (~(self.exploring & self.on_baseline)).to(self.dtype)
        pairs = counts[:, None, None, None]
        return replace(
            evidence,
            visited=evidence.visited * pairs,
            transitions=evidence.transitions * pairs.unsqueeze(-1),
            path_costs=evidence.path_costs * counts[:, None],
            losses=None if evidence.losses is None else evidence.losses * pairs,
        )

    def learn(self, evidence: Evidence) -> None:
        """A step of phase 2 where that has begun, and of phase 1 where it was explored."""
        explored = self.exploring & ~self.on_baseline
        super().learn(evidence)
        rows = _rows(explored)
        if len(rows):
            self._plan(explored, rows)

    def _plan(self, explored: Tensor, rows: Tensor) -> None:
        """The optimistically safest policy where it was explored; end phase 1 where a margin is half of the best imaginable."""
        hopeful = self.costs.optimistic(self)[rows]
        imagined = SafeSet(self.layout, self.kernels.lower[rows], self.kernels.upper[rows], hopeful)
        margin, optimum = largest_margin(imagined, solver=self.margin_solver)
        best = self.step_factor.new_zeros(self.runs).index_copy(0, rows, margin.clamp_max(self.layout.layers).to(self.dtype))
        found = self.plan.index_copy(0, rows, policy_of(optimum.occupancy, self.layout).to(self.dtype))
        self.plan = torch.where(explored[:, None, None, None], found, self.plan)
        worst = self.worst_costs(self.plan)
        kept = explored & (2 * margin_of(self.baseline_bounds) >= best)
        better = explored & ~kept & (2 * margin_of(worst) >= best)
        self.baseline_policy = torch.where(better[:, None, None, None], self.plan, self.baseline_policy)
        self.baseline_bounds = torch.where(better[:, None], worst, self.baseline_bounds)
        ended = kept | better
        self.exploring = self.exploring & ~ended
        left = (self.horizon - self.episode).clamp_min(1).to(self.dtype)
        self.step_factor = torch.where(ended, self._lengthened(left), self.step_factor)

    def _lengthened(self, left: Tensor) -> Tensor:
        """By how much the steps for so many episodes exceed those for T."""
        slope = self.layout.layers / (self.layout.total_states * self.layout.actions)
        whole = safe_step(self, self.horizon) ** 2  # slope (ln T + constant) / T
        constant = whole * self.horizon / slope - torch.log(torch.full_like(left, self.horizon))
        return (slope * (left.log() + constant) / left / whole).sqrt()

    def _project(self, loss: Tensor, safe_set: SafeSet) -> ProjectionResult:
        """Line 10 where phase 2 has begun; a run that explores keeps its occupancy."""
        rows = _rows(~self.exploring)
        part = SafeSet(self.layout, *(bounds[rows] for bounds in (safe_set.lower, safe_set.upper, safe_set.costs)))
        reference, eta, result = self.log_reference, self.hyperparameter("eta"), self._untouched()
        if not len(rows):
            return result
        found = project(loss[rows], None, part, eta[rows], log_reference=reference[rows], solver=self.solver)

        def whole(name: str) -> Tensor:
            held, solved = getattr(result, name), getattr(found, name)
            still = self.exploring.view(-1, *[1] * (held.dim() - 1))
            return torch.where(still, held, held.index_copy(0, rows, solved.to(held)))

        return ProjectionResult(**{field.name: whole(field.name) for field in fields(found)})

    def _untouched(self) -> ProjectionResult:
        """A projection that has not happened."""
        zeros = self.log_occupancy.new_zeros(self.runs)
        return ProjectionResult(
            occupancy=self.occupancy.detach(),
            log_occupancy=self.log_occupancy.detach(),
            potentials=zeros.new_zeros(self.runs, *self.layout.pair_shape[:2]),
            multipliers=zeros.new_zeros(self.runs, self.constraints),
            residual=zeros,
            gap=zeros,
            status=zeros.to(torch.int8),
            iterations=zeros.to(torch.int64),
        )

    def _diagnose(self) -> dict[str, Tensor]:
        """As in S-OPS, and which runs look for a baseline."""
        return {**super()._diagnose(), "Learner/exploring": self.exploring.to(self.dtype)}


def _rows(needed: Tensor) -> Tensor:
    """Which runs have something to solve; all of them where reading that would wait for the device."""
    return needed.nonzero().squeeze(-1) if needed.device.type == "cpu" else torch.arange(len(needed), device=needed.device)
