"""Starts the same command again and again, each time in a new process, and kills it with SIGKILL at a random moment.

A process of its own for `test_resume`: it forks, so that an attempt need not import everything again, and must have no threads.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from train.__main__ import main


def start(arguments: list[str]) -> int:
    """Run the command in a process of its own; returns its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = main(arguments)
        finally:
            sys.stdout.flush()
            os._exit(code)  # whatever happens, a child never returns into the loop
    return child


def attempt(arguments: list[str], seconds: float | None) -> int | None:
    """Run the command in a process of its own; None if it was killed, else its exit code."""
    child = start(arguments)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def time_to_play(checkpoint: Path, episodes: int, arguments: list[str]) -> float:
    """Seconds until all episodes are safe; what follows, figures above all, takes longer than playing."""
    started, child = time.monotonic(), start(arguments)
    while progress(checkpoint) < episodes:
        time.sleep(0.005)
    seconds = time.monotonic() - started
    os.waitpid(child, 0)
    return seconds


def progress(checkpoint: Path) -> int:
    """Episodes that are safe."""
    return int(torch.load(checkpoint, weights_only=True)["played"]) if checkpoint.exists() else 0


def kill_often(checkpoint: Path, kills: int, longest: float, episodes: int, arguments: list[str]) -> list[int]:
    """Kill the command so many times, then let it end; returns how far each of the killed attempts got."""
    moments, safe = random.Random(0), []
    while len(safe) < kills:
        killed = attempt(arguments, moments.uniform(0, longest)) is None
        if killed:
            safe.append(progress(checkpoint))
        if not killed or safe[-1] == episodes:  # nothing is left to be killed, so begin again
            shutil.rmtree(checkpoint.parents[1])
    if (code := attempt(arguments, None)) != 0:
        raise SystemExit(f"the last attempt ended with {code}")
    return safe


if __name__ == "__main__":
    logdir, kills, *arguments = sys.argv[1:]
    whole = [*arguments, "--logdir", logdir, "--name"]
    main([*whole, "whole"])  # here, so that the attempts find everything imported and compiled
    file = Path("wc-ops", "checkpoint.pt")
    episodes = progress(Path(logdir, "whole") / file)
    longest = time_to_play(Path(logdir, "timed") / file, episodes, [*whole, "timed"])
    found = kill_often(Path(logdir, "killed") / file, int(kills), longest, episodes, [*whole, "killed"])
    print("\n" + json.dumps(found))
