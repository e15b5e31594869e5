"""`python -m train bench projection|program|episode|scale|imports`: where the time goes, and how we compare with other solvers."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence

from torchcmdp.errors import InvalidInput

BENCHMARKS = {
    "projection": (
        "train.bench_projection",
        "our projection against cvxpylayers (Moreau, DIFFCP) and Clarabel, same instances, same run",
    ),
    "program": ("train.bench_program", "the optimistic linear program of OptCMDP, a whole batch at once, against HiGHS"),
    "episode": ("train.bench_episode", "where an episode of WC-OPS spends its time, and the same run through cvxpylayers"),
    "scale": ("train.bench_scale", "how its cost grows with the batch, the widths and the layers"),
    "imports": ("train.bench_imports", "what `import torchcmdp` takes beside `import torch`, and which modules take it"),
}


def main(arguments: Sequence[str]) -> int:
    """Hand over to one benchmark; returns the exit code."""
    rest = list(arguments)
    if not rest or rest[0] in ("-h", "--help"):
        print("usage: python -m train bench NAME [options]\n")
        for name, (_, purpose) in BENCHMARKS.items():
            print(f"  {name:<12}{purpose}")
        print("\nExample: python -m train bench projection --sizes paper --batches 10 128\nEach has --help.")
        return 0
    name = rest.pop(0)
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(BENCHMARKS)}."
        raise InvalidInput(f"{name!r} is not a benchmark; {hint}")
    code: int = importlib.import_module(BENCHMARKS[name][0]).main(rest)
    return code


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[j]) for row in cells) for j in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
