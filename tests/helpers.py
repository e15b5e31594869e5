"""Learners that move, what they play in, and how: one `simulator` and one `play` for all tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.layout import Layout
from torchcmdp.trajectory import Trajectory

LAYOUT = Layout((1, 2, 3, 1), 2)
HORIZON = 100
SMALL: dict[str, Any] = {"eta": 0.4, "gamma": 0.1, "bonus_scale": 0.05, "radius_scale": 0.1}
# Gamma reacts within a few episodes, and safe sets run empty
ADAPTIVE = {"eta": 0.4, "gamma": 0.1, "bonus_scale": 0.02, "radius_scale": 0.05, "threshold_scale": 0.0002}
# of the command line: a learner alone in a tiny CMDP
SMALL_JOB = ["--learner", "wc-ops", "--widths", "1", "2", "1", "--actions", "2", "--constraints", "1"]


def interrupted(make: Callable[..., Any], call: int) -> Callable[..., Any]:
    """The function, which somebody interrupts when it is called for the so-manieth time."""
    calls = itertools.count(1)

    def made(*args: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return make(*args)

    return made


def lenient(learner: tc.Learner) -> tc.Baseline:
    """The uniform policy, said to be as safe as can be, so that a learner soon plays policies of its own; in general a lie."""
    like: dict[str, Any] = {"dtype": learner.dtype, "device": learner.device}
    bounds = torch.full((learner.constraints,), -float(learner.layout.layers), **like)
    return tc.Baseline(tc.uniform_policy(learner.layout, **like), bounds)


def matching_game(mask: object = ((1, 1, 0), (1, 1, 1), (1, 1, 1))) -> LayeredCMDP:
    """Four steps from the first of three states to one drawn at random: the action of the state's number pays 1, and costs 2 in the
    first. The uniform policy earns 4/3 of the 4 that there are, or 5/3 where the first state lacks the last action."""
    P, pay = np.full((3, 3, 3), 1 / 3), np.eye(3)
    cost = np.zeros((3, 3))
    cost[0, 0] = 2.0
    return tc.problems.from_arrays(P, pay, cost, horizon=4, budget=8.0, mask=mask)


# what a learner cannot be made without
NEEDED: dict[str, dict[str, Any]] = {key: {"baseline": lenient} for key in ("s-ops", "ma-ops", "dope")}
# settings with which a dozen episodes move every part of a learner
SETTINGS: dict[str, dict[str, Any]] = {
    "wc-ops": {"threshold_scale": 0.0002, **SMALL},
    "uob-reps": SMALL,
    "opt-cmdp": {"bonus_scale": 0.05, "radius_scale": 0.1},
    "greedy": {},
    "opt-primal-dual": {"bonus_scale": 0.001, "radius_scale": 0.001, "primal_step": 0.3, "dual_step": 0.2},
    "pdb-ps": {"eta": 0.5, "gamma": 0.1, "share": 0.02, "dual_step": 0.2, "radius_scale": 0.1},
    "s-ops": {**SMALL, **NEEDED["s-ops"]},
    "ma-ops": {**SMALL, "bonus_scale": 0.01, "radius_scale": 0.01, **NEEDED["ma-ops"]},
    "dope": {"bonus_scale": 0.001, "radius_scale": 0.0001, **NEEDED["dope"]},
}
# solvers read their convergence on the host unless they are told how long to work; more iterations take the same path
ON_META: dict[str, dict[str, Any]] = {
    "wc-ops": {"solver": tc.Newton(backend="torch", fixed_iterations=1)},
    "uob-reps": {"solver": tc.Newton(backend="torch", fixed_iterations=1)},
    "opt-cmdp": {"solver": tc.ColumnGeneration(backend="torch", fixed_iterations=1)},
    "greedy": {"solver": tc.ColumnGeneration(backend="torch", fixed_iterations=1)},
    "s-ops": {"solver": tc.Newton(backend="torch", fixed_iterations=1)},
    "ma-ops": {
        "solver": tc.Newton(backend="torch", fixed_iterations=1),
        "margin_solver": tc.ColumnGeneration(backend="torch", fixed_iterations=1),
    },
    "dope": {"solver": tc.ColumnGeneration(backend="torch", fixed_iterations=1)},
}


def simulator(cmdp: LayeredCMDP, runs: int = 1, seed: int = 0, first_run: int = 0) -> tc.Simulator:
    rewards, costs = tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1)
    return tc.Simulator(cmdp, rewards, costs, runs=runs, seed=seed, first_run=first_run)


def play(learner: tc.Learner, env: Any, episodes: int) -> list[Trajectory]:
    """Let the learner play and learn, and return what it saw."""
    seen = []
    for _ in range(episodes):
        seen.append(env.rollout(learner.policy))
        learner.update(seen[-1])
    return seen


class World:
    """CMDPs with random transitions and coin-flip feedback, one a run, where run j's draws depend on (seed, j) alone."""

    def __init__(self, layout: Layout, constraints: int, seed: int, runs: list[int], low: float = -0.6, high: float = 0.9) -> None:
        self.layout, self.m = layout, constraints
        self.rngs = [np.random.default_rng([seed, j]) for j in runs]
        n, A = layout.widths, layout.actions
        self.P = [[rng.dirichlet(np.ones(n[k + 1]), (n[k], A)) for k in range(layout.layers)] for rng in self.rngs]
        self.costs = [[rng.uniform(low, high, (n[k], A, constraints)) for k in range(layout.layers)] for rng in self.rngs]

    def rollout(self, policy: torch.Tensor) -> Trajectory:
        episodes = [self._one(j, policy[j].detach().numpy()) for j in range(len(self.rngs))]
        states, actions, rewards, costs = (np.stack(part) for part in zip(*episodes, strict=True))
        dtype = policy.dtype
        index = (torch.tensor(states[:, :-1]), torch.tensor(actions), torch.tensor(states[:, 1:]))
        return Trajectory(*index, torch.tensor(rewards, dtype=dtype), torch.tensor(costs, dtype=dtype))

    def _one(self, j: int, policy: np.ndarray) -> tuple[np.ndarray, ...]:
        L, rng = self.layout.layers, self.rngs[j]
        states, actions, costs = [0], [], np.zeros((L, self.m))
        for k in range(L):
            actions.append(int((rng.random() > policy[k, states[k]].cumsum()[:-1]).sum()))
            row = self.P[j][k][states[k], actions[k]]
            states.append(int((rng.random() > row.cumsum()[:-1]).sum()))
            costs[k] = np.where(rng.random(self.m) < (1 + self.costs[j][k][states[k], actions[k]]) / 2, 1.0, -1.0)
        return np.array(states), np.array(actions), rng.random(L), costs


def adversarial(cmdp: LayeredCMDP, runs: int, step: float = 0.3) -> tc.Simulator:
    """Rewards that flee from the policy, and costs that rise under it as far as a safe policy allows."""
    costs = tc.OGDAdversary(cmdp.costs, sign=1, step=step, low=-1, high=tc.safe_caps(cmdp, 0.1))
    return tc.Simulator(cmdp, tc.OGDAdversary(cmdp.rewards, sign=-1, step=step), costs, runs=runs)


def measure(env: tc.Simulator, make: Callable[..., Tensor], points: list[int], tracker: tc.Tracker | None = None) -> tc.Tracker:
    """Play random policies up to the last of the points, and record at all of them."""
    tracker = tracker or tc.Tracker(env)
    for t in range(env.episode + 1, points[-1] + 1):
        policy = make(env.layout, env.runs, seed=t)
        tracker.update(policy, env.rollout(policy))
        if t in points:
            tracker.record(t)
    return tracker
