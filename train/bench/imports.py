"""What `import torchcmdp` takes beside `import torch`, and which modules take it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from torchcmdp.errors import TorchCMDPError

from ..program import Count, bar, begin, publish, table

AIM = 1.3
SHOWN = 10
LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|\s*(\S+)$")


@dataclass
class Options:
    """Time `import torchcmdp` and `import torch` by `python -X importtime`, each time in a process of its own.

    Examples:
      python -m train bench imports
      python -m train bench imports --repeats 11
    """

    repeats: Count = 5  # Processes for each of the two, in turn; medians count.
    name: str = "bench"  # Folder of the results inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments.


def import_times(package: str) -> dict[str, tuple[int, int]]:
    """Of every module that `import package` loads in a fresh process, the microseconds of its own and with what it loads."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", f"import {package}"], capture_output=True, text=True)
    if done.returncode:
        raise TorchCMDPError(f"`import {package}` failed in a fresh process: {done.stderr.strip().splitlines()[-1]}")
    return {match[3]: (int(match[1]), int(match[2])) for match in map(LINE.match, done.stderr.splitlines()) if match}


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark."""
    options, folder = begin(Options, arguments, "bench imports")
    times = [(import_times("torch"), import_times("torchcmdp")) for _ in bar(range(options.repeats), "importing", leave=False)]
    torch, ours = zip(*times, strict=True)
    base, whole = median(times["torch"][1] for times in torch), median(times["torchcmdp"][1] for times in ours)
    rows = [["torch", f"{base / 1e6:.2f}", "1.00"], ["torchcmdp", f"{whole / 1e6:.2f}", f"{whole / base:.2f}"]]
    own = {name: median(times[name][0] for times in ours if name in times) for name in ours[0].keys() - torch[0].keys()}
    slowest = sorted(own, key=lambda name: own[name], reverse=True)[:SHOWN]
    slow = [[name, f"{own[name] / 1e3:.1f}"] for name in slowest]
    parts = (
        table(["import", "seconds", "times torch"], rows, "imports"),
        table(["slowest beside torch's", "own ms"], slow, "slowest"),
        f"Medians of {options.repeats} processes. Aim: at most {AIM} times torch, {'met' if whole <= AIM * base else 'missed'}.",
    )
    publish(folder / "imports.md", "\n\n".join(parts))
