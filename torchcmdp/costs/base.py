"""What every cost model is: estimates in buffers that episodes revise, seen from either side, and a test for costs that change."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from torchcmdp.costs.evidence import CostEvidence
from torchcmdp.errors import check_kind, not_negative, positive
from torchcmdp.estimation import cumulative_surprise, standard_error, surprise
from torchcmdp.hyperparameters import PerRun, per_run, plain, register
from torchcmdp.layout import Layout
from torchcmdp.protocols import Believer


@dataclass(frozen=True)
class Drift:
    """A test for costs that have changed, and how much of the past is kept when it rings.

    What the costs of an episode add up to beyond what the estimates said is summed up, less a slack, on both sides. The unit of
    `height` and `slack` is the noise of an episode, `noise * sqrt(L)`, so that they mean the same at every length of an episode.
    The defaults are 40 and 1/4 where L = 4. `python -m train study alarms` measures how often it rings for nothing.

    Attributes:
        height: The sum that rings, in units of the noise of an episode.
        slack: What an episode may surprise by for free, in the same unit.
        memory: How many samples every pair keeps at most when it rings.
        noise: The largest standard deviation of one cost: 1 for costs that are -1 or 1, less where they are known to be tamer.
    """

    height: float = 20.0
    slack: float = 0.125
    memory: float = 30.0
    noise: float = 1.0

    def __post_init__(self) -> None:
        for name in ("height", "memory", "noise"):
            positive(name, getattr(self, name))
        not_negative("slack", self.slack)

    def unit(self, layout: Layout) -> float:
        """The noise of an episode: sqrt(L) costs, each with its own."""
        return self.noise * math.sqrt(layout.layers)

    def config(self) -> dict[str, Any]:
        """Everything that it was made with, ready for JSON."""
        return asdict(self)


class CostModel(nn.Module, ABC):
    """What the learners of a batch believe of their costs; a subclass says how samples are weighed and which way it leans.

    A model is made of its settings alone and given to a learner as `costs=`. The learner takes a fresh one for itself (`begun`),
    shows it every episode before it counts the visits (`observe`), and then asks for `optimistic` or `pessimistic` costs. The
    state is in buffers, replaced and never written to, with the runs on the first axis.

    Args:
        margin: By how many standard errors a policy is to stay safe: that many times the error of what the planned occupancy is
            believed to cost, at most 1, is spread over all costs. A float, or a tensor with one value a run; None for none.
        drift: When to believe that the costs have changed, and to forget; None for never.

    Attributes:
        name: What the model is called in configurations.
        of_learner: The settings of the learner that it looks at.
        cost_estimate: ghat_i, `(runs x m x L x S x A)`.
        samples: n(x,a), how many samples an estimate is worth, `(runs x L x S x A)`; None without a drift test, where they are the
            visits.
        surprises: c+ and c- of the drift test, `(runs x m x 2)`; None without one.
    """

    name: ClassVar[str]
    of_learner: ClassVar[tuple[str, ...]] = ()
    cost_estimate: Tensor
    margin: Tensor | None
    samples: Tensor | None
    surprises: Tensor | None

    def __init__(self, *, margin: PerRun | None = None, drift: Drift | None = None) -> None:
        super().__init__()
        check_kind("drift", drift, Drift | None, "a Drift, such as Drift(height=20.0)")
        self.drift, self._margin = drift, margin
        self._last: tuple[Tensor, ...] = ()

    def settings(self) -> dict[str, Any]:
        """The arguments of the constructor; a subclass adds its own."""
        return {"margin": self._margin, "drift": self.drift}

    def begun(self, learner: Believer) -> Self:
        """A model with these settings for a learner, before its first episode."""
        model = type(self)(**self.settings())
        model.begin(learner)
        return model

    def begin(self, learner: Believer) -> None:
        """Register the state, in which nothing was seen; a subclass adds its own."""
        like: dict[str, Any] = {"dtype": learner.dtype, "device": learner.device}
        register(self, "margin", None if self._margin is None else per_run("margin", self._margin, learner.runs, **like))
        pairs, m, drifts = learner.layout.pair_shape, learner.constraints, self.drift is not None
        self.register_buffer("cost_estimate", torch.zeros(learner.runs, m, *pairs, **like))
        self.register_buffer("samples", torch.zeros(learner.runs, *pairs, **like) if drifts else None)
        self.register_buffer("surprises", torch.zeros(learner.runs, m, 2, **like) if drifts else None)

    def observe(self, evidence: CostEvidence, learner: Believer) -> None:
        """Learn from one episode of every run, which the learner has not counted yet."""
        before = self.samples_of(learner)
        excess, shared = self.excess(evidence, learner), evidence.pooled(learner.pooled)
        after = before + shared.visited
        estimate, rate = shared.revise(self.cost_estimate, excess, after)
        self._last = (excess, rate, *self._forget(evidence, learner, before, after))
        self.cost_estimate = estimate

    def _forget(self, evidence: CostEvidence, learner: Believer, before: Tensor, after: Tensor) -> tuple[Tensor, ...]:
        """Test for drift, with the estimates from before the episode; returns where it rang, `(runs x m)` bool, if it can."""
        if self.drift is None or self.surprises is None:
            return ()
        unit = self.drift.unit(learner.layout)
        seen = surprise(evidence.visited, evidence.costs, self.cost_estimate, before)
        sums = cumulative_surprise(self.surprises, seen, self.drift.slack * unit)
        rung = (sums > self.drift.height * unit).any(-1)
        self.surprises = torch.where(rung.unsqueeze(-1), 0.0, sums)
        self.samples = torch.where(rung.any(-1)[:, None, None, None], after.clamp_max(self.drift.memory), after)
        return (rung,)

    def samples_of(self, learner: Believer) -> Tensor:
        """n(x,a): those that are left since costs changed, or all visits, `(runs x L x S x A)`."""
        return learner.visits if self.samples is None else self.samples

    def optimistic(self, learner: Believer) -> Tensor:
        """What the costs may be at best, with the margin: `(runs x m x L x S x A)`, zero in the padding."""
        return self._with_margin(self.hopeful(learner), learner)

    def pessimistic(self, learner: Believer) -> Tensor:
        """What the costs may be at worst, with the margin and at most 1: `(runs x m x L x S x A)`, zero in the padding."""
        return self._with_margin(self.careful(learner), learner).clamp_max(1)

    def standard_error(self, learner: Believer) -> Tensor:
        """Of what the planned occupancy is believed to cost, at most 1: `(runs x m)`."""
        return standard_error(learner.planned, self.cost_estimate, self.samples_of(learner))

    def _with_margin(self, costs: Tensor, learner: Believer) -> Tensor:
        if self.margin is None:
            return costs
        self._error = self.standard_error(learner)
        spare = self.margin.to(costs.dtype).expand(learner.runs)[:, None] * self._error
        # an occupancy has mass one in every layer: so much on each cost is all of it on their sum
        each = (spare / learner.layout.layers)[..., None, None, None]
        return costs + each * learner.layout.pair_mask(costs.device)

    def excess(self, evidence: CostEvidence, learner: Believer) -> Tensor:
        """Gamma_i, by how much more than a plain mean an estimate moves, `(runs x m)`; zero where it is the plain mean."""
        return self.cost_estimate.new_zeros(self.cost_estimate.shape[:2])

    @abstractmethod
    def hopeful(self, learner: Believer) -> Tensor:
        """The optimistic costs without the margin, `(runs x m x L x S x A)`."""

    @abstractmethod
    def careful(self, learner: Believer) -> Tensor:
        """The pessimistic costs without the margin, `(runs x m x L x S x A)`."""

    @property
    def is_plain(self) -> bool:
        """Whether there is neither a margin nor a drift test."""
        return self._margin is None and self.drift is None

    def diagnostics(self, learner: Believer) -> dict[str, Tensor]:
        """Of the last episode: constraints with Gamma > 0, the largest beta, and of margin and drift test what there is."""
        excess, rate, *rung = self._last
        dtype, runs = rate.dtype, learner.runs
        found = {
            "Learner/gamma_active": (excess.detach() > 0).sum(-1).to(dtype),
            "Learner/max_beta": rate.detach().flatten(1).amax(-1) if learner.constraints else rate.new_zeros(runs),
        }
        if self.margin is not None:
            error = self._error.detach()
            found["Learner/standard_error"] = error.amax(-1) if learner.constraints else error.new_zeros(runs)
        if rung:
            found["Learner/drift_alarms"] = rung[0].sum(-1).to(dtype)
        return found

    def config(self) -> dict[str, Any]:
        """Everything that the model was made with, ready for JSON."""
        margin = plain(self.margin)
        return {"name": self.name, "margin": margin, "drift": None if self.drift is None else self.drift.config()}
