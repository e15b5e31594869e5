"""The design of the study, declared before it was run: instances, settings, learners, what is searched, and what is asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.learners.practical import practical_costs

WIDTHS, ACTIONS, CONSTRAINTS = (1, 4, 4, 4, 1), 3, 2
# Seeds of the instances: 16 to choose constants on, four in each setting, and 32 to judge on, all of them in every setting.
TRAINING, HELD_OUT = range(70_000, 70_016), range(71_000, 71_032)
# Slater gaps, of even and of odd seeds; where costs change, of one policy for all of their values at once.
TIGHT, SLACK = 0.03, 0.3
SETTINGS = ("stochastic", "adversarial rewards", "switching costs", "cyclic costs")
CHANGING = SETTINGS[2:]
SWITCHES = 2  # of "switching costs", at equal distances: each block has costs of its own
CYCLE_CHANGES = 18  # of "cyclic costs", between two vectors of costs
REWARD_CHANGES = 9  # of "adversarial rewards", between two vectors of rewards, whatever is played
WEIGHT = 3.0  # of the positive violation in the objective that constants are chosen by
SEARCH_SEED, PLAY_SEED = 5, 17
# Who is played over the longest horizon, declared before anybody was: the practical learners as they are shipped, and the two
# published rivals with the least objective on the training instances. Their seeds are played one after the other, PLAY_SEED first.
FINAL_RIVALS = 2

# The goals, for practical WC-OPS as it is shipped.
LEAST_UNDOMINATED, LEAST_LOWER_END, MOST_VIOLATION = 0.8, 0.7, 0.6

Values = Mapping[str, Tensor]
Size = tuple[tc.Layout, int, int, float, int]


@dataclass(frozen=True)
class Entry:
    """A learner of the study, made of (layout, m, T, delta, runs), the CMDP of each run, and a value a run of what is in `box`."""

    make: Callable[[Size, tc.LayeredCMDP, Values], tc.Learner]
    box: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # what is searched, log-uniformly between two ends
    start: Mapping[str, float] = field(default_factory=dict)  # the first configuration of the search: the learner's own constants
    published: bool = False  # a rival as published, with scales of its constants searched

    def configurations(self, count: int) -> list[dict[str, float]]:
        """The first is `start`, the others are drawn; a learner without constants has one."""
        generator = torch.Generator().manual_seed(SEARCH_SEED)
        found = [dict(self.start)]
        for _ in range(count - 1 if self.box else 0):
            draws = torch.rand(len(self.box), generator=generator, dtype=torch.float64).tolist()
            ends = self.box.items()
            found.append({name: low * (high / low) ** u for (name, (low, high)), u in zip(ends, draws, strict=True)})
        return found


def _practical(kind: Any, size: Size, cmdp: tc.LayeredCMDP, values: Values) -> tc.Learner:
    rest = dict(values)
    made: tc.Learner = kind.practical(*size, costs=tc.PriorCosts(margin=rest.pop("margin"), drift=tc.Drift()), **rest)
    return made


def _primal_dual(size: Size, cmdp: tc.LayeredCMDP, values: Values) -> tc.Learner:
    # its bonus sums the radii of all successors over all layers; divided by their number it is of the size of the others'
    radius = values["radius_scale"] / (cmdp.layout.layers * cmdp.layout.width)
    own = {**_multiples(values), "radius_scale": radius, "slater_gap": tc.slater_gap(cmdp)}
    return tc.OptPrimalDual.scaled(*size, radii="matched", **own)


def _multiples(values: Values) -> dict[str, Tensor]:
    """By the names of `Learner.scaled`: what is no scale already is a multiple of a step."""
    return {name if name.endswith("_scale") else f"{name}_scale": value for name, value in values.items()}


SCALES, STEPS = (1e-3, 1.0), (1.0, 100.0)
ENTRIES = {
    "practical WC-OPS": Entry(
        partial(_practical, tc.WCOPS),
        {"eta_scale": STEPS, "gamma_scale": STEPS, "radius_scale": SCALES, "margin": (0.3, 3.0)},
        {"eta_scale": 20.0, "gamma_scale": 20.0, "radius_scale": 0.01, "margin": 1.0},
    ),
    "practical OptCMDP": Entry(
        partial(_practical, tc.OptCMDP),
        {"radius_scale": SCALES, "margin": (0.3, 3.0)}, {"radius_scale": 0.01, "margin": 1.0},
    ),
    "WC-OPS": Entry(
        lambda size, cmdp, values: tc.WCOPS.scaled(*size, **values),
        {"eta_scale": STEPS, "gamma_scale": STEPS, "bonus_scale": SCALES, "radius_scale": SCALES, "threshold_scale": (1e-5, 1e-1)},
        dict.fromkeys(("eta_scale", "gamma_scale", "bonus_scale", "radius_scale", "threshold_scale"), 1.0),
    ),
    "OptCMDP": Entry(
        lambda size, cmdp, values: tc.OptCMDP(*size, radii="matched", **values),
        {"bonus_scale": SCALES, "radius_scale": SCALES}, {"bonus_scale": 1.0, "radius_scale": 1.0}, True,
    ),
    "OptPrimalDual": Entry(
        _primal_dual,
        {"bonus_scale": SCALES, "radius_scale": SCALES, "primal_step": STEPS, "dual_step": STEPS},
        dict.fromkeys(("bonus_scale", "radius_scale", "primal_step", "dual_step"), 1.0), True,
    ),
    "PDB-PS": Entry(
        lambda size, cmdp, values: tc.PDBPS.scaled(*size, confidence="entrywise", **_multiples(values)),
        {"radius_scale": SCALES, "eta": STEPS, "dual_step": STEPS},
        dict.fromkeys(("radius_scale", "eta", "dual_step"), 1.0), True,
    ),
    "Greedy": Entry(lambda size, cmdp, values: tc.Greedy(*size), published=True),
}  # fmt: skip
# What the changes of practical WC-OPS are worth: the shipped one without each of them.
ABLATIONS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "without the prior (bonus at a hundredth)": lambda: {"costs": tc.PaperCosts(margin=1.0, drift=tc.Drift()), "bonus_scale": 0.01},
    "without the margin": lambda: {"costs": tc.PriorCosts(drift=tc.Drift())},
    "without the drift test": lambda: {"costs": tc.PriorCosts(margin=1.0)},
    "without doubly robust losses and share": lambda: {"costs": practical_costs(), "loss": "paper", "share": None},
}


@dataclass(frozen=True, eq=False)
class Instances:
    """CMDPs of one setting, n of them, with the mean costs and rewards of their blocks."""

    cmdp: tc.LayeredCMDP  # with the means over the blocks for its rewards and costs
    rewards: list[Tensor]  # of each block, (n x L x S x A)
    costs: list[Tensor]  # of each block, (n x m x L x S x A)
    setting: str

    def environment(self, which: Tensor, horizon: int, distinct: int, seed: int = PLAY_SEED) -> tc.Simulator:
        """A fresh simulator in which run j plays instance `which[j]`, with random numbers of its own for `distinct` runs."""
        cmdp = tc.LayeredCMDP(self.cmdp.layout, *(x[which] for x in (self.cmdp.transitions, self.cmdp.rewards, self.cmdp.costs)))
        rewards, costs = [x[which] for x in self.rewards], [x[which] for x in self.costs]
        reward_length, cost_length = (max(1, math.ceil(horizon / (n + 1))) for n in (REWARD_CHANGES, CYCLE_CHANGES))
        bernoulli: dict[str, Any] = {"noise": "bernoulli", "low": -1}
        made: tc.Process
        if self.setting == "switching costs":
            at = [horizon * (j + 1) // (SWITCHES + 1) for j in range(SWITCHES)]
            made = tc.Switching(costs, at, **bernoulli)
        elif self.setting == "cyclic costs":
            made = tc.Cyclic(costs[:2], cost_length, **bernoulli)
        else:
            made = tc.Bernoulli(costs[0], low=-1)
        changing = self.setting == "adversarial rewards"
        own = tc.Cyclic(rewards, reward_length, noise="bernoulli") if changing else tc.Bernoulli(rewards[0])
        return tc.Simulator(cmdp, own, made, runs=len(which), seed=seed, distinct_runs=distinct)


@lru_cache(maxsize=16)
def make_instances(seeds: range, setting: str) -> Instances:
    """The instances of these seeds: the same transitions and rewards in all settings, half of them tight."""
    blocks = SWITCHES + 1 if setting in CHANGING else 1
    cmdps, rewards, costs = [], [], []
    for seed in seeds:
        gap = TIGHT if seed % 2 == 0 else SLACK
        cmdp = tc.random_cmdp(WIDTHS, ACTIONS, CONSTRAINTS * blocks, seed, feasibility="binding", margin=gap)
        other = tc.random_cmdp(WIDTHS, ACTIONS, 0, seed + 10_000_000).rewards
        own = cmdp.costs.unflatten(0, (blocks, CONSTRAINTS))
        mean = own[:2].mean(0) if setting == "cyclic costs" else own.mean(0)
        both = [cmdp.rewards, other] if setting == "adversarial rewards" else [cmdp.rewards]
        cmdps.append(tc.LayeredCMDP(cmdp.layout, cmdp.transitions, torch.stack(both).mean(0), mean))
        rewards.append(both)
        costs.append(own)
    turned = [torch.stack(x) for x in zip(*rewards, strict=True)]
    return Instances(tc.stack_cmdps(cmdps), turned, list(torch.stack(costs).unbind(1)), setting)
