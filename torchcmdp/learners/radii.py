"""The radii around plain averages that the optimistic rivals add: as published, taken literally, or matched to those of WC-OPS."""

from __future__ import annotations

import math

from torch import Tensor

from torchcmdp.estimation import bonus_log_term, hoeffding_radius
from torchcmdp.layout import Layout

RADIUS_MODES = ("published", "matched", "literal")


def feedback_log_term(mode: str, layout: Layout, constraints: int, *, horizon: int, delta: float) -> float:
    """The logarithm in the radii of costs: iota' = ln(6 |X| |A| (m + 1) T / delta) as published, the bonus's where matched."""
    if mode == "matched":
        return bonus_log_term(layout, constraints, horizon=horizon, delta=delta)
    return math.log(6 * layout.total_states * layout.actions * (constraints + 1) * horizon / delta)


def feedback_radii(
    mode: str, visits: Tensor, layout: Layout, constraints: int, *, horizon: int, delta: float, bonus_scale: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """beta^r and beta^g, how far the mean reward and the mean costs of a pair may lie from their averages.

    "published" takes beta^g = sqrt(2 iota' / N) with iota' = ln(6 |X| |A| (m + 1) T / delta) and N = max(1, visits), "matched"
    takes WC-OPS's cost bonus. Rewards have half the range of costs, and so half their radius in every mode: sqrt(iota' / (2 N)) is
    Hoeffding's for [0, 1], where the published learner takes the radius of costs. "literal" takes that learner at its word: its
    sqrt(2 iota' / N) was for costs in [0, 1], and costs in [-1, 1] have twice that range, so both radii are twice the "published".

    Args:
        mode: "published", "matched" or "literal".
        visits: N(x,a), `(... x L x S x A)`.
        layout: Layer widths and actions.
        constraints: m.
        horizon: T.
        delta: Failure probability.
        bonus_scale: Multiplies both radii, a float or `(...)`.

    Returns:
        Twice `(... x L x S x A)`, zero in the padding: of rewards, and of the costs of every constraint.
    """
    logarithm = feedback_log_term(mode, layout, constraints, horizon=horizon, delta=delta)
    radius = hoeffding_radius(visits, layout, logarithm, bonus_scale) * (2 if mode == "literal" else 1)
    return 0.5 * radius, radius


def transition_kind(mode: str, confidence: str) -> str:
    """The kind of transition radii: OptCMDP's own as published, and the kind that WC-OPS uses where they are matched."""
    return confidence if mode == "matched" else "efroni"
