"""The evidence that an episode is expected to give WC-OPS, and samples with its derivatives; and derivatives that fade."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcmdp.confidence import upper_occupancy
from torchcmdp.estimation import expected_learning_rate, learning_rate
from torchcmdp.learners.base import Learner
from torchcmdp.learners.evidence import Evidence
from torchcmdp.learners.wcops import WCOPS
from torchcmdp.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class ExpectedEvidence(Evidence):
    """The expectation of an episode: every pair is visited as often as the policy leads one to expect, at its mean costs."""

    def revise(self, estimate: Tensor, gamma_excess: Tensor, visits: Tensor) -> tuple[Tensor, Tensor]:
        """As in `Evidence`, with every pair weighed in by the share of its visits that is new."""
        rate = expected_learning_rate(gamma_excess, visits, self.visited)
        return estimate + rate * (self.costs - estimate), rate


@dataclass(frozen=True, eq=False)
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
        occupancy: q^{P,pi}(x,a,y) of the policy just played under the true transitions, `(runs x L x S x A x S)`.
        rewards: Mean rewards, `(runs x L x S x A)` or `(L x S x A)`.
        costs: Mean costs, `(runs x m x L x S x A)` or `(m x L x S x A)`.
        sample: What came of it. With it all values are those of `learner.observe(sample)`, and only the derivatives of what the
            episode adds to the learner's state are those of its expectation.
    """
    learner.layout.check_shape("occupancy", occupancy, kind="transition")
    visited = occupancy.sum(-1)
    upper = upper_occupancy(learner.kernels, learner.policy, learner.layout)
    weights = 1 / (upper + learner.hyperparameter("gamma")[:, None, None, None])
    loss = (1 - rewards) * visited * weights
    mean = ExpectedEvidence(loss, visited, occupancy, (costs * visited.unsqueeze(-4)).sum((-3, -2, -1)), costs)
    if sample is None:
        return mean
    seen, transitions = learner.visited(sample)
    loss = (1 - sample.rewards.to(learner.dtype))[..., None, None] * seen * weights
    observed = sample.costs.to(learner.dtype)
    return MixedEvidence(
        _valued(loss, mean.loss),
        _valued(seen, mean.visited),
        _valued(transitions, mean.transitions),
        _valued(observed.sum(-2), mean.path_costs),
        observed.transpose(-1, -2)[..., None, None],
        mean,
    )


def fade(learner: Learner, keep: float) -> None:
    """Scale the derivatives that the state carries, and nothing else: what happened long ago then hardly counts in them."""
    for name, value in list(learner.named_buffers()):
        if name not in learner.hyperparameters and value.is_floating_point():
            setattr(learner, name, torch.lerp(value.detach(), value, keep))


def _valued(value: Tensor, mean: Tensor) -> Tensor:
    """The value of the one and the derivatives of the other."""
    return value.detach() + (mean - mean.detach())
