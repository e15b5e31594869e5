"""`python -m train tune [study|horizons|threshold]`: constants for WC-OPS by gradient, and an empirical threshold."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence

from torchcmdp.errors import InvalidInput

STUDIES = {
    "study": ("train.tune_study", "find constants by gradient, and compare them on instances never seen (what `tune` alone does)"),
    "horizons": ("train.tune_horizons", "the paper's constants against the practical ones at several horizons"),
    "threshold": ("train.tune_threshold", "the empirical violation threshold: its premise, and what it does when costs change"),
}


def main(arguments: Sequence[str]) -> int:
    """Hand over to one of them; returns the exit code."""
    rest = list(arguments)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "study"
    if name not in STUDIES:
        near = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(STUDIES)}."
        raise InvalidInput(f"{name!r} is not a part of python -m train tune; {hint}")
    code: int = importlib.import_module(STUDIES[name][0]).main(rest)
    return code
