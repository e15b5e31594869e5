"""The built-in processes as kernels see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchcmdp.kernels.memory import array, tensor_of, zeros
from torchcmdp.processes.adversary import OGDAdversary
from torchcmdp.processes.base import Process
from torchcmdp.processes.sequences import Bernoulli, Cyclic, Fixed, Recorder, Replay, Switching

if TYPE_CHECKING:
    from torchcmdp.kernels.processes import Process as Packed

# How the values of each change, by the kernels' name for it.
_KINDS: dict[type[Process], str] = {
    Fixed: "CONSTANT",
    Bernoulli: "CONSTANT",
    Switching: "SWITCHING",
    Cyclic: "CYCLIC",
    Replay: "REPLAY",
    OGDAdversary: "OGD",
}

_tables: WeakKeyDictionary[Process, tuple[Any, Any]] = WeakKeyDictionary()


def _recorded(process: Any) -> Any:
    """What a recorder records, and any other process itself."""
    return process.process if type(process) is Recorder else process


def is_ours(process: Any) -> bool:
    """Whether the process is one of ours, no subclass, or a recorder of one: these keep within their range."""
    return type(_recorded(process)) in _KINDS


def is_packable(process: Any, device: torch.device) -> bool:
    """Whether the process is one of ours, and on this device in float64."""
    if not is_ours(process):
        return False
    return process.values.device == device and process.values.dtype == torch.float64  # type: ignore[no-any-return]


def pack(process: Any, runs: int, axes: int, episodes: int) -> Packed:
    """The process as kernels see it; what an adversary has come to is copied, and `unpack` puts it back.

    Args:
        axes: 3 for rewards and 4 for costs.
        episodes: How many will be played.
    """
    from torchcmdp.kernels import processes as kernels

    keep = _to_keep(process, episodes)
    process = _recorded(process)
    adversary = type(process) is OGDAdversary
    noisy = type(process) is Bernoulli or getattr(process, "noise", None) is not None
    blocks, high = _table(process, axes)
    device = process.values.device
    values, played, kept = zeros(device, 1, 1, 1), zeros(device, 1, 1, 1), zeros(device, 0, 1, 1, 1)
    if adversary:
        own = process.values.expand(runs, *process.values.shape[-axes:]).reshape(runs, *blocks.shape[2:]).clone()
        values, played, kept = array(own), array(torch.zeros_like(own)), array(own.expand(keep, *own.shape).clone())
    return kernels.Process(
        kind=getattr(kernels, _KINDS[type(process)]),
        episode=int(getattr(process, "episode", 0)),
        noisy=int(noisy),
        low=float(getattr(process, "low", 0.0)),
        at=array(torch.tensor(getattr(process, "at", []), dtype=torch.int64, device=device)),
        length=int(getattr(process, "length", 1)),
        rate=float(process.sign * process.step) if adversary else 0.0,
        horizon=int(getattr(process, "horizon", None) or 0),
        blocks=blocks,
        high=high,
        values=values,
        played=played,
        kept=kept,
    )


def _to_keep(process: Any, episodes: int) -> int:
    """Of how many of so many episodes the values are kept."""
    return min(episodes, process.episodes - len(process._kept)) if type(process) is Recorder else 0


def unpack(process: Any, packed: Packed, episodes: int, axes: int) -> Tensor:
    """Move the process on by the episodes that were played with it packed; returns the values of the last of them."""
    if type(process) is Recorder:
        process._kept += _played(process.process, packed, _to_keep(process, episodes), axes)
        process.episode += episodes
        return unpack(process.process, packed, episodes, axes)
    if type(process) is OGDAdversary:
        shape = (len(packed.values), *process.values.shape[-axes:])
        process.episode += episodes
        process._values = tensor_of(packed.values).view(shape)
        return tensor_of(packed.played).view(shape)
    changing = not process.stationary
    if changing:
        process.episode += episodes - 1
    values: Tensor = process.values
    if changing:
        process.episode += 1
    return values


def _played(process: Any, packed: Packed, episodes: int, axes: int) -> list[Tensor]:
    """The values of so many episodes from where the process stood when it was packed, as each had them."""
    if process.stationary:
        return [process.values] * episodes
    if type(process) is OGDAdversary:
        first = process.values  # one for all runs before the first episode
        return [first, *tensor_of(packed.kept).view(-1, len(packed.values), *first.shape[-axes:])[1:]][:episodes]
    begun, values = process.episode, []
    for process.episode in range(begun, begun + episodes):
        values.append(process.values)
    process.episode = begun
    return values


def episodes_left(process: Any) -> float:
    """How many episodes the process has values for."""
    process = _recorded(process)
    return len(process._sequence) - process.episode if type(process) is Replay else float("inf")


def _table(process: Any, axes: int) -> tuple[Any, Any]:
    """The means that take turns `(blocks x (1 or runs) x m x L S A)` and an adversary's upper ends, one block of that shape."""
    if process not in _tables:
        if type(process) in (Switching, Cyclic):
            means = torch.stack(process._blocks)
        elif type(process) is Replay:
            means = process._sequence
        else:
            means = (process._base if type(process) is OGDAdversary else process._mean).unsqueeze(0)
        high = process._high if type(process) is OGDAdversary else means.new_zeros([1] * axes)
        _tables[process] = (_flat(means, axes, 1), _flat(high, axes, 0))
    return _tables[process]


def _flat(tensor: Tensor, axes: int, leading: int) -> Any:
    """An axis for runs and one for constraints where there is none, and the pairs on one axis."""
    if axes == 3:
        tensor = tensor.unsqueeze(-4)
    if tensor.dim() == leading + 4:
        tensor = tensor.unsqueeze(leading)
    return array(tensor.flatten(-3).contiguous())
