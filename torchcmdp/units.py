"""The user's units: rewards and costs of any range and a budget, as the normal form of a CMDP, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, brief, check_kind, check_shape, check_tensor, choice
from torchcmdp.identity import fingerprint

SENSES = ("<=", ">=")
SCALES = ("reward_scale", "cost_scale")
ROUNDING = 1e-12  # of what remains of a cost less its share of the budget, in units of the larger of them
Ends = tuple[float, float]
MakeUnits = Callable[[Tensor], "Units"]


@dataclass(frozen=True, eq=False)
class Units:
    """How the numbers of a CMDP in normal form are read in the units that they were given in.

    A reward of a step is shown as (reward - low) / (high - low). A budget is spread over the L steps of an episode: each step of a
    cost is shown as (cost - budget / L) / scale, whose sum is at most zero just when the costs sum to at most the budget. Of a
    utility, which must sum to at least its budget, the negative is shown.

    Attributes:
        reward_scale: What one unit of our reward is, `(...)`.
        reward_offset: What an episode earns whose rewards sum to zero here, `(...)`.
        cost_scale: What one unit of our cost is, `(... x m)`.
        budget: What a cost may sum to, or a utility must, `(... x m)`.
        sense: "<=" for a cost and ">=" for a utility, m of them.
        reward_high: The largest that the mean reward of each pair can be, in normal form, `(... x L x S x A)`.
        cost_low: The smallest that each mean cost can be, in normal form, `(... x m x L x S x A)`.
    """

    reward_scale: Tensor
    reward_offset: Tensor
    cost_scale: Tensor
    budget: Tensor
    sense: tuple[str, ...]
    reward_high: Tensor
    cost_low: Tensor

    def __post_init__(self) -> None:
        tables = {"reward_scale": 0, "reward_offset": 0, "cost_scale": 1, "budget": 1, "reward_high": 3, "cost_low": 4}
        for name, axes in tables.items():
            value, positive = getattr(self, name), name in SCALES
            check_tensor(name, value, axes)
            if value.device.type != "meta" and not (value.isfinite() & ((value > 0) | (not positive))).all():
                raise InvalidInput(f"{name} is {brief(value)}; all of it must be finite{', and above zero' if positive else ''}.")
        batch, m = tuple(self.reward_scale.shape), self.budget.shape[-1]
        for name, shape in (("reward_offset", batch), ("cost_scale", (*batch, m)), ("budget", (*batch, m))):
            check_shape(name, getattr(self, name), [shape], f"expected {shape}, as the other units have")
        check_kind("sense", self.sense, tuple, f"a tuple with '<=' or '>=' for each of {m} costs")
        senses_of(self.sense, m)

    @property
    def sign(self) -> Tensor:
        """One for a cost, minus one for a utility, `(m,)`."""
        return signs(self.sense, self.budget.device)

    def episode_return(self, value: Tensor | float) -> Tensor:
        """What an episode earns whose rewards sum to `value` here, `(...)`."""
        return value * self.reward_scale + self.reward_offset

    def episode_costs(self, sums: Tensor) -> Tensor:
        """What the costs and utilities of an episode sum to that sum to `sums` here, `(... x m)`."""
        return self.budget + self.sign * self.cost_scale * sums

    def violations(self, sums: Tensor) -> Tensor:
        """By how much costs that sum to `sums` here exceed their budgets, and utilities fall short of theirs, `(... x m)`."""
        return sums * self.cost_scale

    def mapped(self, change: Callable[[str, Tensor], Tensor]) -> Units:
        """The same with other tensors, as a function says of the name and the value of each."""
        changed: dict[str, Any] = {name: change(name, value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **changed)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Units:
        """The same elsewhere; the scales stay in float64, and the ends of ranges take the type of the CMDP."""
        return self.mapped(lambda name, value: value.to(device, dtype if name in ("reward_high", "cost_low") else None))

    def __getitem__(self, index: int) -> Units:
        """Those of one CMDP of a batch."""
        return self.mapped(lambda _, value: value[index])

    def config(self) -> dict[str, Any]:
        """What defines them, ready for JSON."""
        plain = {name: getattr(self, name).tolist() for name in ("budget", "reward_scale", "reward_offset", "cost_scale")}
        return {**plain, "sense": list(self.sense), "ends": [fingerprint(self.reward_high), fingerprint(self.cost_low)]}


def units_of(env: object) -> Units | None:
    """The units of an environment's CMDP, or its own where it has no CMDP to show; None where it has neither."""
    units: Units | None = getattr(getattr(env, "cmdp", env), "units", None)
    return units


def stack_units(units: Sequence[Units | None]) -> Units | None:
    """The units of CMDPs that are put side by side; all of them have some, or none."""
    found = [each for each in units if each is not None]
    if not found:
        return None
    if len(found) < len(units) or any(each.sense != found[0].sense for each in found):
        raise InvalidInput("some of these CMDPs have units and some have none, or others; a batch has the same kind for all.")
    return found[0].mapped(lambda name, _: torch.stack([getattr(each, name) for each in found]))


def normal_form(
    rewards: Tensor,
    costs: Tensor,
    layers: int,
    budget: object,
    sense: str | Sequence[str] = "<=",
    reward_range: Ends | None = None,
    cost_range: Ends | Sequence[Ends] | None = None,
) -> tuple[Tensor, Tensor, MakeUnits]:
    """Tables of any finite range as rewards in [0, 1] and costs in [-1, 1] with threshold zero, and what gives the units of them.

    Costs are divided by a number only where they leave [-1, 1] or fill less than half of it. The units are those of a CMDP
    whose pairs, by a mask `(L x S x A)`, may all earn and cost what any may.

    Args:
        rewards: Of any shape.
        costs: `(m x ...)`.
        layers: L, over which the budget is spread.
        budget, sense: One for all constraints, or one each.
        reward_range: The smallest and the largest mean reward of a step that there can be; by default those of the table.
        cost_range: The same for the costs, one for all or one each.
    """
    m = len(costs)
    budgets, senses = budgets_of(budget, m).to(costs.device), senses_of(sense, m)
    low, high = _range("reward", rewards, reward_range)
    high = high if high > low else low + 1.0
    ranges = [_range(f"cost {i}", costs[i], ends) for i, ends in enumerate(each_range(cost_range, m))]
    share, shape = budgets / layers, (m, *[1] * (costs.dim() - 1))
    sign = signs(senses, costs.device)
    ends = torch.tensor(ranges, dtype=torch.float64, device=costs.device).reshape(m, 2)
    shifted_ends = sign[:, None] * (ends - share[:, None])
    largest = shifted_ends.abs().amax(-1) if m else share
    size = torch.maximum(ends.abs().amax(-1), share.abs()) if m else share
    rounded = largest <= ROUNDING * size  # costs that are all the same, and the budget is what they sum to: nothing to stretch
    scales = torch.where(~rounded & ((largest > 1) | (largest < 0.5)), largest, torch.where(rounded, size.clamp_min(1), 1.0))
    shifted = (sign.view(shape) * (costs.double() - share.view(shape)) / scales.view(shape)).clamp(-1, 1)
    shown = ((rewards.double() - low) / (high - low)).clamp(0, 1)
    lowest = (shifted_ends.amin(-1) / scales).clamp(-1, 1) if m else share

    def units(pair_mask: Tensor) -> Units:
        real = pair_mask.to(rewards.dtype)
        scale, offset = (torch.tensor(value, dtype=torch.float64, device=real.device) for value in (high - low, low * layers))
        return Units(scale, offset, scales, budgets, senses, real, lowest.to(real)[:, None, None, None] * real)

    return shown.to(rewards.dtype), shifted.to(costs.dtype), units


def budgets_of(budget: object, constraints: int) -> Tensor:
    """One budget for every constraint, `(m,)`."""
    try:
        numbers: Any = budget if isinstance(budget, Tensor | np.ndarray) else np.asarray(budget, dtype=np.float64)
        budgets = torch.as_tensor(numbers).to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        budgets = torch.full((), torch.nan)
    if budgets.shape not in ((), (constraints,)) or not budgets.isfinite().all():
        raise InvalidInput(f"budget is {brief(budget)}; it must be a finite number, or one for each of {constraints} costs.")
    if not constraints and budgets.numel() and float(budgets):
        raise InvalidInput(f"budget is {brief(budget)}, and there are no costs that it could limit; pass them, or no budget.")
    return budgets.expand(constraints).clone()


def senses_of(sense: str | Sequence[str], constraints: int) -> tuple[str, ...]:
    """One sense for every constraint."""
    senses = [sense] * constraints if isinstance(sense, str) else sense
    if not isinstance(senses, Sequence) or len(senses) != constraints:
        raise InvalidInput(f"sense is {brief(sense)}; it must be '<=' or '>=', or one of them for each of {constraints} costs.")
    return tuple(choice("sense", each, SENSES) for each in senses)


def signs(senses: Sequence[str], device: torch.device) -> Tensor:
    """One for a cost, minus one for a utility, `(m,)`."""
    return torch.tensor([1.0 if sense == "<=" else -1.0 for sense in senses], dtype=torch.float64, device=device)


def each_range(ends: Ends | Sequence[Ends] | None, m: int) -> Sequence[Ends | None]:
    """One range for every constraint."""
    if ends is None:
        return [None] * m
    if isinstance(ends, np.ndarray) or (isinstance(ends, Tensor) and not ends.is_meta):  # type: ignore[unreachable]
        ends = ends.tolist()  # type: ignore[unreachable]
    several = isinstance(ends, Sequence) and bool(ends) and isinstance(ends[0], Sequence)
    return list(ends) if several and len(ends) == m else [ends] * m  # type: ignore[arg-type,list-item]


def ends_of(ends: Any) -> Ends:
    """A smallest and a largest number; NaN where there are no two numbers."""
    try:
        low, high = (float(end) for end in ends)
    except (TypeError, ValueError, RuntimeError):  # the last one of a tensor without values
        low = high = np.nan
    return low, high


def _range(name: str, table: Tensor, ends: Ends | None) -> Ends:
    """The smallest and the largest value, of the table or as given, which the table must keep to."""
    found = (float(table.min()), float(table.max())) if table.numel() else (0.0, 0.0)
    if ends is None:
        return found
    low, high = ends_of(ends)
    if not (low <= found[0] and found[1] <= high < torch.inf and low > -torch.inf):
        raise InvalidInput(
            f"the range of {name} is {brief(ends)}; expected two finite numbers with all values between them, which go from "
            f"{found[0]:g} to {found[1]:g}."
        )
    return low, high
