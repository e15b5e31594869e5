"""Whole runs under way, played in compiled blocks where they can be; hyperparameters may change between windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from torchcmdp.distributed import Crew
from torchcmdp.learners.base import Learner
from torchcmdp.metrics import Tracker, worst_constraint
from torchcmdp.occupancy import expected_value
from torchcmdp.planning import safe_optimum
from torchcmdp.run.session import Session
from torchcmdp.simulator import Simulator


@dataclass(frozen=True, eq=False)
class Played:
    """What whole runs came to, differentiable in the hyperparameters.

    Attributes:
        regret: Final regret against the best policy that is safe for the CMDP's costs, `(runs,)`.
        positive_violation: Sum over the episodes of [<g_i, q>]^+, `(runs x m)`.
        violation: Sum over the episodes of <g_i, q>, `(runs x m)`.
        score: `(runs x 2)`; meaningless in itself, but its derivative is what the two parts of the objective, the regret and the
            positive violation summed over the constraints, owe to the way the hyperparameters change which trajectories are
            likely. Zero but with sampled feedback.
    """

    regret: Tensor
    positive_violation: Tensor
    violation: Tensor
    score: Tensor

    @property
    def parts(self) -> Tensor:
        """Regret, and positive violation summed over the constraints: `(runs x 2)`."""
        return torch.stack([self.regret, self.positive_violation.sum(-1)], dim=-1)

    @property
    def worst_violation(self) -> Tensor:
        """The violation of the worst constraint, `(runs,)`."""
        return worst_constraint(self.violation)

    @property
    def worst_positive_violation(self) -> Tensor:
        """The positive violation of the worst constraint, `(runs,)`."""
        return worst_constraint(self.positive_violation)


class Unroll:
    """Runs of a learner in a simulator, both before their first episode, played window by window."""

    def __init__(self, learner: Learner, env: Simulator, horizon: int) -> None:
        self.learner, self.env = learner, env
        self._session = Session(learner, env, horizon, horizon, Crew(env.runs, alone=True))
        self._tracker = cast(Tracker, self._session.tracker)
        self._parts: dict[str, Any] = {"learner": learner, "env": env, "tracker": self._tracker}
        self._value = expected_value(env.cmdp.rewards, safe_optimum(env.cmdp).occupancy.sum(-1)).expand(env.runs)

    @property
    def episode(self) -> int:
        """Episodes played so far."""
        return self._session.played

    def advance(self, episodes: int, tick: Callable[[], Any] | None = None) -> Tensor:
        """Play so many episodes; returns what they add to both parts of the objective, `(runs x 2)`."""
        before, end = self.played().parts, self.episode + episodes
        while self.episode < end:
            for _ in range(self._session.advance(end - self.episode)):
                if tick is not None:
                    tick()
        return self.played().parts - before

    def played(self) -> Played:
        """What the runs have come to so far."""
        regret = self.episode * self._value - self._tracker.total("reward")
        positive, violation = (self._tracker.total(name) for name in ("positive_violation", "violation"))
        return Played(regret, positive, violation, torch.zeros_like(regret).unsqueeze(-1).expand(-1, 2))

    def state(self) -> dict[str, Any]:
        """All of it as plain data, for `restore`."""
        return {**{name: part.state_dict() for name, part in self._parts.items()}, "episode": self.episode}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self._session.played = int(state["episode"])
