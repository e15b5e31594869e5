"""`kill_at.py 9,60,0 COMMAND ...`: the command dies by SIGKILL in the middle of its 9th write, then of its 60th; the last one ends.

Before, it is done once without dying, under the name `whole`; the others are `killed`. A process of its own for the tests: it
forks, so that an attempt need not import and compile everything again, and must have no threads. Prints how each attempt ended.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path

from kill_often import start

import torchcmdp as tc
from torchcmdp import events, files, folder
from train.__main__ import main

real = files.write_file


def mortal(last: int) -> None:
    """Let this process die when it writes a file for the last time, with half of that on the disk."""
    left = [last]

    def write_file(path: Path, content: bytes | memoryview) -> None:
        left[0] -= 1
        if left[0] == 0:
            path.with_name(f".{path.name}.tmp").write_bytes(bytes(content)[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, content)

    for room in (events, folder):
        room.write_file = write_file  # type: ignore[attr-defined]


if __name__ == "__main__":
    tc.run = functools.partial(tc.run, checkpoint_episodes=5)
    ends = [main([*sys.argv[2:], "--name", "whole"])]
    for last in map(int, sys.argv[1].split(",")):
        mortal(last)
        _, status = os.waitpid(start([*sys.argv[2:], "--name", "killed"]), 0)
        ends.append(os.waitstatus_to_exitcode(status))
    print("\n" + json.dumps(ends))
