"""A script with which a shell completes the commands and their options."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, Literal, Union

import tyro

from .program import IN_A_CLONE, parse

HOW = {
    "bash": "torchcmdp completion --shell bash > ~/.local/share/bash-completion/completions/torchcmdp",
    "zsh": "torchcmdp completion --shell zsh > ~/.zfunc/_torchcmdp, with fpath+=~/.zfunc before compinit in ~/.zshrc",
}


@dataclass
class Options:
    """Print a script with which a shell completes `torchcmdp`, its commands and their options.

    The commands of a clone are completed where it is installed, since that installs `torchcmdp` as well.

    Examples:
      python -m train completion
      torchcmdp completion --shell bash > ~/.local/share/bash-completion/completions/torchcmdp
      torchcmdp completion --shell zsh > ~/.zfunc/_torchcmdp
    """

    shell: Literal["bash", "zsh"] = "bash"  # Whose; where to put the script stands in its first line.


def main(arguments: Sequence[str]) -> None:
    """Print the script."""
    shell = parse(Options, arguments, prog=f"{IN_A_CLONE} completion").shell
    print(f"# {HOW[shell]}\n{script(shell)}")


def script(shell: str) -> str:
    """What tyro writes for one program with all commands as its subcommands."""
    from .__main__ import COMMANDS

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        tyro.cli(
            _any_of(__package__, COMMANDS),
            prog="torchcmdp",
            args=["--tyro-print-completion", shell],
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
        )
    return text.getvalue()


def _any_of(package: str, commands: dict[str, str]) -> Any:
    """One type for all these commands, some of which have parts, commands of their own."""

    def options(name: str) -> Any:
        module = importlib.import_module(f"{package}.{name}")
        if hasattr(module, "PARTS"):
            return make_dataclass(f"Part_{name}", [("part", _any_of(module.__name__, module.PARTS))])
        return module.Options

    return Union[  # noqa: UP007
        tuple(
            Annotated[options(name), tyro.conf.subcommand(name, description=purpose, prefix_name=False)]
            for name, purpose in commands.items()
        )
    ]
