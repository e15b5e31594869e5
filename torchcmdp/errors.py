"""The exceptions of torchcmdp, and the checks that raise them: one sentence says what was wrong, where, and what was expected."""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Sequence


class TorchCMDPError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidInput(TorchCMDPError, ValueError):
    """An argument has the wrong shape, range, name or contents."""


class RunFolderError(TorchCMDPError, RuntimeError):
    """A run folder cannot be used: foreign, damaged, or made with other settings."""


def warn(sentence: str) -> None:
    """A warning that points at the line outside of this package that led to it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]:
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, stacklevel=level)


def choice(name: str, value: str, options: Sequence[str]) -> str:
    """One of the names in `options`, or one sentence that suggests the nearest."""
    if value in options:
        return value
    near = difflib.get_close_matches(str(value), options, n=1)
    hint = f"did you mean {near[0]!r}" if near else "choose another"
    raise InvalidInput(f"{name} is {value!r}; {hint}? It must be one of {', '.join(map(repr, options))}.")


def whole_number(name: str, value: int, *, least: int) -> int:
    """An int of at least `least`, or one sentence."""
    if isinstance(value, bool) or not float(value).is_integer() or value < least:
        raise InvalidInput(f"{name} is {value}; it must be a whole number of at least {least}.")
    return int(value)


def not_negative(name: str, value: float) -> float:
    """A finite number of at least zero, or one sentence."""
    if not 0 <= value < math.inf:
        raise InvalidInput(f"{name} is {value}; it must be a finite number that is not negative.")
    return float(value)


def positive(name: str, value: float) -> float:
    """A finite number above zero, or one sentence."""
    if not 0 < value < math.inf:
        raise InvalidInput(f"{name} is {value}; it must be a finite number greater than zero.")
    return float(value)


def check_delta(delta: float, name: str = "delta") -> None:
    """Refuse a failure probability, or another number named `name`, that does not lie strictly between 0 and 1."""
    if not 0 < delta < 1:
        raise InvalidInput(f"{name} is {delta}; it must lie strictly between 0 and 1.")
