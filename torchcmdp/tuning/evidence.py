"""The evidence that an episode is expected to give WC-OPS, and samples with its derivatives; and derivatives that fade."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcmdp.confidence import upper_occupancy
from torchcmdp.costs import path_costs
from torchcmdp.costs.evidence import RepeatedEvidence
from torchcmdp.errors import InvalidInput
from torchcmdp.estimation import learning_rate
from torchcmdp.learners import Evidence
from torchcmdp.learners.base import Learner
from torchcmdp.learners.wcops import WCOPS
from torchcmdp.trajectory import Trajectory


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpectedEvidence(RepeatedEvidence, Evidence):
    """The expectation of an episode: every pair is visited as often as the policy leads one to expect, at its mean costs."""


@dataclass(frozen=True, eq=False, kw_only=True)
class MixedEvidence(Evidence):
    """The values of a sampled episode, with the derivatives of its expectation.

    Attributes:
        mean: The expectation.
    """

    mean: ExpectedEvidence

    def revise(self, estimate: Tensor, gamma_excess: Tensor, visits: Tensor) -> tuple[Tensor, Tensor]:
        """As in `Evidence`, in value; the derivatives are those of `mean`."""
        expected, _ = self.mean.revise(estimate, gamma_excess, visits)
        rate = learning_rate(gamma_excess, visits) * self.visited.unsqueeze(-4)
        return _valued(estimate + rate * (self.costs - estimate), expected), rate


def expected_evidence(
    learner: WCOPS, occupancy: Tensor, rewards: Tensor, costs: Tensor, sample: Trajectory | None = None
) -> Evidence:
    """The expectation of the episode that a learner has just played, for `learner.learn`.

    Nothing is random then, so that a run is a smooth function of its hyperparameters, kinks aside.

    Args:
        learner: Before it learns from the episode.
        occupancy: q^{P,pi}(x,a,y) of the policy just played under the true transitions, `(runs x L x S x A x K)`.
        rewards: Mean rewards, `(runs x L x S x A)` or `(L x S x A)`.
        costs: Mean costs, `(runs x m x L x S x A)` or `(m x L x S x A)`.
        sample: What came of it. With it all values are those of `learner.observe(sample)`, and only the derivatives of what the
            episode adds to the learner's state are those of its expectation.
    """
    learner.layout.check_shape("occupancy", occupancy, kind="transition")
    if learner.ties is not None or learner.known_rewards is not None:
        raise InvalidInput("expected episodes know neither tied layers nor known rewards; make the learner without them.")
    visited = occupancy.sum(-1)
    upper = upper_occupancy(learner.kernels, learner.policy, learner.layout)
    weights = 1 / (upper + learner.hyperparameter("gamma")[:, None, None, None])
    loss, losses = _losses(learner, 1 - rewards, visited, weights)
    paths = (costs * visited.unsqueeze(-4)).sum((-3, -2, -1))
    mean = ExpectedEvidence(visited=visited, transitions=occupancy, path_costs=paths, costs=costs, loss=loss, losses=losses)
    if sample is None:
        return mean
    seen, transitions = learner.visited(sample)
    loss, losses = _losses(learner, (1 - sample.rewards.to(learner.dtype))[..., None, None], seen, weights)
    paths, observed = path_costs(sample, learner.dtype)
    return MixedEvidence(
        visited=_valued(seen, mean.visited),
        transitions=_valued(transitions, mean.transitions),
        path_costs=_valued(paths, mean.path_costs),
        costs=observed,
        loss=_valued(loss, mean.loss),
        losses=None if losses is None or mean.losses is None else _valued(losses, mean.losses),
        mean=mean,
    )


def _losses(learner: WCOPS, met: Tensor, visited: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """The loss estimate, and where it is doubly robust the losses that go into the mean: `(runs x L x S x A)` each."""
    if learner.loss != "doubly-robust":
        return met * visited * weights, None
    mean, share = learner.mean_loss, learner.visits / (learner.visits + 1)
    return mean * share + (met - mean) * visited * weights, met * visited


def fade(learner: Learner, keep: float) -> None:
    """Scale the derivatives that the state carries, and nothing else: what happened long ago then hardly counts in them."""
    for part in learner.modules():
        for name, value in list(part.named_buffers(recurse=False)):
            if name not in (*learner.hyperparameters, "margin") and value.is_floating_point():
                setattr(part, name, torch.lerp(value.detach(), value, keep))


def _valued(value: Tensor, mean: Tensor) -> Tensor:
    """The value of the one and the derivatives of the other."""
    return value.detach() + (mean - mean.detach())
