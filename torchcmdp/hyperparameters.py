"""Hyperparameters: one value a run, with whatever derivatives the caller's tensors carry."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from torchcmdp.errors import InvalidInput, brief, check_shape, check_tensor

PerRun = Tensor | float
"""A hyperparameter: a float, or a tensor with one value a run."""


def as_numbers(name: str, value: PerRun, *, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """The value as a tensor of real numbers, or one sentence."""
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(value, dtype=dtype, device=device)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise InvalidInput(f"{name} is {brief(value)}; it must be a number, or a tensor with one value a run.") from None
    check_tensor(name, value)
    return value


def per_run(name: str, value: PerRun, runs: int, *, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """A finite, non-negative value for every run: `(runs,)`.

    Parameters are returned as they are, of shape () or (runs,); tensors that carry a gradient or a tangent stay connected to it.
    """
    value = as_numbers(name, value, dtype=dtype, device=device)
    check_shape(name, value, [(), (runs,)], f"it must be one number, or a tensor with one value for each of {runs} runs")
    if value.device.type != "meta" and not ((value >= 0) & value.isfinite()).all():
        worst = next(v for v in value.detach().flatten().tolist() if not 0 <= v < math.inf)
        raise InvalidInput(f"{name} contains {worst}; it must be a finite number that is not negative.")
    if isinstance(value, nn.Parameter):
        return value
    live = connected(value)
    value = value.to(device=device, dtype=dtype).expand(runs)
    # a copy, since load_state_dict writes into buffers and the caller's tensor is not ours to write to
    return value if live else value.detach().clone()


def check_range(name: str, value: Tensor, low: float, high: float) -> None:
    """Refuse a tensor with values beyond these ends, or NaN; one without values may have any."""
    if value.device.type != "meta" and not ((value >= low) & (value <= high)).all():
        raise InvalidInput(
            f"{name} goes from {float(value.min()):g} to {float(value.max()):g}; it must lie in [{low:g}, {high:g}]."
        )


def expanded(name: str, value: Tensor, like: Tensor, whose: str) -> Tensor:
    """The tensor with the shape, the type and the place of another; `whose` says which that is."""
    try:
        return value.to(like).expand_as(like)
    except RuntimeError:  # also of one without values, which cannot go there
        raise InvalidInput(f"{name} has shape {tuple(value.shape)}; it must broadcast to {whose} {tuple(like.shape)}.") from None


def register(module: nn.Module, name: str, value: Tensor | None) -> None:
    """Keep a tensor in a module as what it is, a parameter or a buffer."""
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value)


def check_weights(name: str, values: Tensor | None) -> None:
    """Refuse weights above one, where there are any."""
    if values is not None and values.device.type != "meta" and not (values <= 1).all():
        raise InvalidInput(f"{name} contains {float(values.max()):g}; a weight must not exceed one.")


def connected(value: Tensor) -> bool:
    """Whether a tensor carries a gradient or a tangent."""
    return value.requires_grad or forward_ad.unpack_dual(value).tangent is not None


def plain(value: Tensor | None) -> float | list[float] | None:
    """A tensor as JSON: one float when all its values are equal."""
    if value is None:
        return None
    if value.device.type == "meta":
        return []
    values = value.detach().flatten().tolist()
    return values[0] if all(v == values[0] for v in values) else values
