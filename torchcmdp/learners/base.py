"""What every learner is: a module with a policy and an update, its hyperparameters one value a run, its state in buffers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from torchcmdp.errors import InvalidInput, check_delta, whole_number
from torchcmdp.layout import Layout
from torchcmdp.trajectory import Trajectory


class Learner(nn.Module, ABC):
    """A batch of independent learners on CMDPs of one layout.

    A subclass sets `name`, registers its state as buffers and replaces them in `update` (never in place, so that autograd can go
    through several episodes), and implements `policy` and `update`.

    Attributes:
        name: What the learner is called in configurations and curves.
        layout: Layer widths and actions.
        constraints: m.
        horizon: T, the number of episodes the confidence terms are made for.
        delta: Failure probability.
        runs: How many independent learners there are.
        episode: Episodes seen, an int64 scalar tensor.
    """

    name: ClassVar[str]
    episode: Tensor
    _unit: Tensor

    def __init__(
        self,
        layout: Layout,
        constraints: int,
        horizon: int,
        delta: float = 0.01,
        runs: int = 1,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(layout, Layout):
            raise InvalidInput(f"layout is a {type(layout).__name__}; it must be a Layout, such as cmdp.layout.")
        self.layout = layout
        self.constraints = whole_number("constraints", constraints, least=0)
        self.horizon = whole_number("horizon", horizon, least=1)
        self.runs = whole_number("runs", runs, least=1)
        check_delta(delta)
        if not dtype.is_floating_point:
            raise InvalidInput(f"dtype is {dtype}; it must be a floating-point type.")
        self.delta = float(delta)
        self._hyperparameters: list[str] = []
        self.register_buffer("_unit", torch.ones((), dtype=dtype, device=device), persistent=False)
        self.register_buffer("episode", torch.zeros((), dtype=torch.int64, device=device))

    @property
    def dtype(self) -> torch.dtype:
        return self._unit.dtype

    @property
    def device(self) -> torch.device:
        return self._unit.device

    @property
    @abstractmethod
    def policy(self) -> Tensor:
        """What the learner plays in the next episode: `(runs x L x S x A)`, zero in the padding."""

    @abstractmethod
    def update(self, trajectory: Trajectory) -> None:
        """Learn from one episode of every run."""

    def diagnostics(self) -> dict[str, Tensor]:
        """Numbers about the last update by TensorBoard tag, `(runs,)` each; empty before the first."""
        return {}

    def config(self) -> dict[str, Any]:
        """Everything that the learner was made with, ready for JSON."""
        return {
            "name": self.name,
            "widths": list(self.layout.widths),
            "actions": self.layout.actions,
            "constraints": self.constraints,
            "runs": self.runs,
            "horizon": self.horizon,
            "delta": self.delta,
            "dtype": str(self.dtype).removeprefix("torch."),
            **{name: _plain(getattr(self, name)) for name in self._hyperparameters},
        }

    def extra_repr(self) -> str:
        """What `print(learner)` shows between the brackets."""
        shape = f"widths={self.layout.widths}, actions={self.layout.actions}, constraints={self.constraints}"
        return f"{shape}, horizon={self.horizon}, delta={self.delta:g}, runs={self.runs}"

    def add_hyperparameter(self, name: str, value: Tensor | float) -> None:
        """Register a non-negative hyperparameter: a float, or a tensor with one value a run.

        A parameter, or a tensor that carries a gradient or a tangent, is kept as it is, so that derivatives flow to it.
        """
        self._hyperparameters.append(name)
        value = per_run(name, value, self.runs, dtype=self.dtype, device=self.device)
        if isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
        else:
            self.register_buffer(name, value)

    def hyperparameter(self, name: str) -> Tensor:
        """The values of a hyperparameter in the learner's dtype: `(runs,)`."""
        value: Tensor = getattr(self, name)
        if value.dim() == 1 and value.dtype == self.dtype:  # all but a parameter that somebody else made
            return value
        return value.to(self.dtype).expand(self.runs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in `nn.Module`, which writes the hyperparameters too: refused where one carries a derivative, which would be lost."""
        for name in self._hyperparameters:
            value: Tensor = getattr(self, name)
            if not isinstance(value, nn.Parameter) and _connected(value):
                raise InvalidInput(
                    f"{name} carries a gradient or a tangent, and loading a state would overwrite it; make it an nn.Parameter, or "
                    "load into a learner made with its value alone."
                )
        return super().load_state_dict(*args, **kwargs)

    def check_trajectory(self, trajectory: Trajectory) -> None:
        """Refuse a trajectory of another layout, batch or number of constraints; its values are not looked at."""
        steps = (self.runs, self.layout.layers)
        wanted = {"states": steps, "actions": steps, "next_states": steps, "rewards": steps, "costs": (*steps, self.constraints)}
        for name, shape in wanted.items():
            found = tuple(getattr(trajectory, name).shape)
            if found != shape:
                axes = "runs x L x m" if name == "costs" else "runs x L"
                raise InvalidInput(f"trajectory.{name} has shape {found}; this learner expects ({axes}) = {shape}.")


def per_run(name: str, value: Tensor | float, runs: int, *, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """A finite, non-negative value for every run: `(runs,)`.

    Parameters are returned as they are, of shape () or (runs,); tensors that carry a gradient or a tangent stay connected to it.
    """
    if not isinstance(value, Tensor):
        value = torch.as_tensor(value, dtype=dtype, device=device)
    if value.shape not in ((), (runs,)):
        raise InvalidInput(
            f"{name} has shape {tuple(value.shape)}; it must be one number, or a tensor with one value for each of {runs} runs."
        )
    if value.device.type != "meta" and not ((value >= 0) & value.isfinite()).all():
        worst = next(v for v in value.detach().flatten().tolist() if not 0 <= v < math.inf)
        raise InvalidInput(f"{name} contains {worst}; it must be a finite number that is not negative.")
    if isinstance(value, nn.Parameter):
        return value
    connected = _connected(value)
    value = value.to(device=device, dtype=dtype).expand(runs)
    # a copy, since load_state_dict writes into buffers and the caller's tensor is not ours to write to
    return value if connected else value.detach().clone()


def _connected(value: Tensor) -> bool:
    """Whether a tensor carries a gradient or a tangent."""
    return value.requires_grad or forward_ad.unpack_dual(value).tangent is not None


def _plain(value: Tensor) -> float | list[float]:
    """A tensor as JSON: one float when all its values are equal."""
    if value.device.type == "meta":
        return []
    values = value.detach().flatten().tolist()
    return values[0] if all(v == values[0] for v in values) else values
