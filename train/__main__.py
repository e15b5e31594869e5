"""`python -m train [command] [options]`, for pip users `torchcmdp`: hand over to the module of the command."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from torchcmdp import __version__
from torchcmdp.errors import InvalidInput, TorchCMDPError

from .output import as_json
from .program import IN_A_CLONE, called, hand_over, listing, one_thread

MAIN_JOB = "run"
# What they do instead.
WITHOUT_TABLES = {"completion": "prints a script", "tensorboard": "serves pages"}
# By the name of its module; what it is for.
COMMANDS = {
    MAIN_JOB: "learners in a CMDP, side by side: regret and violation; what is done without a command",
    "paper": "the paper's experiments, and which of its claims hold",
    "tune": "constants for WC-OPS by gradient; tune horizons and tune threshold judge them",
    "study": "practical learners against their rivals on held-out instances, with equal search effort",
    "sweep": "a grid of hyperparameters as one batch, and the front of regret against violation",
    "compare": "all learners on a suite of named problems: tables, figures, ranks, wins",
    "problems": "the named problems, and what is known of each",
    "soak": "every learner on a thousand random CMDPs, and a count of what went wrong",
    "shield": "the projection as a layer: a shielded policy network",
    "predict": "the projection as a layer: predict, then optimise",
    "bench": "where the time goes, and how we compare with other solvers",
    "tensorboard": "look at runs in a browser: TensorBoard, in which a learner has its own colour",
    "doctor": "what is installed: versions, devices, solvers, compiled kernels",
    "completion": "a script with which your shell completes commands and options",
}


def main(arguments: Sequence[str], name: str = IN_A_CLONE) -> int:
    """Run what was typed after the name; returns the exit code: 0 done, 2 wrong arguments, an unusable folder, 130 interrupted."""
    with called(name):
        return _main([word for word in arguments if word != "--json"], "--json" in arguments)


def _main(rest: list[str], json: bool) -> int:
    command, asked = MAIN_JOB, rest.copy()
    if rest and not rest[0].startswith("-"):
        command = rest.pop(0)
    try:
        if command == "help" and rest:
            command, rest = rest[0], [*rest[1:], "--help"]
        elif command == "help" or asked in (["-h"], ["--help"]):
            print(listing("python -m train [COMMAND] [options]", COMMANDS))
            print("\nEach has --help. Without a command:\n", flush=True)
            command, rest = MAIN_JOB, ["--help"]
        elif asked == ["--version"]:
            print(f"torchcmdp {__version__}")
            return 0
        if json and command in WITHOUT_TABLES:
            raise InvalidInput(f"--json is for commands that print a table, and {command} {WITHOUT_TABLES[command]}; leave it out.")
        with one_thread(), as_json(json):
            return hand_over(__package__, COMMANDS, command, rest, "a command of python -m train")
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
