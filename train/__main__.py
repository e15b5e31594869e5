"""`python -m train [command] [options]`: hand over to the module of the command."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence

from torchcmdp.errors import TorchCMDPError

MAIN_JOB = "run"
COMMANDS = {
    MAIN_JOB: "train.main_job",
    "paper": "train.paper",
    "tune": "train.tune",
    "sweep": "train.sweep",
    "soak": "train.soak",
    "shield": "train.shield",
    "predict": "train.predict",
    "bench": "train.bench",
}


def main(arguments: Sequence[str]) -> int:
    """Run one command and return the exit code: 0 done, 2 wrong arguments or an unusable folder, 130 interrupted."""
    command, rest = MAIN_JOB, list(arguments)
    if rest and not rest[0].startswith("-"):
        command = rest.pop(0)
    try:
        if command not in COMMANDS:
            near = difflib.get_close_matches(command, COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(COMMANDS)}."
            return _refuse(f"{command!r} is not a command of python -m train; {hint}")
        code: int = importlib.import_module(COMMANDS[command]).main(rest)
        return code
    except TorchCMDPError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("Interrupted; the same command continues from the last checkpoint.", file=sys.stderr)
        return 130
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        return _refuse("there is not enough memory for this; try fewer runs, smaller widths, or --device.")
    except BrokenPipeError:  # the reader of our output, such as head, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, a folder without permission
        return _refuse(f"{error.filename or 'the output'} cannot be used: {error.strerror or error}.")


def _refuse(sentence: str) -> int:
    print(" ".join(sentence.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
