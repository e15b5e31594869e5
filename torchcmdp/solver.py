"""What every solver is: its settings, a method that solves a batch of instances, and how a name stands for one."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, brief, choice
from torchcmdp.safe_set import SafeSet

Answer = TypeVar("Answer")
Family = TypeVar("Family", bound="Solver[Any]")

MOST, MOST_FLOAT = 2**62, sys.float_info.max  # what an int64 and a float64 hold
BACKENDS = ("auto", "compiled", "torch")


class Solver(ABC, Generic[Answer]):
    """Solves a batch of instances; its settings are the fields of a frozen dataclass. Subclass one of its two families."""

    @abstractmethod
    def solve(self, objective: Tensor, safe_set: SafeSet) -> Answer:
        """The answers, with a status and a certificate an instance; batch shapes broadcast."""

    def config(self) -> dict[str, Any]:
        """The solver's name and settings, ready for JSON."""
        return {"name": type(self).__name__, **(asdict(self) if is_dataclass(self) else {})}

    def _positive(self, name: str, kind: type[int] | type[float] = float) -> None:
        """Hold a setting to a positive, finite number."""
        value = getattr(self, name)
        largest = MOST if kind is int else math.inf
        if not isinstance(value, int | float) or not 0 < value < largest or value > MOST_FLOAT or kind(value) != value:
            raise InvalidInput(f"{name} is {brief(value)}; it must be a positive {'whole ' if kind is int else ''}number.")
        object.__setattr__(self, name, kind(value))


@dataclass(frozen=True, kw_only=True)
class IterativeSolver(Solver[Answer]):
    """A solver of ours, compiled for CPU tensors and in torch for all others.

    Attributes:
        max_iterations: Iterations after which an instance is given up.
        backend: "compiled" (CPU), "torch" (any device), or "auto".
        fixed_iterations: Run the torch solver for just this many iterations, with no read of a tensor's value on the host.
    """

    backends: ClassVar[tuple[str, ...]] = BACKENDS
    max_iterations: int
    backend: str = "auto"
    fixed_iterations: int | None = None

    def __post_init__(self) -> None:
        self._positive("max_iterations", int)
        choice("backend", self.backend, self.backends)
        if self.fixed_iterations is not None:
            self._positive("fixed_iterations", int)
            if self.backend == "compiled":
                raise InvalidInput(
                    'backend is "compiled", which iterates until it is done; fixed_iterations needs "torch" or "auto".'
                )

    def compiled(self, device: torch.device) -> bool:
        """Whether tensors on `device` go to the compiled kernel."""
        if self.backend == "compiled" and device.type != "cpu":
            raise InvalidInput(f'backend is "compiled", which needs CPU tensors, but the input is on {device}.')
        return self.backend in ("auto", "compiled") and self.fixed_iterations is None and device.type == "cpu"


@lru_cache(maxsize=16)
def _with_defaults(kind: type[Family]) -> Family:
    solver: Family = kind()
    return solver


def resolve(solver: str | Family, family: type[Family], known: Mapping[str, type[Family]]) -> Family:
    """The solver that is meant: one of the family itself, or the one of that name with its default settings."""
    if isinstance(solver, str):
        found: Family = _with_defaults(known[choice("solver", solver, tuple(known))])
        return found
    if not isinstance(solver, family):
        names = ", ".join(map(repr, known))
        raise InvalidInput(f"solver is {brief(solver)}; it must be {names} or an instance of {family.__name__}.")
    return solver
