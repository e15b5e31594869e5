"""The work space of a projection: one piece of memory for numbers and one for codes, kept by each thread.

Python hands over the two pieces, and the kernel makes the records of views by itself: taking sixty arrays from Python would take
longer than a small batch.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.conjugate import Iterates
from torchcmdp.kernels.cpu import compiled
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.linalg import System
from torchcmdp.kernels.pairs import Response
from torchcmdp.kernels.quadratic import Small


class Work(NamedTuple):
    """Work space of one instance: nothing in it survives from one call to the next.

    Attributes:
        costs: `(m x P)`, each constraint divided by its largest cost, `scale` `(m)`.
        scaled: `(E)`, target over temperature, weight and base as in `Problem`.
        v, trial_v, dv: `(n + 1)`; lam, trial_lam, dlam, used: `(m)`.
    """

    response: Response
    system: System
    small: Small
    costs: np.ndarray
    scale: np.ndarray
    scaled: np.ndarray
    weight: np.ndarray
    base: np.ndarray
    v: np.ndarray
    trial_v: np.ndarray
    dv: np.ndarray
    lam: np.ndarray
    trial_lam: np.ndarray
    dlam: np.ndarray
    used: np.ndarray


class Instance(NamedTuple):
    """Compact inputs and outputs of one instance, between the padded tensors and a kernel."""

    target: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    costs: np.ndarray
    occupancy: np.ndarray
    log_occupancy: np.ndarray
    potentials: np.ndarray
    multipliers: np.ndarray


def memory(geometry: Geometry, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and codes enough for `carve`."""
    entries, pairs, states = len(geometry.successor), len(geometry.pair_at), len(geometry.state_at) + 1
    blocks = 0 if geometry.iterative else int(geometry.diagonal[-1] + geometry.above[-1])
    reals = (
        9 * entries + (6 + 2 * m) * pairs + (12 + 2 * m) * states + (10 + 2 * m) * m + 2 * int(np.diff(geometry.first).max()) + 1
    )
    return np.zeros(reals + blocks), np.zeros(2 * entries + pairs + m, np.int8)


@compiled
def carve(geometry, m, reals, codes):
    """The records of one instance, as views into `memory`."""
    entries, pairs, states = geometry.successor.shape[0], geometry.pair_at.shape[0], geometry.state_at.shape[0] + 1
    at = 9 * entries
    by_entry = reals[:at].reshape((9, entries))
    by_pair = reals[at : at + (6 + 2 * m) * pairs].reshape((6 + 2 * m, pairs))
    at += (6 + 2 * m) * pairs
    by_state = reals[at : at + (12 + 2 * m) * states].reshape((12 + 2 * m, states))
    at += (12 + 2 * m) * states
    small = reals[at : at + (10 + 2 * m) * m].reshape((10 + 2 * m, m))
    rest = reals[at + (10 + 2 * m) * m :]
    widest = (rest.shape[0] - 1) // 2
    blocks = 0
    if not geometry.iterative:
        blocks = geometry.diagonal[-1] + geometry.above[-1]
        widest = (rest.shape[0] - 1 - blocks) // 2
    response = Response(
        by_entry[0], codes[:entries], codes[2 * entries : 2 * entries + pairs], by_pair[0], by_pair[1], by_pair[2], by_pair[3],
        by_pair[4], by_entry[1], codes[entries : 2 * entries], by_state[0], by_state[1], by_state[2],
    )  # fmt: skip
    system = System(
        rest[: geometry.diagonal[-1] if blocks else 0],
        rest[geometry.diagonal[-1] if blocks else 0 : blocks],
        by_state[12 : 12 + m],
        by_state[12 + m :],
        small[10 : 10 + m],
        rest[blocks : blocks + widest],
        rest[blocks + widest : blocks + 2 * widest],
        Iterates(by_state[3], by_state[4], by_state[5], by_state[6], by_state[7], rest[blocks + 2 * widest :]),
    )
    work = Work(
        response, system, Small(small[0], small[1], small[2], small[3], codes[2 * entries + pairs :], small[10 + m :]),
        by_pair[6 : 6 + m], small[4], by_entry[2], by_entry[3], by_pair[5], by_state[8], by_state[9], by_state[10], small[5],
        small[6], small[7], small[8],
    )  # fmt: skip
    instance = Instance(
        by_entry[4], by_entry[5], by_entry[6], by_pair[6 + m :], by_entry[7], by_entry[8], by_state[11, : states - 1], small[9]
    )
    return work, instance


def workspace(geometry: Geometry, m: int) -> Work:
    """Room to project instances of this geometry with m constraints, one after the other."""
    work: Work = carve.py_func(geometry, m, *memory(geometry, m))[0]
    return work


_kept = threading.local()


def room(geometry: Geometry, m: int) -> tuple[np.ndarray, np.ndarray]:
    """`memory`, kept by each thread for the next call with the same geometry."""
    if getattr(_kept, "key", None) is None or _kept.key[0] is not geometry or _kept.key[1] != m:
        _kept.pieces, _kept.key = memory(geometry, m), (geometry, m)
    pieces: tuple[np.ndarray, np.ndarray] = _kept.pieces
    return pieces
