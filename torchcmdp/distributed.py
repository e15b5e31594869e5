"""A batch of runs divided over the processes that torchrun started: who plays which runs, and how their numbers come together."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchcmdp.errors import InvalidInput, TorchCMDPError, whole_number
from torchcmdp.protocols import Axes, first_axes

T = TypeVar("T")


class LostProcess(TorchCMDPError, RuntimeError):
    """Another process of the same job has died or cannot be reached."""


def under_torchrun() -> bool:
    """Whether torchrun started this process, or somebody has connected it to others."""
    return dist.is_available() and (dist.is_initialized() or dist.is_torchelastic_launched())


def process_rank() -> int:
    """Which of torchrun's processes this is; 0 without torchrun."""
    return int(os.environ.get("RANK", 0)) if under_torchrun() else 0


def local_device(name: str) -> str:
    """The device of that name; under torchrun "cuda" is a different one for each process of a machine."""
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if name == "cuda" and under_torchrun() else name


class Crew:
    """The processes that share a batch, each with consecutive runs of its own; or this one `alone`, whoever else there is.

    Attributes:
        rank, size: Which process this is, of how many.
        runs: Of all processes.
        first_run, own_runs: Which of them this one plays.
    """

    def __init__(self, runs: int, *, alone: bool = False) -> None:
        self.rank, self.size = (0, 1) if alone or not under_torchrun() else _connect()
        self.runs = whole_number("runs", runs, least=1)
        if self.runs < self.size:
            raise InvalidInput(f"{runs} runs cannot be divided over {self.size} processes; each needs at least one.")
        few, more = divmod(self.runs, self.size)
        self._counts = [few + (rank < more) for rank in range(self.size)]
        self.own_runs, self.first_run = self._counts[self.rank], sum(self._counts[: self.rank])

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes the files."""
        return self.rank == 0

    def stack(self, values: Tensor) -> Tensor:
        """The rows of all processes in the order of the runs, in every process: `(own_runs x n)` to `(runs x n)`."""
        if self.size == 1:
            return values
        padded = values.new_zeros(max(self._counts), *values.shape[1:])
        padded[: self.own_runs] = values
        found = [torch.empty_like(padded) for _ in self._counts]
        with self._connection():
            dist.all_gather(found, padded)
        return torch.cat([rows[:count] for rows, count in zip(found, self._counts, strict=True)])

    def tell(self, value: T) -> list[T]:
        """The values of all processes, in every process."""
        found: list[Any] = [value] * self.size
        if self.size > 1:
            with self._connection():
                dist.all_gather_object(found, on_host(value))
        return found

    def collect(self, value: T) -> list[T] | None:
        """The values of all processes in process 0, None elsewhere."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.leads else None
        with self._connection():
            dist.gather_object(on_host(value), found, dst=0)
        return found

    def deal(self, work: Callable[[], Sequence[T]]) -> T:
        """Let process 0 alone work out one value for each process; what it raises is raised in all of them."""
        if self.size == 1:
            return work()[0]
        parcels: list[tuple[Any, TorchCMDPError | None]] | None = None
        if self.leads:
            try:
                parcels = [(value, None) for value in work()]
            except TorchCMDPError as error:
                parcels = [(None, error)] * self.size
        received: list[Any] = [None]
        with self._connection():
            dist.scatter_object_list(received, parcels, src=0)
        value, failure = received[0]
        if failure is not None:
            raise failure
        return value  # type: ignore[no-any-return]

    def divide(self, state: Mapping[str, Any], axes: Axes) -> list[Any]:
        """The state of all runs as those of each process's runs."""
        if self.size == 1:
            return [state]
        return [_part(state, axes, sum(self._counts[:rank]), count) for rank, count in enumerate(self._counts)]

    @contextmanager
    def _connection(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what every backend makes of a peer that is gone
            raise LostProcess(
                f"process {self.rank} of {self.size} has lost touch with the others, one of which has probably died; the same "
                "command continues from the last checkpoint."
            ) from error


def on_host(value: Any) -> Any:
    """The value with its tensors on the CPU: what another process can receive."""
    if isinstance(value, Tensor):
        return value.cpu()
    return {key: on_host(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value


def _connect() -> tuple[int, int]:
    """Join torchrun's processes, unless that has happened; returns this one's rank and their number."""
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(dist.destroy_process_group)
    return dist.get_rank(), dist.get_world_size()


def run_axes(part: object, state: Mapping[str, Any]) -> Axes:
    """Where the runs are in each entry of the state of a learner, an environment or a tracker: as its `state_axes` says."""
    if not hasattr(part, "state_axes"):
        return first_axes(state)
    axes: Axes = part.state_axes()
    if set(axes) != set(state):
        raise InvalidInput(f"state_axes of {type(part).__name__} has {sorted(axes)}; its state has {sorted(state)}.")
    return axes


def join(parts: Sequence[Any], axes: Any) -> Any:
    """The states of the processes' runs, in order, as the state of all runs; what has no axis of runs is that of the first."""
    if len(parts) == 1 or axes is None:
        return parts[0]
    if isinstance(axes, Mapping):
        return {key: join([part[key] for part in parts], axes.get(key)) for key in parts[0]}
    return torch.cat(list(parts), axes)


def _part(state: Any, axes: Any, start: int, count: int) -> Any:
    if isinstance(axes, Mapping):
        return {key: _part(value, axes.get(key), start, count) for key, value in state.items()}
    return state if axes is None else state.narrow(axes, start, count).clone()
