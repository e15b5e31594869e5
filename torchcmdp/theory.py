"""The theorems' bounds as curves. Their constants are large: read them as orders of magnitude.

Each is of the shape of `t`, episodes; `constraints` is m, `horizon` T and `delta` the failure probability of the learner, in (0,
1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchcmdp.errors import check_delta, whole_number
from torchcmdp.layout import Layout


def regret_bound(layout: Layout, horizon: int, delta: float, t: Tensor | float | None = None) -> Tensor:
    """14 L |X|^2 sqrt(2 t |A| ln(T |X|^2 |A| / delta)), which bounds the regret and the alpha-regret at t = T, the default.

    The theorem speaks of t = T alone; at other t this is its curve with the step size of horizon T.
    """
    _check(horizon, delta)
    size = layout.total_states
    log = math.log(horizon * size**2 * layout.actions / delta)
    return 14 * layout.layers * size**2 * _root(layout, log, horizon if t is None else t)


def violation_bound(layout: Layout, constraints: int, horizon: int, delta: float, t: Tensor | float) -> Tensor:
    """61 L |X| sqrt(2 t |A| ln(2 m T^2 |X| |A| / delta)), which bounds V_t for every t; zero without constraints."""
    return _safety_bound(61, 2, layout, constraints, horizon, delta, t)


def positive_violation_bound(layout: Layout, constraints: int, horizon: int, delta: float, t: Tensor | float) -> Tensor:
    """18 L |X| sqrt(2 t |A| ln(2 m T |X| |A| / delta)), which bounds the positive violation; otherwise as `violation_bound`."""
    return _safety_bound(18, 1, layout, constraints, horizon, delta, t)


def trivial_bound(layout: Layout, t: Tensor | float) -> Tensor:
    """L t, which no regret and no violation can exceed."""
    return layout.layers * _as_tensor(t)


def _safety_bound(
    factor: int, power: int, layout: Layout, constraints: int, horizon: int, delta: float, t: Tensor | float
) -> Tensor:
    """factor L |X| sqrt(2 t |A| ln(2 m T^power |X| |A| / delta))."""
    _check(horizon, delta)
    if constraints == 0:
        return torch.zeros_like(_as_tensor(t))
    log = math.log(2 * constraints * float(horizon) ** power * layout.total_states * layout.actions / delta)
    return factor * layout.layers * layout.total_states * _root(layout, log, t)


def _root(layout: Layout, log: float, t: Tensor | float) -> Tensor:
    return (2 * layout.actions * log * _as_tensor(t)).sqrt()


def _as_tensor(t: Tensor | float) -> Tensor:
    tensor = torch.as_tensor(t)
    return tensor if tensor.is_floating_point() and isinstance(t, Tensor) else tensor.to(torch.float64)


def _check(horizon: int, delta: float) -> None:
    whole_number("horizon", horizon, least=1)
    check_delta(delta)
