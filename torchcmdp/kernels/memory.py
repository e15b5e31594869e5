"""The memory that kernels work in: tensors without their padding, and room that belongs to a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from torchcmdp.kernels.geometry import Geometry

# Kinds of room that a thread keeps; more than a run uses.
MOST_ROOMS = 8

_own = threading.local()


def compact(geometry: Geometry, tensor: Tensor, axes: int) -> np.ndarray:
    """A padded tensor `([runs x] L x S x A [x K])` without its padding, `((1 or runs) x P or E)`.

    Args:
        axes: 3 for pairs and 4 for transitions.
    """
    places = geometry.pair_at if axes == 3 else geometry.entry_at
    flat = tensor.detach().reshape(-1, tensor.shape[-axes:].numel()).numpy()
    return np.ascontiguousarray(flat[:, places])


def room(key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` returned in this thread when it was first asked for this key: work space that nobody else uses."""
    rooms: dict[Hashable, Any] = _own.__dict__.setdefault("rooms", {})
    if key not in rooms:
        while len(rooms) >= MOST_ROOMS:
            del rooms[next(iter(rooms))]
        rooms[key] = make()
    return rooms[key]
