"""The memory that kernels work in: tensors without their padding, and room that belongs to a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchcmdp.kernels.geometry import Geometry

# Kinds of room that a thread keeps; more than a run uses.
MOST_ROOMS = 8

_own = threading.local()


def array(tensor: Tensor) -> Any:
    """A tensor's memory as kernels take it, without a copy: numpy's on the CPU, and on a GPU the tensor itself."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def tensor_of(taken: Any) -> Tensor:
    """The tensor whose memory this is: the way back from `array`."""
    return torch.from_numpy(taken) if isinstance(taken, np.ndarray) else taken


def zeros(device: torch.device, *shape: int, dtype: Any = np.float64) -> Any:
    """An `array` of zeros."""
    found = np.zeros(shape, dtype)
    return found if device.type == "cpu" else torch.from_numpy(found).to(device)


def compact(geometry: Geometry, tensor: Tensor, axes: int) -> Any:
    """A padded tensor `([runs x] L x S x A [x K])` without its padding, as an `array` `((1 or runs) x P or E)`.

    Args:
        axes: 3 for pairs and 4 for transitions.
    """
    places = geometry.pair_at if axes == 3 else geometry.entry_at
    flat = tensor.detach().reshape(-1, tensor.shape[-axes:].numel())
    if flat.device.type == "cpu":
        return np.ascontiguousarray(flat.numpy()[:, places])
    return flat[:, torch.from_numpy(places).to(flat.device)].contiguous()


def room(key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` returned in this thread when it was first asked for this key: work space that nobody else uses."""
    rooms: dict[Hashable, Any] = _own.__dict__.setdefault("rooms", {})
    if key not in rooms:
        while len(rooms) >= MOST_ROOMS:
            del rooms[next(iter(rooms))]
        rooms[key] = make()
    return rooms[key]
