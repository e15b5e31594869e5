"""`python -m train tune [study|compare|variance|...]`: constants by gradient, and what gradients are worth."""

from __future__ import annotations

from functools import partial

from ..program import hand_to_part

PARTS = {
    "study": "find constants by gradient, and compare them on instances never seen (what `tune` alone does)",
    "compare": "gradients, random search, TPE and CMA-ES at equal run-episodes, held out",
    "variance": "the variance of every gradient estimator against the horizon",
    "sensitivity": "regret and violation against each constant, with gradients as tangents",
    "fit": "constants that follow the problem, trained on some problems and judged on others",
    "rivals": "constants for the rivals by a grid, on the same instances and by the same objective",
    "horizons": "the paper's constants against the practical ones at several horizons",
    "threshold": "the empirical violation threshold: its premise, and what it does when costs change",
}

main = partial(hand_to_part, __package__, PARTS, "study")
