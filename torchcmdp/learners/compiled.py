"""Learners as kernels see them: their settings, their hyperparameters, and their buffers in flat memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.confidence import CONFIDENCE_KINDS, transition_log_term
from torchcmdp.estimation import violation_threshold
from torchcmdp.kernels import wcops
from torchcmdp.kernels.projection import Limits


def wcops_settings(learner: Any) -> wcops.Settings:
    layout, m, horizon, delta = learner.layout, max(learner.constraints, 1), learner.horizon, learner.delta
    unknown = sum(width > 1 for width in layout.widths[1:])
    options = {"cap": 200.0, "tolerance": 1e-11, "max_iterations": 500, **learner.projection_options}
    return wcops.Settings(
        kind=CONFIDENCE_KINDS.index(learner.confidence),
        empirical=int(learner.violation_threshold == "empirical"),
        iota=transition_log_term(layout, horizon, delta),
        bonus_logarithm=math.log(2 * m * layout.total_states * layout.actions * horizon / delta),
        threshold_constant=float(violation_threshold(1, layout, learner.constraints, horizon=horizon, delta=delta)),
        luck_factor=float(4 * layout.layers + 6 * layout.layers * unknown),
        luck_logarithm=math.log(3 * m * horizon / delta),
        log_floor=math.log(1e-14),
        target_floor=-700.0,
        limits=Limits(float(options["cap"]), float(options["tolerance"]), int(options["max_iterations"])),
    )


def hyperparameters(learner: Any, kind: Any) -> Any:
    """The hyperparameters by name, `(runs,)` each, as the kernels' record of them."""
    return kind(*(learner.hyperparameter(name).detach().contiguous().numpy() for name in kind._fields))


def copies(learner: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Fresh copies of a learner's buffers, for kernels to write into."""
    return {name: getattr(learner, name).detach().clone(memory_format=torch.contiguous_format) for name in names if hasattr(learner, name)}


def flat(tensors: dict[str, Tensor], kind: Any, runs: int, **axes: int) -> Any:
    """The tensors as a kernels' record of them"""
    arrays = []
    for name in kind._fields:
        tensor = tensors.get(name)
        if tensor is None:
            arrays.append(np.zeros(runs))
        elif name in ("cost_estimate", "cost_sum"):
            arrays.append(tensor.flatten(2).numpy())
        else:
            arrays.append((tensor.flatten(1) if tensor.dim() > 1 else tensor).numpy())
    return kind(*arrays)
