"""The paper's adversary: online gradient descent against the policy that was played."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, check_kind, check_tensor, choice, not_negative, number, whole_number
from torchcmdp.hyperparameters import check_range, expanded
from torchcmdp.layout import Layout
from torchcmdp.planning import safest_policy
from torchcmdp.processes.base import Process, check_keys, check_mean

SCHEDULES = ("sqrt_t", "sqrt_T")


class OGDAdversary(Process):
    """Values that follow the policy: v_{t+1} = clip(v_t + sign * eta_t * pi_t * base, low, high), with v_1 = min(base, high).

    The paper's text, taken literally, raises the rewards of what the learner plays (sign +1); an adversary lowers them (sign -1).
    For costs it raises the positive ones and lowers the negative ones (sign +1). Either way every value moves in one direction
    and stays at the end of its range once there. The feedback of a pair is its value, without noise. Every run has its own
    sequence, since every run has its own policies.

    Attributes:
        episode: How many episodes have been played.

    Args:
        base: The fixed vector, `([runs x] L x S x A)` for rewards and `([runs x] m x L x S x A)` for costs, zero in the padding.
            Values begin there, or at `high` where it is larger; the steps follow the base itself.
        sign: -1 to lower what is played in proportion to its base, +1 to raise it.
        step: c in eta_t = c / sqrt(t) or c / sqrt(T), after episode t of T.
        schedule: "sqrt_t" or "sqrt_T", which of the two.
        horizon: T, for "sqrt_T".
        low: The smallest value: 0 for rewards; a negative one, such as -1, says that these are costs.
        high: The largest value; a tensor that broadcasts to the base, such as that of `safe_caps`, for each pair its own.
    """

    _settings = ("sign", "step", "schedule", "horizon", "low", "_high", "_base")

    def __init__(
        self,
        base: Tensor,
        *,
        sign: int,
        step: float,
        schedule: str = "sqrt_t",
        horizon: int | None = None,
        low: float = 0.0,
        high: Tensor | float = 1.0,
    ) -> None:
        _check_arguments(sign, step, schedule, horizon, low)
        base = check_mean(type(self).__name__, base, low)
        self.sign, self.step, self.schedule, self.horizon, self.low = int(sign), float(step), schedule, horizon, float(low)
        self._axes = 4 if low < 0 else 3
        if base.dim() not in (self._axes, self._axes + 1):
            shape = "([runs x] m x L x S x A) for costs, as low is negative" if low < 0 else "([runs x] L x S x A) for rewards"
            raise InvalidInput(f"The base of OGDAdversary has shape {tuple(base.shape)}; expected {shape}.")
        self._high, self._base = _caps(high, base, self.low), base
        self._values = torch.minimum(base, self._high)
        self.episode = 0

    @property
    @override
    def values(self) -> Tensor:
        return self._values

    @override
    def advance(self, policy: Tensor) -> None:
        self.episode += 1
        rate = self.sign * self.step / (self.episode if self.horizon is None else self.horizon) ** 0.5
        played = policy.to(self._base.dtype)
        moved = self._values + rate * (played.unsqueeze(-4) if self._axes == 4 else played) * self._base
        self._values = torch.minimum(moved.clamp_min(self.low), self._high)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"episode": self.episode, "values": self._values}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(self, state, "episode", "values")
        values = state["values"]
        if values.shape[-self._axes :] != self._base.shape[-self._axes :]:
            raise InvalidInput(
                f"The state of OGDAdversary has values of shape {tuple(values.shape)}, but its base has {tuple(self._base.shape)}."
            )
        self.episode, self._values = int(state["episode"]), values.to(self._base)


def safe_caps(cmdp: LayeredCMDP, rho0: float) -> Tensor:
    """Upper ends for an adversary's costs under which one policy stays safe by `rho0` in every pair, so that rho >= rho0.

    That policy is the deterministic one that is safest for the CMDP's own costs (`safest_policy`): it minimises the largest cost
    that it may meet, and so the largest cut that the caps make. All pairs that it may visit are capped at -rho0, which is in [-1,
    0], in every constraint, the others at 1: `(... x m x L x S x A)`, zero in the padding.
    """
    check_kind("cmdp", cmdp, LayeredCMDP, "a LayeredCMDP")
    rho0 = number("rho0", rho0, "a number in [0, 1], since costs lie in [-1, 1]", lambda found: 0 <= found <= 1)
    visited = _reachable(safest_policy(cmdp) > 0, cmdp.transitions > 0, cmdp.layout)
    free = cmdp.layout.pair_mask(cmdp.device).to(cmdp.dtype)
    caps = torch.where(visited, free.new_full((), -rho0), free)
    return caps.unsqueeze(-4).expand_as(cmdp.costs).clone()


def _reachable(taken: Tensor, possible: Tensor, layout: Layout) -> Tensor:
    """Which pairs can be visited, `(... x L x S x A)` bool, by actions `taken` and successors `possible`."""
    pairs = [taken[..., 0, :, :]]
    for k in range(1, taken.shape[-3]):
        entered = layout.arrivals((pairs[-1].unsqueeze(-1) & possible[..., k - 1, :, :, :]).to(torch.int64), k - 1) > 0
        pairs.append(entered.unsqueeze(-1) & taken[..., k, :, :])
    return torch.stack(pairs, dim=-3)


def _check_arguments(sign: int, step: float, schedule: str, horizon: int | None, low: float) -> None:
    number("sign", sign, "-1, against the policy that is played, or +1, along with it", lambda found: found in (-1, 1))
    not_negative("step", step)
    choice("schedule", schedule, SCHEDULES)
    if horizon is not None:
        whole_number("horizon", horizon, least=1)
    if (schedule == "sqrt_T") != (horizon is not None):
        raise InvalidInput(
            f"horizon is {horizon} with schedule {schedule!r}; 'sqrt_T' needs a horizon of at least one episode, 'sqrt_t' none."
        )
    number("low", low, "a number in [-1, 1), 0 for rewards and -1 for costs", lambda found: -1 <= found < 1)


def _caps(high: Tensor | float, base: Tensor, low: float) -> Tensor:
    """The upper ends of the values' ranges, of the base's shape."""
    high = high if isinstance(high, Tensor) else torch.tensor(number("high", high), dtype=base.dtype)
    check_tensor("high", high)
    high = high.to(base) if high.device.type != "meta" else torch.ones_like(high, dtype=base.dtype, device=base.device)
    check_range("high", high, low, 1)
    return expanded("high", high, base, "the base's")
