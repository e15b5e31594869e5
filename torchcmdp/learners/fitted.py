"""Constants that follow the problem: a log-linear map from what is known before a run to the scales of practical WC-OPS."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput
from torchcmdp.layout import Layout

# What `python -m train tune fit` has written, and the horizons that it was judged at; docs/results/tuners.md has the tables.
FILE = Path(__file__).with_suffix(".json")
JUDGED = (30, 1000)

# What is known before a run, each as a logarithm: the order of the columns.
FEATURES = ("layers", "states", "actions", "constraints", "successors", "episodes", "failure", "range")


def features(layout: Layout, constraints: int, horizon: int, delta: float, cost_low: float = -1.0) -> Tensor:
    """The logarithms of L, |X|, |A|, m (at least 1), K, T, ln(1 / delta) and the width of the costs' range, `(8,)`."""
    sizes = (layout.layers, layout.total_states, layout.actions, max(constraints, 1), layout.slots, horizon)
    return torch.tensor([*sizes, math.log(1 / delta), 1 - cost_low], dtype=torch.float64).log()


@dataclass(frozen=True, eq=False)
class Follow:
    """ln scale = offset + slopes (feature - centre) / spread, kept within `reach` of where it began.

    Attributes:
        names: Of the scales, P of them.
        start: What is left at zero offsets and slopes, `(P,)` logarithms.
        centre, spread: Of the features where it was trained, `(F,)` each; a spread of zero for one that did not vary.
        offset: `(P,)`.
        slopes: `(P x F)`.
        reach: The largest that a scale moves from `start`, in logarithms.
    """

    names: tuple[str, ...]
    start: Tensor
    centre: Tensor
    spread: Tensor
    offset: Tensor
    slopes: Tensor
    reach: float

    @classmethod
    def at(cls, start: Mapping[str, float], seen: Tensor, reach: float) -> Self:
        """The map that gives `start` everywhere, to be trained on features `(cells x F)`."""
        logs = torch.tensor(list(start.values()), dtype=torch.float64).log()
        slopes = torch.zeros(len(logs), seen.shape[-1], dtype=torch.float64)
        return cls(tuple(start), logs, seen.mean(0), seen.std(0), torch.zeros_like(logs), slopes, reach)

    def __call__(self, seen: Tensor) -> Tensor:
        """Logarithms of the scales, `(... x P)`, of features `(... x F)`; differentiable in `offset` and `slopes`."""
        away = torch.where(self.spread > 0, (seen - self.centre) / self.spread.clamp_min(1e-9), 0.0)
        return self.start + (self.offset + away @ self.slopes.T).clamp(-self.reach, self.reach)

    def scales(self, seen: Tensor) -> dict[str, float]:
        """By name the scales for features `(F,)`."""
        return dict(zip(self.names, self(seen).exp().tolist(), strict=True))

    def plain(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        numbers = {name: getattr(self, name).tolist() for name in ("start", "centre", "spread", "offset", "slopes")}
        return {"features": list(FEATURES), "names": list(self.names), **numbers, "reach": self.reach}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Self:
        """The map that `plain` told of."""
        if found.get("features") != list(FEATURES):
            raise InvalidInput(f"features is {found.get('features')}; this version knows {', '.join(FEATURES)}, in this order.")
        keys = ("start", "centre", "spread", "offset", "slopes")
        numbers = {name: torch.tensor(found[name], dtype=torch.float64) for name in keys}
        return cls(names=tuple(found["names"]), reach=float(found["reach"]), **numbers)

    def save(self, path: Path) -> None:
        """Write it, a few kilobytes."""
        path.write_text(json.dumps(self.plain(), indent=1) + "\n")


def fitted_scales(
    layout: Layout, constraints: int, horizon: int, delta: float = 0.01, *rest: Any, cost_low: Any = None, **others: Any
) -> dict[str, float]:
    """By name the scales for a learner that is made with these arguments; the others do not matter."""
    if not JUDGED[0] <= horizon <= JUDGED[1]:
        low, high = JUDGED
        raise InvalidInput(
            f'horizon is {horizon} with scales="fitted", which were judged from {low} to {high:,} episodes; leave scales out.'
        )
    lowest = -1.0 if cost_low is None else float(torch.as_tensor(cost_low).min())
    return Follow.of(json.loads(FILE.read_text())).scales(features(layout, constraints, horizon, delta, lowest))
