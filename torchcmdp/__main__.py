"""`torchcmdp`, or `python -m torchcmdp`: the programs, from wherever they are."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec

# Where the programs are: in a wheel under a name that nobody else has, in a clone in the folder `train`.
PLACES = ("torchcmdp_programs", "train")


def main() -> int:
    """Hand over to the programs; returns the exit code."""
    place = next((name for name in PLACES if find_spec(name) is not None), None)
    if place is None:
        print(
            "the programs of torchcmdp are not installed; reinstall it: pip install --force-reinstall torchcmdp.", file=sys.stderr
        )
        return 2
    return int(importlib.import_module(f"{place}.__main__").main(sys.argv[1:], "torchcmdp"))


if __name__ == "__main__":
    sys.exit(main())
