"""What learners with a baseline have in common: the baseline, a coin an episode, the mixture that they promise something of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from torchcmdp.baselines import Baseline, Mixture
from torchcmdp.confidence import worst_value
from torchcmdp.errors import InvalidInput, check_kind
from torchcmdp.identity import fingerprint
from torchcmdp.learners.base import Learner
from torchcmdp.streams import RunStreams
from torchcmdp.trajectory import Trajectory

REFUTED = "Learner/baseline_refuted"


class Guarded(Learner):
    """A learner that is given a safe policy, and plays it with a probability that keeps the expected costs of every episode safe.

    The promise is about `mixture`, before the coin is flipped; `policy` is what the coin said. A subclass has `own_policy`,
    `baseline_weight` and a cost model `costs`.

    Args:
        baseline: A policy with known bounds on its costs; or a function of the learner made so far that gives one.
        seed, first_run, distinct_runs: Whose coins these are, as in a `Simulator`, from which `for_env` takes them.

    Attributes:
        baseline_policy: pi0, `(runs x L x S x A)`.
        baseline_bounds: beta_i, `(runs x m)`.
        streams: The random streams of the runs.
    """

    uses: ClassVar[Any] = ()
    costs: Any  # a CostModel
    baseline_policy: Tensor
    baseline_bounds: Tensor

    def __init__(
        self,
        *args: Any,
        baseline: Baseline | Callable[[Any], Baseline],
        seed: int = 0,
        first_run: int = 0,
        distinct_runs: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.streams = RunStreams(seed, self.runs, first_run, self.device, distinct_runs)
        found = baseline(self) if callable(baseline) else baseline
        check_kind("baseline", found, Baseline, "a Baseline, such as baseline(cmdp) makes for a known CMDP")
        like: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        policy, bounds = found.for_runs(self.runs, self.layout, self.constraints, **like)
        self.register_buffer("baseline_policy", policy)
        self.register_buffer("baseline_bounds", bounds)
        self._given = [fingerprint(policy), fingerprint(bounds)]

    @classmethod
    def for_env(cls, env: Any, *, horizon: int, **options: Any) -> Self:
        """As for every `Learner`; the coins are those of the environment's runs."""
        luck = {name: getattr(env, name) for name in ("seed", "first_run", "distinct_runs") if hasattr(env, name)}
        return super().for_env(env, horizon=horizon, **{**luck, **options})

    @property
    def first_run(self) -> int:
        """Which of all runs the first one is: it decides whose coins these are."""
        return self.streams.first_run

    @property
    @abstractmethod
    def own_policy(self) -> Tensor:
        """What is played where the baseline is not, `(runs x L x S x A)`."""

    @property
    @abstractmethod
    def baseline_weight(self) -> Tensor:
        """lambda, the probability of the baseline in the next episode, `(runs,)`."""

    @property
    def on_baseline(self) -> Tensor:
        """Whether the next episode is the baseline's, by a coin that belongs to the run and the episode, `(runs,)` bool."""
        return self._kept("coin", lambda: self.streams.coin(self.episode), self.episode) < self.baseline_weight

    @property
    def mixture(self) -> Mixture:
        """The baseline and the learner's own policy with their probabilities, in this order."""
        weight = self.baseline_weight
        return Mixture(torch.stack([weight, 1 - weight], 1), torch.stack([self.baseline_policy, self.own_policy], 1))

    @property
    def policy(self) -> Tensor:
        """What the coin says: the baseline, or the learner's own policy, `(runs x L x S x A)`."""
        return torch.where(self.on_baseline[:, None, None, None], self.baseline_policy, self.own_policy)

    def update(self, trajectory: Trajectory) -> None:
        """Learn from one episode of every run, and note how it was chosen."""
        self.check_trajectory(trajectory)
        self._chosen = (self.baseline_weight.detach(), self.on_baseline)
        super().update(trajectory)  # type: ignore[safe-super]  # of the learner that this is mixed into

    def worst_costs(self, policy: Tensor) -> Tensor:
        """w_i, the most that a policy may cost by what is known: at most L, `(runs x m)`."""
        return worst_value(self.kernels, policy, self.costs.pessimistic(self)).clamp_max(self.layout.layers)

    @property
    def refuted(self) -> Tensor:
        """Whether the data refute the bounds of the baseline: at least that much it costs, which is more, `(runs,)` bool."""
        least = worst_value(self.kernels, self.baseline_policy, self.costs.hopeful(self), maximise=False)
        return (least > self.baseline_bounds + 1e-9).any(-1)

    def _diagnose(self) -> dict[str, Tensor]:
        """Of the last episode lambda and where the coin fell; whether the data refute the baseline by now."""
        weight, on_baseline = self._chosen
        return {
            **super()._diagnose(),
            "Learner/baseline_weight": weight,
            "Learner/on_baseline": on_baseline.to(self.dtype),
            REFUTED: self.refuted.to(self.dtype),
        }

    def config(self) -> dict[str, Any]:
        """Everything that the learner was made with, ready for JSON."""
        streams = self.streams
        luck = {"seed": streams.seed, "first_run": streams.first_run, "distinct_runs": streams.distinct}
        return {**super().config(), "baseline": self._given, **luck}

    @classmethod
    def practical(cls, *args: Any, **overrides: Any) -> Self:
        """There is none: smaller constants than the theory's would be a promise that nobody can keep."""
        raise InvalidInput(
            f"{cls.__name__} has no practical recipe: its promise is about its constants; bonus_scale and radius_scale weaken it."
        )
