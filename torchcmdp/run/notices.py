"""What a run says once, of things that would otherwise show in no number, or only to those who know where to look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchcmdp.errors import warn
from torchcmdp.kernels.engine import engine
from torchcmdp.learners.guarded import REFUTED
from torchcmdp.status import Status

if TYPE_CHECKING:
    from torchcmdp.run.session import Session

# Tags: whether an episode was past the learner's horizon, and the share of the runs in which no policy is safe.
PAST_HORIZON = "Learner/past_horizon"
NO_SAFE_POLICY = "Metrics/no_safe_policy"


class Notices:
    """Warnings, each of them once a sitting.

    Args:
        silent: Say nothing, since another process does.
    """

    def __init__(self, silent: bool = False) -> None:
        self._silent, self._said = silent, set[str]()

    def at_start(self, session: Session) -> None:
        """What can be known before an episode is played."""
        before, last = session.first_update, session.first_update + session.episodes
        name = type(session.learner).__name__
        if last > session.horizon:
            self._say(
                PAST_HORIZON,
                f"{name} was made for a horizon of {session.horizon} episodes, and this run ends with its episode {last}: what its "
                f"confidence terms promise ends before; make it with horizon={last}. The tag {PAST_HORIZON} counts such episodes.",
            )
        if engine() == "auto" and session.obstacle.endswith("kernels compute in torch.float64"):
            self._say(
                "float32",
                f"{session.obstacle}: torch plays this run, a step at a time, which is many times slower; make learner and CMDP in "
                'torch.float64, or say engine="torch" if that is what you want.',
            )
        if engine() == "auto" and session.obstacle.startswith("kernels on a GPU need"):
            self._say(
                "gpu",
                f"{session.obstacle}: torch plays this run, a step at a time, with thousands of small kernels an episode; say "
                'engine="torch" if that is what you want.',
            )
        if before and not session.played:
            self._say(
                "warm",
                f"{name} has learned from {before} episodes before this run, which its curves do not show; make a new one, unless "
                "that is what you want.",
            )

    def at_point(self, row: Mapping[str, float]) -> None:
        """What a logging point shows."""
        share = row[NO_SAFE_POLICY]
        if share > 0:
            self._say(
                NO_SAFE_POLICY,
                f"no policy is safe in {share:.3g} of the runs, whose regret is NaN, and so is its mean; loosen the costs, or look "
                f"at the violations and the alpha-regret. The tag {NO_SAFE_POLICY} has the share.",
            )
        if row.get(REFUTED, 0.0) > 0:
            self._say(
                REFUTED,
                f"what was seen refutes the cost bounds of the baseline in {row[REFUTED]:.3g} of the episodes since the last "
                f"logging point: nothing is promised there; give bounds that it keeps. The tag {REFUTED} counts such episodes.",
            )
        for status in (Status.MAX_ITERATIONS, Status.INVALID):
            tag = f"Solver/{status.name.lower()}"
            share = row.get(tag, 0.0)
            if share > 0:
                ended = f"of the solver's instances since the last logging point {share:.3g} ended with status {status.name}"
                self._say(tag, f"{ended}: {status.advice} The tag {tag} counts them.")

    def _say(self, key: str, sentence: str) -> None:
        if key not in self._said and not self._silent:
            warn(sentence)
        self._said.add(key)
