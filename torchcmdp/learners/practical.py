"""The recipe of `WCOPS.practical` and `OptCMDP.practical`, and the constants of an earlier study by gradient."""

from __future__ import annotations

from typing import Any

from torchcmdp.costs import CostModel, Drift, PriorCosts
from torchcmdp.errors import choice
from torchcmdp.learners.fitted import fitted_scales

# Multiples of the paper's constants, and how losses are estimated; `python -m train study` judges them on instances never seen.
RECIPE: dict[str, Any] = {"eta_scale": 20.0, "gamma_scale": 20.0, "radius_scale": 0.01, "loss": "doubly-robust", "share": 1e-4}


def practical_costs(margin: float = 1.0) -> CostModel:
    """What the practical learners believe of the costs: an optimistic prior, one standard error to spare, and a test for drift."""
    return PriorCosts(margin=margin, drift=Drift())


def recipe_of(scales: str | None, *args: Any, **options: Any) -> dict[str, Any]:
    """The recipe with its own constants, or with those that follow the problem: what a learner of these arguments begins from."""
    if scales is None:
        return {**RECIPE, "costs": practical_costs()}
    choice("scales", scales, ("fitted",))
    found = fitted_scales(*args, **options)
    return {**RECIPE, "costs": practical_costs(found.pop("margin")), **found}


def overridden(recipe: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The recipe with what somebody wants otherwise, and without estimates of what he knows."""
    estimates = {"known_rewards": ("loss", "rewards"), "known_costs": ("costs",)}
    needless = {name for known, names in estimates.items() if overrides.get(known) is not None for name in names}
    return {**{name: value for name, value in recipe.items() if name not in needless}, **overrides}


# The study by gradient, which anybody can repeat; it prints the scales and how they do on instances that it has not seen.
STUDY_COMMAND = "python -m train tune"

# What was declared there: random CMDPs with states 1-3-3-1, 3 actions and 2 constraints, seeds 0 to 3, each with stochastic costs
# and with costs that change after a third of 1000 episodes; objective (regret + 2 * positive violation summed over constraints) /
# episodes; 18 steps of Adam from eta_scale = gamma_scale = 1, bonus_scale = radius_scale = 0.1, threshold_scale = 0.001; cap_scale
# fixed at 1. Rounded to two digits. They carry no worst-case guarantee: with widths this small the true CMDP may well lie outside
# the confidence set.
PRACTICAL_SCALES = {
    "eta_scale": 2.6,
    "gamma_scale": 0.85,
    "bonus_scale": 0.012,
    "radius_scale": 0.015,
    "threshold_scale": 0.0011,
}
