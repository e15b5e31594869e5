"""The instances that studies are made on: random CMDPs whose costs stay as they are, or change after a third of the horizon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.tuning import Study

KINDS = ("stochastic", "adversarial")
HELD_OUT = 1000  # the first seed of the instances that the study never sees
DRAWS = 1000  # of the costs after the change, until one policy is safe before and after it


@dataclass(frozen=True, eq=False)
class Instances:
    """CMDPs with Bernoulli feedback, and mean costs before and after a change.

    Attributes:
        cmdp: A batch of n, with the mean over the horizon for its costs.
        before, after: Mean costs, `(n x m x L x S x A)`; the same where costs are stochastic.
        kinds: "stochastic" or "adversarial", n of them.
        change: After how many episodes the costs change.
    """

    cmdp: tc.LayeredCMDP
    before: Tensor
    after: Tensor
    kinds: tuple[str, ...]
    change: int

    def environment(self, instances: Tensor, seed: int) -> tc.Simulator:
        """A fresh simulator in which every run plays its own instance."""
        P, r, g = (x[instances] for x in (self.cmdp.transitions, self.cmdp.rewards, self.cmdp.costs))
        cmdp = tc.LayeredCMDP(self.cmdp.layout, P, r, g)
        costs = tc.Switching([self.before[instances], self.after[instances]], [self.change], noise="bernoulli", low=-1)
        return tc.Simulator(cmdp, tc.Bernoulli(r), costs, runs=len(instances), seed=seed)

    def study(self, horizon: int, weight: float, delta: float) -> Study:
        """WC-OPS on all of these instances."""
        return Study(self.environment, len(self.kinds), horizon, weight, delta)


def make_instances(
    widths: Sequence[int], actions: int, constraints: int, seeds: Sequence[int], horizon: int, kinds: Sequence[str] = KINDS
) -> Instances:
    """One instance for every seed and kind.

    An adversarial instance has the costs of the stochastic one of its seed for a third of the horizon, and then others, drawn so
    that one policy is safe before and after.
    """
    change = max(1, horizon // 3)
    share = change / horizon
    cmdps, befores, afters, labels = [], [], [], []
    for seed in seeds:
        cmdp = tc.random_cmdp(widths, actions, constraints, seed)
        for kind in kinds:
            after = cmdp.costs if kind == "stochastic" else _other_costs(cmdp, seed)
            mean = share * cmdp.costs + (1 - share) * after if kind == "adversarial" else cmdp.costs
            cmdps.append(tc.LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards, mean))
            befores.append(cmdp.costs)
            afters.append(after)
            labels.append(kind)
    return Instances(tc.stack_cmdps(cmdps), torch.stack(befores), torch.stack(afters), tuple(labels), change)


def _other_costs(cmdp: tc.LayeredCMDP, seed: int) -> Tensor:
    """Costs drawn like those of a random CMDP, until one policy is safe for them and for the CMDP's own."""
    generator = torch.Generator().manual_seed(2**31 + seed)
    for _ in range(DRAWS):
        draw = torch.rand(cmdp.costs.shape, generator=generator, dtype=cmdp.dtype)
        costs = (2 * draw - 1) * cmdp.layout.pair_mask()
        both = tc.LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards, torch.cat([cmdp.costs, costs]))
        if float(tc.slater_gap(both)) >= 0:
            return costs
    raise tc.InvalidInput(f"None of {DRAWS} draws gives costs that one policy meets before and after the change; take other sizes.")
