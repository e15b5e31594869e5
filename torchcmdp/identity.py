"""What tells one thing from another of its class: its `config()`, or else its attributes, by their values."""

from __future__ import annotations

import dis
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Ends what is recorded of an attribute that cannot be compared with another: a function, an open file, an object of some kind.
UNTOLD = "which cannot be compared"

_MODULE = frozenset(vars(nn.Module()))  # what PyTorch keeps of its own in every module


def config_of(thing: Any) -> dict[str, Any]:
    """What defines a learner or a process, ready for JSON: its own `config()`, with its attributes where its class has none.

    A class of this package speaks for itself, and so does one that writes a `config()`. One that inherits it, or has none, may
    have settings that no `config()` knows of: then the values of all attributes that are not this package's are recorded.
    """
    own: dict[str, Any] = thing.config() if hasattr(thing, "config") else {}
    kind = type(thing)
    if _ours(kind):
        return own
    own = {name: _told(value) for name, value in own.items()}
    if "config" in vars(kind):
        return own
    attributes = {name: value for name, value in _attributes(thing).items() if name not in own}
    return {**own, "attributes": attributes} if attributes else own


def attributes_of(thing: Any) -> dict[str, Any]:
    """By name the values of all attributes of a thing whose class is not this package's, as `config_of` records them."""
    return {} if _ours(type(thing)) else _attributes(thing)


def untold(config: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """By name the entries of a recorded configuration that cannot be compared, and what they are."""
    for key, value in config.items():
        if isinstance(value, Mapping | list):
            yield from untold(value if isinstance(value, Mapping) else dict(enumerate(value)), f"{prefix}{key}.")
        elif isinstance(value, str) and value.endswith(UNTOLD):
            yield f"{prefix}{key}", value.removesuffix(f", {UNTOLD}")


def has_attributes(config: Mapping[str, Any]) -> bool:
    """Whether `config_of` had to record attributes in some part of a configuration."""
    return any(key == "attributes" or isinstance(value, Mapping) and has_attributes(value) for key, value in config.items())


def fingerprint(tensor: Tensor) -> str:
    """A short name for a tensor's shape, type and contents: two runs are resumable into each other only if theirs agree."""
    found = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    found.update(_bytes(tensor))
    return found.hexdigest()[:16]


def digest(content: Any) -> str:
    """A checksum of nested mappings, lists, numbers, strings and tensors: of their keys, types, shapes and every bit."""
    found = hashlib.sha256()
    _digest(content, found.update)
    return found.hexdigest()


def _digest(value: Any, add: Callable[[bytes | memoryview], object]) -> None:
    if isinstance(value, Tensor):
        add(f"tensor {tuple(value.shape)} {value.dtype};".encode())
        add(_bytes(value))
    elif isinstance(value, Mapping):
        add(f"mapping {len(value)};".encode())
        for key in sorted(value, key=repr):
            add(f"{key!r}:".encode())
            _digest(value[key], add)
    elif isinstance(value, list | tuple):
        add(f"list {len(value)};".encode())
        for entry in value:
            _digest(entry, add)
    else:
        plain = value is None or isinstance(value, bool | int | float | str | bytes)
        add(f"{type(value).__name__} {value!r};".encode() if plain else type(value).__name__.encode())


def _bytes(tensor: Tensor) -> memoryview:
    """Its contents, where they lie if they lie in one piece: recorded sequences are large."""
    if tensor.device.type == "meta":
        return memoryview(b"")
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().flatten()
    if flat.stride() != (1,):  # also where there is one value, which torch calls contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data  # as bytes, since numpy does not know all of torch's types


def _attributes(thing: Any, above: tuple[int, ...] = ()) -> dict[str, Any]:
    """By name the values of what an object was given and of what its class, if it is not ours, says of all of them."""
    kinds = [kind for kind in type(thing).__mro__ if not _library(kind)]
    found: dict[str, Any] = {}
    for kind in reversed(kinds):
        told = {
            name: _told(value) for name, value in vars(kind).items() if not name.startswith("__") and not hasattr(value, "__get__")
        }
        found |= {name: value for name, value in told.items() if not any(untold({name: value}))}
        slots = getattr(kind, "__slots__", ())
        found |= {name: getattr(thing, name, None) for name in ([slots] if isinstance(slots, str) else slots)}
    found |= getattr(thing, "__dict__", {})
    if isinstance(thing, nn.Module):
        found = {name: value for name, value in found.items() if name not in _MODULE}
        found |= {**thing._parameters, **thing._buffers, **thing._modules}
    known = {name for kind in type(thing).__mro__ if _ours(kind) for name in _assigned(kind)}
    return {name: _told(value, (*above, id(thing))) for name, value in sorted(found.items()) if name not in known}


def _told(value: Any, above: tuple[int, ...] = ()) -> Any:
    """The value as JSON holds it, by content; of what has none, what it is."""
    inside = (*above, id(value))
    if id(value) in above:
        return f"a {type(value).__name__} in itself, {UNTOLD}"
    match value:
        case None | bool() | int() | float() | str() if not isinstance(value, Enum | np.generic):
            return value
        case Tensor():
            return fingerprint(value)
        case np.generic() | np.ndarray():
            if value.dtype.hasobject:
                return f"an array of objects, {UNTOLD}"
            return hashlib.sha256(f"{value.shape} {value.dtype}".encode() + value.tobytes()).hexdigest()[:16]
        case bytes() | bytearray():
            return hashlib.sha256(value).hexdigest()[:16]
        case complex() | Enum() | PurePath() | range() | slice() | torch.dtype() | torch.device() | torch.Size():
            return f"{type(value).__name__} {value}"
        case Mapping():
            return {str(key): _told(entry, inside) for key, entry in value.items()}
        case list() | tuple():
            return [_told(entry, inside) for entry in value]
        case Set():
            return sorted((_told(entry, inside) for entry in value), key=repr)
        case torch.Generator():
            return fingerprint(value.get_state())
        case np.random.Generator():
            return _told(value.bit_generator.state, inside)
        case random.Random():
            return hashlib.sha256(repr(value.getstate()).encode()).hexdigest()[:16]
    return _object(value, inside)


def _object(value: Any, inside: tuple[int, ...]) -> Any:
    """An object by its `config()`, a record by its fields, a module by its attributes, an optimiser by its state; else not told."""
    name = type(value).__name__
    if isinstance(value, torch.optim.Optimizer):
        return {"name": name, "state": digest(value.state_dict())}
    if isinstance(value, type) or not (is_dataclass(value) or isinstance(value, nn.Module) or hasattr(value, "config")):
        return f"a {name}, {UNTOLD}"
    if callable(getattr(value, "config", None)):
        return {"name": name, **config_of(value)}
    if is_dataclass(value):
        return {"name": name, **{entry.name: _told(getattr(value, entry.name), inside) for entry in fields(value)}}
    return {"name": name, **_attributes(value, inside)}


def _ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def _library(kind: type) -> bool:
    """Whether its class attributes are not the user's own."""
    return kind.__module__.partition(".")[0] in (__name__.partition(".")[0], "torch", "builtins", "abc", "typing")


def _assigned(kind: type) -> Iterator[str]:
    """The attributes that the methods of a class assign: of a class of ours, what its `config()` knows of, and what it computes."""
    for member in vars(kind).values():
        for function in (member, getattr(member, "fget", None), getattr(member, "__func__", None)):
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                yield from (step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
