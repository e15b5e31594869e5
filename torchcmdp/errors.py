"""The exceptions of torchcmdp: each message is one sentence that says what was wrong, where, and what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class TorchCMDPError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidInput(TorchCMDPError, ValueError):
    """An argument has the wrong shape, range, name or contents."""


class RunFolderError(TorchCMDPError, RuntimeError):
    """A run folder cannot be used: foreign, damaged, or made with other settings."""


def choice(name: str, value: str, options: Sequence[str]) -> str:
    """One of the names in `options`, or one sentence that suggests the nearest."""
    if value in options:
        return value
    near = difflib.get_close_matches(str(value), options, n=1)
    hint = f"did you mean {near[0]!r}" if near else "choose another"
    raise InvalidInput(f"{name} is {value!r}; {hint}? It must be one of {', '.join(map(repr, options))}.")
