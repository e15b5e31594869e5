"""The exceptions of torchcmdp, and the checks that raise them: one sentence says what was wrong, where, and what was expected."""

from __future__ import annotations

import difflib
import importlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType, UnionType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor


class TorchCMDPError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidInput(TorchCMDPError, ValueError):
    """An argument has the wrong shape, range, name or contents."""


class RunFolderError(TorchCMDPError, RuntimeError):
    """A run folder cannot be used: foreign, damaged, or made with other settings."""


class MissingExtra(TorchCMDPError, ImportError):
    """A package is not installed that only some need."""


def require(package: str, extra: str | None) -> ModuleType:
    """The package, or one sentence that says how to install it: by an extra, or with None as our docs say."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:  # the package is there, and broken in its own way
            raise
        install = f"pip install 'torchcmdp[{extra}]' installs it" if extra else "docs/guides/environments.md says how to install it"
        raise MissingExtra(f"this adapter needs the package {package}: {install}.") from error


def warn(sentence: str) -> None:
    """A warning that points at the line outside of this package that led to it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]:
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, stacklevel=level)


def brief(value: object) -> str:
    """A value in a few words on one line."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    words = " ".join(repr(value).split())
    return words if len(words) <= 60 else f"{words[:57]}..."


def kind_of(value: object) -> str:
    """What a value is, whatever is in it."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    return "None" if value is None else f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def choice(name: str, value: str, options: Sequence[str]) -> str:
    """One of the names in `options`, or one sentence that suggests the nearest."""
    if isinstance(value, str) and value in options:
        return value
    near = difflib.get_close_matches(str(value), options, n=1) if isinstance(value, str) else []
    hint = f"did you mean {near[0]!r}" if near else "choose another"
    raise InvalidInput(f"{name} is {brief(value)}; {hint}? It must be one of {', '.join(map(repr, options))}.")


def number(name: str, value: float, expected: str = "a finite number", holds: Callable[[float], bool] = math.isfinite) -> float:
    """A number for which `holds` is true, or one sentence that says what was expected."""
    try:
        found = float(value)
        if holds(found):
            return found
    except (TypeError, ValueError, OverflowError, RuntimeError):  # no number, or none that a float can hold
        pass
    raise InvalidInput(f"{name} is {brief(value)}; it must be {expected}.")


def whole_number(name: str, value: int, *, least: int) -> int:
    """An int of at least `least`, or one sentence."""
    if isinstance(value, bool):
        raise InvalidInput(f"{name} is {value}; it must be a whole number of at least {least}.")
    number(name, value, f"a whole number of at least {least}", lambda found: found.is_integer() and found >= least)
    return int(value)


def not_negative(name: str, value: float) -> float:
    """A finite number of at least zero, or one sentence."""
    return number(name, value, "a finite number that is not negative", lambda found: 0 <= found < math.inf)


def positive(name: str, value: float) -> float:
    """A finite number above zero, or one sentence."""
    return number(name, value, "a finite number greater than zero", lambda found: 0 < found < math.inf)


def check_delta(delta: float, name: str = "delta") -> None:
    """Refuse a failure probability, or another number named `name`, that does not lie strictly between 0 and 1."""
    if not isinstance(delta, float) or not 0 < delta < 1:  # a float, as it nearly always is, is looked at once
        number(name, delta, "a number that lies strictly between 0 and 1", lambda found: 0 < found < 1)


def check_kind(name: str, value: object, kind: type | UnionType | Any, hint: str) -> None:
    """Refuse what is not of a class, or what cannot be called with `Callable`; `hint` says what one would pass."""
    if not isinstance(value, kind):
        raise InvalidInput(f"{name} is {brief(value)}; it must be {hint}.")


def switch(name: str, value: bool) -> bool:
    """True or False, or one sentence."""
    check_kind(name, value, bool, "True or False")
    return value


def check_folder(name: str, value: object) -> None:
    """Refuse what names no folder."""
    check_kind(name, value, str | os.PathLike, "the name of a folder, such as 'runs/first'")


def listed(name: str, value: object, hint: str) -> list[Any]:
    """What is listed there, or one sentence; `hint` says what one would pass."""
    check_kind(name, value, Iterable, hint)
    try:
        return list(cast(Iterable[Any], value))
    except TypeError:  # a tensor without axes says that it is iterable, and is not
        raise InvalidInput(f"{name} is {brief(value)}; it must be {hint}.") from None


def check_tensor(name: str, value: object, axes: int = 0) -> None:
    """Refuse what is not a tensor of real numbers with at least so many axes."""
    if not isinstance(value, Tensor) or value.is_complex() or value.dtype == torch.bool or value.dim() < axes:
        least = f" with at least {axes} axes" if axes else ""
        raise InvalidInput(f"{name} is {brief(value)}; it must be a torch tensor of real numbers{least}.")


def check_shape(name: str, value: Tensor, shapes: Sequence[tuple[int, ...]], expected: str) -> None:
    """Refuse a tensor of none of these shapes."""
    if tuple(value.shape) not in shapes:
        raise InvalidInput(f"{name} has shape {tuple(value.shape)}; {expected}.")


def first(wrong: Tensor) -> list[int]:
    """Where the first True of a tensor with axes is; empty where there is none, and where there are no values to look at."""
    found: list[int] = [] if wrong.device.type == "meta" or not wrong.any() else wrong.nonzero()[0].tolist()
    return found


def tensors_of(*values: Any) -> list[Any]:
    """Arrays of numbers as tensors of their own, of the type of a tensor beside them or else of their widest; all else as it is."""
    arrays = [isinstance(value, np.ndarray) and value.dtype.kind in "iuf" for value in values]
    single = all(value.dtype == np.float32 for value, array in zip(values, arrays, strict=True) if array)
    like = next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)
    made = torch.empty(0, dtype=torch.float32 if single else torch.float64) if like is None else like
    return [
        torch.tensor(value.astype(np.float64)).to(made) if array else value for value, array in zip(values, arrays, strict=True)
    ]


def check_dtype(dtype: object) -> None:
    """Refuse what is not a floating-point type."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidInput(f"dtype is {brief(dtype)}; it must be a floating-point type, such as torch.float64.")


def check_device(device: object) -> None:
    """Refuse what is no device, or none that this machine has; None is the default one."""
    if device is None:
        return
    try:
        if isinstance(device, str | int | torch.device) and not isinstance(device, bool):
            torch.empty(0, device=device)
            return
    except (RuntimeError, AssertionError, ValueError, TypeError):  # in PyTorch it depends on the build which
        pass
    raise InvalidInput(f"device is {brief(device)}; it must be a device that this machine has, such as 'cpu' or 'cuda:0'.")


def check_place(dtype: object, device: object) -> None:
    """Refuse what is not a floating-point type on a device."""
    check_dtype(dtype)
    check_device(device)


def check_memory(what: str, numbers: int) -> None:
    """Refuse what needs more float64 numbers than this machine has memory for, before anything is made."""
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 8 * numbers > room:
        size = f"{8 * numbers / 2**30:,.3g}" if numbers < 10**30 else "more than 10^21"
        raise InvalidInput(f"{what} take at least {size} GiB of memory, and this machine has {room / 2**30:.3g}; take fewer.")
