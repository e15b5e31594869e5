"""The optimistic linear programs of a batch, over threads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchcmdp.kernels.confidence import ENTRYWISE, KernelSet, kernel_set, line_up
from torchcmdp.kernels.geometry import Geometry
from torchcmdp.kernels.memory import room
from torchcmdp.kernels.options import exact_entry
from torchcmdp.kernels.padding import LOAD, STORE, move, move_each
from torchcmdp.kernels.program import Work, is_sound, mix_entries, optimise_one, workspace
from torchcmdp.kernels.threads import over_batch
from torchcmdp.status import INVALID


class Instance(NamedTuple):
    """Compact inputs and outputs of one instance, between the padded tensors and `optimise_one`."""

    rewards: np.ndarray
    kernels: KernelSet
    costs: np.ndarray
    occupancy: np.ndarray


@exact_entry
def optimise_range(
    start, stop, geometry, rewards, lower, upper, costs, max_iterations, work, instance,
    occupancy, multipliers, value, excess, residual, status, iterations,
):  # fmt: skip
    """Solve instances start..stop-1 of a batch of flattened padded tensors, filling in the outputs."""
    entry_at, pair_at, kernels = geometry.entry_at, geometry.pair_at, instance.kernels
    for b in range(start, stop):
        move(entry_at, lower, b, kernels.lower, LOAD)
        move(entry_at, upper, b, kernels.upper, LOAD)
        move(pair_at, rewards, b, instance.rewards, LOAD)
        move_each(pair_at, costs, b, instance.costs, LOAD)
        sound = True
        for p in range(pair_at.shape[0]):
            line_up(geometry, p, kernels)
            sound = sound and is_sound(geometry, p, instance.rewards, kernels.lower, kernels.upper, instance.costs)
        status[b] = INVALID
        if sound:
            status[b], iterations[b], value[b], excess[b], residual[b] = optimise_one(
                geometry, instance.rewards, kernels, instance.costs, max_iterations, work, multipliers[b]
            )
            mix_entries(geometry, work, instance.occupancy)
            move(entry_at, occupancy, b, instance.occupancy, STORE)


class Batch(NamedTuple):
    """The outputs of `optimise_batch`, over flattened padded tensors, in the order of `OptimisticOptimum`."""

    value: np.ndarray
    occupancy: np.ndarray
    multipliers: np.ndarray
    excess: np.ndarray
    status: np.ndarray
    residual: np.ndarray
    iterations: np.ndarray


def optimise_batch(
    geometry: Geometry, rewards: np.ndarray, lower: np.ndarray, upper: np.ndarray, costs: np.ndarray, max_iterations: int
) -> Batch:
    """Solve the programs of a batch of flattened padded tensors, over threads."""
    batch, m = costs.shape[:2]
    value, excess, residual = (np.zeros(batch) for _ in range(3))
    occupancy, multipliers = np.zeros(lower.shape), np.zeros((batch, m))
    status, iterations = np.zeros(batch, np.int8), np.zeros(batch, np.int64)
    entries, pairs = len(geometry.successor), len(geometry.pair_at)

    def make() -> tuple[Work, Instance, Geometry]:
        instance = Instance(np.zeros(pairs), kernel_set(ENTRYWISE, geometry), np.zeros((m, pairs)), np.zeros(entries))
        # with the geometry, so that its identity stays its own for as long as it is a key
        return workspace(geometry, m), instance, geometry

    def piece(start: int, stop: int) -> None:
        work, instance, _ = room((id(geometry), "program", m), make)
        optimise_range(
            start, stop, geometry, rewards, lower, upper, costs, max_iterations, work, instance,
            occupancy, multipliers, value, excess, residual, status, iterations,
        )  # fmt: skip

    over_batch(piece, batch, entries)
    return Batch(value, occupancy, multipliers, excess, status, residual, iterations)
