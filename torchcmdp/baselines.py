"""A baseline: a policy known to be safe with room to spare, how often to play it, and the mixtures that come of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, brief, check_kind, check_shape, check_tensor
from torchcmdp.hyperparameters import PerRun, as_numbers
from torchcmdp.layout import Layout
from torchcmdp.occupancy import checked_policy, pair_occupancy_of, policy_of, shaped_policy
from torchcmdp.planning import evaluate, safe_optimum, slater_gap


@dataclass(frozen=True, eq=False)
class Baseline:
    """A Markov policy and what it costs at most, such as the careful rule that somebody runs today.

    Attributes:
        policy: pi0, `(L x S x A)` for all runs or `(runs x L x S x A)`; an array will do.
        cost_bounds: beta_i < 0 with <g_i, q^{pi0}> <= beta_i for the mean costs g_i: `(m,)` or `(runs x m)`.
    """

    policy: Tensor
    cost_bounds: Tensor

    def __post_init__(self) -> None:
        check_kind("policy", self.policy, Tensor | np.ndarray, "a tensor or an array of probabilities (L x S x A)")
        if not isinstance(self.cost_bounds, Tensor):
            try:
                object.__setattr__(self, "cost_bounds", torch.as_tensor(self.cost_bounds, dtype=torch.float64))
            except (TypeError, ValueError, RuntimeError, OverflowError):
                raise InvalidInput(f"cost_bounds is {brief(self.cost_bounds)}; it must be a tensor (m,) or (runs x m).") from None
        check_tensor("cost_bounds", self.cost_bounds, axes=1)
        if self.cost_bounds.device.type != "meta" and not ((self.cost_bounds < 0) & self.cost_bounds.isfinite()).all():
            worst = next(v for v in self.cost_bounds.flatten().tolist() if not -torch.inf < v < 0)
            raise InvalidInput(
                f"cost_bounds contains {worst:g}; a baseline must be safe with room to spare, each of its costs below zero."
            )

    @property
    def margin(self) -> Tensor:
        """d = min_i -beta_i, `(...)`; +inf without constraints."""
        return margin_of(self.cost_bounds)

    def for_runs(self, runs: int, layout: Layout, constraints: int, **like: Any) -> tuple[Tensor, Tensor]:
        """The policy and the bounds of every run, `(runs x L x S x A)` and `(runs x m)`, or one sentence on what does not fit."""
        shape, bounds = (runs, constraints), self.cost_bounds
        check_shape("baseline.cost_bounds", bounds, [shape, shape[1:]], f"expected (m,) = {shape[1:]} or {shape}")
        if bounds.device.type != "meta" and not (bounds >= -layout.layers).all():
            raise InvalidInput(
                f"baseline.cost_bounds contains {float(bounds.min()):g}; {layout.layers} steps cannot cost less than "
                f"-{layout.layers}."
            )
        try:
            shaped_policy(self.policy, layout, runs)
            policy = checked_policy(self.policy, layout, runs)
        except InvalidInput as error:
            raise InvalidInput(f"baseline.{error}") from None
        if "meta" in (policy.device.type, bounds.device.type) and torch.device(like["device"]).type != "meta":
            raise InvalidInput(f"baseline is without values, on the meta device; the learner is on {like['device']}.")
        own = policy.detach().to(**like).expand(runs, *layout.pair_shape).contiguous()
        return own, bounds.detach().to(**like).expand(shape).contiguous()


@dataclass(frozen=True, eq=False)
class Mixture:
    """Policies of which one is drawn before an episode and played to its end: what a promise about expectations is about.

    Attributes:
        weights: The probability of each, `(runs x C)`.
        policies: `(runs x C x L x S x A)`.
    """

    weights: Tensor
    policies: Tensor

    def occupancy(self, transitions: Tensor, layout: Layout) -> Tensor:
        """The state-action occupancy, exactly: the weighted sum of those of the policies, `(runs x L x S x A)`.

        The transitions are `(L x S x A x K)` or `(runs x L x S x A x K)`.
        """
        single = transitions.unsqueeze(1) if transitions.dim() == 5 else transitions
        return (self.weights[:, :, None, None, None] * pair_occupancy_of(self.policies, single, layout)).sum(1)


def margin_of(cost_bounds: Tensor) -> Tensor:
    """min_i -beta_i of bounds `(... x m)`: `(...)`; +inf without constraints."""
    if not cost_bounds.shape[-1]:
        return cost_bounds.new_full(cost_bounds.shape[:-1], torch.inf)
    return -cost_bounds.amax(-1)


def baseline_weight(worst: Tensor, cost_bounds: Tensor) -> Tensor:
    """lambda, the least probability of the baseline with which lambda beta_i + (1 - lambda) w_i <= 0 for every i: `(...)`.

    max_i w_i / (w_i - beta_i) over the i with w_i > 0, and zero where there is none; w_i is the most that the other policy may
    cost, and beta_i < 0 bounds the baseline's, `(... x m)`.
    """
    if not worst.shape[-1]:
        return worst.new_zeros(worst.shape[:-1])
    harm = worst.clamp_min(0)
    return (harm / (harm - cost_bounds)).amax(-1)


def baseline(cmdp: LayeredCMDP, margin: PerRun | None = None) -> Baseline:
    """The most rewarding policy that is safe by a margin, and what it costs exactly: a baseline for experiments.

    Args:
        cmdp: One CMDP, or a batch of one a run; it must be known, as in an experiment.
        margin: How far below zero every expected cost of an episode stays, a number or one for each CMDP of the batch; half of the
            Slater gap by default.
    """
    gap = slater_gap(cmdp)
    if cmdp.device.type != "meta" and not (gap > 0).all():
        raise InvalidInput(
            f"no policy is safe with room to spare: the Slater gap is {float(gap.min()):g}, and a baseline needs one above zero."
        )
    free = torch.where(gap.isinf(), torch.zeros_like(gap), gap)  # without constraints there is nothing to keep
    wanted = free / 2 if margin is None else as_numbers("margin", margin, dtype=cmdp.dtype, device=cmdp.device)
    batch = tuple(cmdp.batch_shape)
    check_shape("margin", wanted, [(), batch], f"expected one number, or one a CMDP, {batch}")
    wanted = wanted.to(gap).expand(cmdp.batch_shape)
    wrong = ~((wanted > 0) & (wanted <= gap) | gap.isinf())
    if cmdp.device.type != "meta" and wrong.any():
        asked, most = (float(each[wrong][0]) for each in (wanted, gap))
        raise InvalidInput(f"margin is {asked:g}; it must be above zero and at most the Slater gap, {most:g}.")
    # an occupancy has mass one in every layer: so much on each cost is all of it on their sum
    raised = cmdp.costs + (wanted / cmdp.layout.layers)[..., None, None, None, None]
    policy = policy_of(safe_optimum(cmdp, costs=raised * cmdp.layout.pair_mask(cmdp.device)).occupancy, cmdp.layout)
    return Baseline(policy, evaluate(policy, cmdp).violations if cmdp.device.type != "meta" else cmdp.costs.sum((-1, -2, -3)))
