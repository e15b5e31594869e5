"""Problems of one state, the paper's families, and those that come from Gymnasium."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import require
from torchcmdp.instances import random_cmdp, single_state_cmdp
from torchcmdp.problems.gymnasium import broke_a_rule, fell_in_a_hole, fell_off_the_cliff, from_gymnasium
from torchcmdp.problems.problem import entry
from torchcmdp.processes import Cyclic, Switching

PAPER = "Stradi, Chiefari, Castiglioni, Marchesi, Gatti, arXiv 2509.20114; drawn as `python -m train paper` draws them"
ONE_STATE = "one state and many arms, as in the simplex experiments of arXiv 2509.20114; rewards and costs are ours"
GYMNASIUM = "Gymnasium's toy text environments; horizon and budget are ours"
WAYS = {"": "", "-switching": ", which are mirrored after a third of the episodes", "-cyclic": ", mirrored every 50 episodes"}


def arms(count: int) -> LayeredCMDP:
    """Arms that pay evenly from 0.1 to 0.9 and cost evenly from -0.3 to 0.7: who pays more costs more."""
    steps = [a / (count - 1) for a in range(count)]
    return single_state_cmdp([0.1 + 0.8 * step for step in steps], [[-0.3 + step for step in steps]])


def _mirrored(cmdp: LayeredCMDP) -> list[torch.Tensor]:
    """The costs, and those that are safe by as much where the others are not, lowered so that the first arm stays safe."""
    return [cmdp.costs, (cmdp.costs.flip(-1) - 0.75).clamp_min(-1)]


def _switching(cmdp: LayeredCMDP, episodes: int) -> Switching:
    return Switching(_mirrored(cmdp), at=[max(1, episodes // 3)], noise="bernoulli", low=-1)


def _cyclic(cmdp: LayeredCMDP, episodes: int) -> Cyclic:
    return Cyclic(_mirrored(cmdp), length=50, noise="bernoulli", low=-1)


for _count in (4, 8, 16):
    for _way, _words in WAYS.items():
        _costs: Any = {"": None, "-switching": _switching, "-cyclic": _cyclic}[_way]
        entry(f"arms/{_count}{_way}", f"{ONE_STATE}{_words}", costs=_costs)(partial(arms, _count))


def _drawn(constraints: int, margin: float, seed: int) -> LayeredCMDP:
    return random_cmdp((1, 4, 4, 4, 1), 3, constraints, seed, feasibility="binding", margin=margin)


entry("paper/one-constraint", f"{PAPER}: stochastic-1", seed=1)(partial(_drawn, 1, 0.5))
entry("paper/two-constraints", f"{PAPER}: stochastic-2", seed=2)(partial(_drawn, 2, 0.5))
entry("paper/no-slater", f"{PAPER}: stochastic-3, no policy is strictly safe", seed=3)(partial(_drawn, 1, 0.0))


def _lake(size: str, horizon: int, budget: Any) -> LayeredCMDP:
    env = require("gymnasium", "gym").make("FrozenLake-v1", map_name=size)
    return from_gymnasium(env, horizon, fell_in_a_hole, budget).cmdp


entry("gym/frozenlake-4x4", f"{GYMNASIUM}; falling in a hole costs 1", horizon=20, budget=0.05)(partial(_lake, "4x4"))
entry("gym/frozenlake-8x8", f"{GYMNASIUM}; falling in a hole costs 1", horizon=30, budget=0.1)(partial(_lake, "8x8"))


@entry("gym/cliffwalking", f"{GYMNASIUM}; falling off the cliff costs 1", horizon=14, budget=0.1)
def cliff_walking(horizon: int, budget: Any) -> LayeredCMDP:
    """The walk along the edge of 4 x 12 squares."""
    return from_gymnasium("CliffWalking-v1", horizon, fell_off_the_cliff, budget).cmdp


@entry("gym/taxi", f"{GYMNASIUM}; from state 1 alone; an unlawful pick-up or drop-off costs 1", horizon=15, budget=0.5)
def taxi(horizon: int, budget: Any) -> LayeredCMDP:
    """One passenger on 5 x 5 squares."""
    import gymnasium

    name = max(known for known in gymnasium.registry if known.startswith("Taxi-v"))
    return from_gymnasium(name, horizon, broke_a_rule, budget, start=1).cmdp
