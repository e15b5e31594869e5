"""Starts the same command again and again, each time in a new process, and kills it with SIGKILL at a random episode.

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


def attempt(arguments: list[str], checkpoint: Path | None = None, target: int = 0, delay: float = 0.0) -> int | None:
    """Run the command in a process of its own; None if it was killed, else its exit code.

    Killed where a checkpoint is given: so many seconds after so many episodes are safe in it. Episodes and not seconds, because a
    busy machine takes ten times as long in one attempt as in the next.
    """
    child = start(arguments)
    if checkpoint is not None:
        deadline = time.monotonic() + 60  # a command that never gets there is killed as well, and the test says where
        while progress(checkpoint) < target and time.monotonic() < deadline:
            if (ended := os.waitpid(child, os.WNOHANG))[0]:  # nobody is left to get there
                return os.waitstatus_to_exitcode(ended[1])
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def progress(checkpoint: Path) -> int:
    """Episodes that are safe."""
    return int(torch.load(checkpoint, weights_only=True)["played"]) if checkpoint.exists() else 0


def kill_often(checkpoint: Path, kills: int, episodes: int, arguments: list[str]) -> list[int]:
    """Kill the command so many times, then let it end; returns how far each of the killed attempts got."""
    moments, safe = random.Random(0), []
    while len(safe) < kills:
        target = moments.randint(progress(checkpoint), episodes - 1)
        code = attempt(arguments, checkpoint, target, moments.uniform(0, 0.02))
        killed = code is None
        if killed:
            safe.append(progress(checkpoint))
        elif code != 0:  # it would be the same the next time, and the time after
            raise SystemExit(f"an attempt that began at episode {target} or before ended with {code}")
        if not killed or safe[-1] == episodes:  # nothing is left to be killed, so begin again
            shutil.rmtree(checkpoint.parents[1])
    if (code := attempt(arguments)) != 0:
        raise SystemExit(f"the last attempt ended with {code}")
    return safe


if __name__ == "__main__":
    logdir, kills, *arguments = sys.argv[1:]
    whole = [*arguments, "--logdir", logdir, "--name"]
    main([*whole, "whole"])  # here, so that the attempts find everything imported and compiled
    file = Path("wc-ops", "checkpoint.pt")
    episodes = progress(Path(logdir, "whole") / file)
    found = kill_often(Path(logdir, "killed") / file, int(kills), episodes, [*whole, "killed"])
    print("\n" + json.dumps(found))
