"""The programs a person runs, and what they share: reading arguments, and saying what was wrong with them in one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import math
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import torch
import tyro

from torchcmdp.errors import InvalidInput

Options = TypeVar("Options")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def parse(options: type[Options], arguments: Sequence[str], *, prog: str) -> Options:
    """Read a dataclass of options from the command line.

    Raises:
        InvalidInput: With one sentence, for anything that cannot be read.
        SystemExit: With code 0, after --help.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            found, unknown = tyro.cli(
                options,
                prog=prog,
                description=inspect.getdoc(options),  # whole: of its own accord tyro leaves out the section of examples
                args=list(arguments),
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as end:
        if end.code in (0, None):
            raise
        _complain(options, arguments, complaint.getvalue(), prog)
    if unknown:
        _complain_unknown(options, unknown[0], prog)
    _check_numbers(found)
    return found


def _check_numbers(found: Any) -> None:
    """What holds for the options of every command: numbers are finite, a seed is one, and so is a failure probability."""
    for field in _fields(type(found)):
        value = getattr(found, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise InvalidInput(f"{_option(field.name)} is {number}; it must be a finite number.")
    seed = getattr(found, "seed", 0)
    if not 0 <= seed < 2**32:
        raise InvalidInput(f"--seed is {seed}; it must be a whole number with 0 <= seed < 2**32.")
    delta = getattr(found, "delta", 0.5)
    if not 0 < delta < 1:
        raise InvalidInput(f"--delta is {delta}; it must lie strictly between 0 and 1.")


def check_positive(**values: float | Sequence[float] | None) -> None:
    """Refuse numbers, alone or in a sequence, that are not above zero; the keyword is the option's name."""
    for name, value in _numbers(values):
        if not value > 0:
            raise InvalidInput(f"{_option(name)} is {value:g}; it must be greater than zero.")


def check_not_negative(**values: float | Sequence[float] | None) -> None:
    """Refuse numbers, alone or in a sequence, that are below zero; the keyword is the option's name."""
    for name, value in _numbers(values):
        if not value >= 0:
            raise InvalidInput(f"{_option(name)} is {value:g}; it must not be negative.")


def _numbers(values: Mapping[str, float | Sequence[float] | None]) -> Iterator[tuple[str, float]]:
    """Each number with its option's name."""
    for name, value in values.items():
        for number in value if isinstance(value, Sequence) else () if value is None else (value,):
            yield name, number


def check_device(name: str) -> torch.device:
    """The device of that name, if this machine has it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidInput(f"--device {name} cannot be used here: PyTorch finds no such device; try --device cpu.") from error
    if device.type == "meta":
        raise InvalidInput("--device meta holds no numbers; try --device cpu.")
    return device


def experiment_folder(logdir: str, name: str) -> Path:
    """<logdir>/<name>, where the name is one plain folder."""
    if not name or name in (".", "..") or re.search(r"[/\\\0]", name):
        raise InvalidInput(f"--name {name!r} must be one plain folder name inside {logdir}, without slashes.")
    folder = Path(logdir) / name
    ancestor = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        raise InvalidInput(f"{folder} cannot be written to, because {ancestor} is not a folder in which you may write.")
    return folder


def _complain_unknown(options: type, token: str, prog: str) -> NoReturn:
    if not token.startswith("-"):
        raise InvalidInput(f"{token!r} is not an option of {prog}; see {prog} --help.")
    given = token.partition("=")[0]
    near = difflib.get_close_matches(given, [_option(f.name) for f in _fields(options)], n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}?" if near else f"see {prog} --help."
    raise InvalidInput(f"{given} is not an option of {prog}; {hint}")


def _complain(options: type, arguments: Sequence[str], message: str, prog: str) -> NoReturn:
    """Turn tyro's framed paragraphs into one sentence about the option they name."""
    text = " ".join(re.sub(r"[^\x20-\x7e\n]", " ", message).split())
    types = typing.get_type_hints(options)
    for field in _fields(options):
        option = _option(field.name)
        if re.search(rf"{re.escape(option)}(?![\w-])", text):
            expected = _expected(types[field.name])
            given = _given(arguments, option)
            raise InvalidInput(f"{option} got {given}; expected {expected}.")
    raise InvalidInput(f"{text[:200].rstrip('. ')}; see {prog} --help.")


def _given(arguments: Sequence[str], option: str) -> str:
    """The values that followed an option, in words."""
    values: list[str] = []
    for j, token in enumerate(arguments):
        if token.startswith(f"{option}="):
            values = [token.partition("=")[2]]
        elif token == option:
            rest = list(arguments[j + 1 :])
            end = next((i for i, value in enumerate(rest) if value.startswith("--")), len(rest))
            values = rest[:end]
    return repr(" ".join(values)) if values else "no value"


def _expected(kind: Any) -> str:
    """What an option of this type takes, in words."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if typing.get_origin(kind) is tuple:
        return {int: "whole numbers", float: "numbers"}.get(arguments[0], "values") + " separated by spaces"
    if type(None) in arguments:
        return _expected(next(a for a in arguments if a is not type(None)))
    return {int: "a whole number", float: "a number", bool: "no value, since it is a switch"}.get(kind, "a value")


def _fields(options: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(options)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
