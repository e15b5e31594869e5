"""The instances that studies are made on: random CMDPs that bind, with costs that stay, or change after a third of the horizon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.tuning import Study

from ..program import Count, Positive

KINDS = ("stochastic", "adversarial")
HELD_OUT = 1000  # the first seed of the instances that the study never sees
DRAWS = 1000  # of an instance, or of its costs after the change, until it is as asked
GAP = 0.2  # Slater gap that costs are shifted to
# What the price of safety may be: the largest multiplier of the best safe policy. Below, an instance has nothing to teach about
# safety; above, no reasonable weight of the violation keeps a study from breaking the constraints.
MULTIPLIERS = (0.5, 2.0)
STRIDE = 10_000  # between the seeds of two draws of an instance, so that no two instances share any
# All of this, for the settings of whatever is kept: results on other instances are other results.
RULES = {"rules": {"held_out": HELD_OUT, "gap": GAP, "multipliers": MULTIPLIERS, "stride": STRIDE, "draws": DRAWS}}


@dataclass
class InstanceOptions:
    """What the programs of this package have in common: their instances, and how they are judged."""

    widths: tuple[int, ...] = (1, 3, 3, 1)  # States in each layer.
    actions: Count = 3  # Actions in each state.
    constraints: Count = 2  # Safety constraints.
    delta: float = 0.01  # Failure probability of the confidence sets.
    weight: Positive = 3.0  # Of the positive violation in the objective; above every multiplier of the instances.
    instances: Count = 4  # Seeds of the instances, each with stochastic and with changing costs.
    seed: int = 0  # Of the first instance and of all random numbers.
    logdir: str = "runs"  # Folder of all experiments.

    def settings(self, *without: str) -> dict[str, Any]:
        """What results depend on, but for some: not where they are written."""
        return {name: value for name, value in vars(self).items() if name not in ("name", "logdir", "quick", "fresh", *without)}

    def training(self, horizon: int) -> Instances:
        """The instances of the first seeds."""
        return self.drawn(range(self.seed, self.seed + self.instances), horizon)

    def drawn(self, seeds: Sequence[int], horizon: int) -> Instances:
        """The instances of these seeds."""
        return make_instances(self.widths, self.actions, self.constraints, seeds, horizon)


@dataclass(frozen=True, eq=False)
class Instances:
    """CMDPs with Bernoulli feedback, n of them, and mean costs `(n x m x L x S x A)` before and after a change."""

    cmdp: tc.LayeredCMDP  # with the mean over the horizon for its costs
    before: Tensor
    after: Tensor  # the same where costs are stochastic
    kinds: tuple[str, ...]  # "stochastic" or "adversarial"
    change: int  # after how many episodes the costs change
    low: float = -1.0  # the lower of the two values that a cost takes; the other is 1

    def check_weight(self, weight: float) -> None:
        """Refuse a weight of the violation with which it pays to break a constraint: it must exceed every multiplier."""
        largest = float(multipliers(self.cmdp).max())
        if weight <= largest:
            reason = (
                f"it must be greater than {largest:.3g}, the largest multiplier of the instances, or breaking a constraint pays"
            )
            raise tc.InvalidInput(f"--weight is {weight:g}; {reason}.")

    def environment(self, instances: Tensor, seed: int, distinct_runs: int | None = None) -> tc.Simulator:
        """A fresh simulator in which every run plays its own instance; blocks of `distinct_runs` share their random numbers."""
        P, r, g = (x[instances] for x in (self.cmdp.transitions, self.cmdp.rewards, self.cmdp.costs))
        cmdp = tc.LayeredCMDP(self.cmdp.layout, P, r, g)
        costs = tc.Switching([self.before[instances], self.after[instances]], [self.change], noise="bernoulli", low=self.low)
        return tc.Simulator(cmdp, tc.Bernoulli(r), costs, runs=len(instances), seed=seed, distinct_runs=distinct_runs)

    def tamer(self, factor: float) -> Instances:
        """The same with all costs times a factor up to one: costs then have a narrower range, and the multipliers are larger."""
        cmdp = tc.LayeredCMDP(self.cmdp.layout, self.cmdp.transitions, self.cmdp.rewards, factor * self.cmdp.costs)
        return replace(self, cmdp=cmdp, before=factor * self.before, after=factor * self.after, low=factor * self.low)

    def study(self, horizon: int, weight: float, delta: float) -> Study:
        """WC-OPS on all of these instances."""
        return Study(self.environment, len(self.kinds), horizon, weight, delta)


def multipliers(cmdp: tc.LayeredCMDP) -> Tensor:
    """What a unit of cost more would be worth to the best safe policy of every CMDP, in the dearest constraint, `(...)`."""
    safe_set = tc.SafeSet(cmdp.layout, cmdp.transitions, cmdp.transitions, cmdp.costs)
    return tc.optimistic_optimum(cmdp.rewards, safe_set).multipliers.amax(-1)


def make_instances(
    widths: Sequence[int], actions: int, constraints: int, seeds: Sequence[int], horizon: int, kinds: Sequence[str] = KINDS
) -> Instances:
    """One instance for every seed and kind, all with multipliers within `MULTIPLIERS`.

    An adversarial instance has the costs of the stochastic one of its seed for a third of the horizon, and then others, drawn so
    that one policy is safe before and after.
    """
    change = max(1, horizon // 3)
    share, cmdps, costs = change / horizon, [], []
    for seed in seeds:
        cmdp = _binding((widths, actions, constraints), seed)
        for kind in kinds:
            after = cmdp.costs if kind == "stochastic" else _other_costs(cmdp, seed)
            mean = share * cmdp.costs + (1 - share) * after if kind == "adversarial" else cmdp.costs
            cmdps.append(tc.LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards, mean))
            costs.append((cmdp.costs, after))
    before, after = map(torch.stack, zip(*costs, strict=True))
    return Instances(tc.stack_cmdps(cmdps), before, after, tuple(kinds) * len(seeds), change)


def _binding(size: tuple[Sequence[int], int, int], seed: int) -> tc.LayeredCMDP:
    """The first of the draws of a seed in which safety has a price."""
    for j in range(DRAWS):
        cmdp = tc.random_cmdp(*size, seed + j * STRIDE, feasibility="binding", margin=GAP)
        if _priced(cmdp):
            return cmdp
    raise tc.InvalidInput(f"None of {DRAWS} draws has a multiplier between {MULTIPLIERS[0]:g} and {MULTIPLIERS[1]:g}; {_OTHER}.")


def _other_costs(cmdp: tc.LayeredCMDP, seed: int) -> Tensor:
    """Costs drawn like those of a random CMDP, until one policy is safe for them and for the CMDP's own, and safety has a price."""
    generator = torch.Generator().manual_seed(2**31 + seed)
    for _ in range(DRAWS):
        draw = torch.rand(cmdp.costs.shape, generator=generator, dtype=cmdp.dtype)
        costs = (2 * draw - 1) * cmdp.layout.pair_mask()
        both = tc.LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards, torch.cat([cmdp.costs, costs]))
        mean = tc.LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards, (cmdp.costs + 2 * costs) / 3)
        if float(tc.slater_gap(both)) >= 0 and _priced(mean):
            return costs
    raise tc.InvalidInput(f"None of {DRAWS} draws gives costs that one policy meets before and after the change; {_OTHER}.")


_OTHER = "take other --widths, --actions or --constraints"


def _priced(cmdp: tc.LayeredCMDP) -> bool:
    return MULTIPLIERS[0] <= float(multipliers(cmdp)) <= MULTIPLIERS[1]
