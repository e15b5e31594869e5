"""CMDPs that papers measure their algorithms on, each written from its published definition."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.problems.arrays import from_arrays
from torchcmdp.problems.problem import entry

DOPE = "Bura, HasanzadeZonuzy, Kalathil, Shakkottai, Chamberland: DOPE, NeurIPS 2022, and the settings of its public code"
ALWAYS_SAFE = "Simao, Jansen, Spaan: AlwaysSafe, AAMAS 2021, and the settings of its public code"
UNIFORM_PAC = (
    "Kitamura et al.: a policy gradient primal-dual algorithm for CMDPs with uniform PAC guarantees, 2024, and its public code"
)
OMDPD = "Zhu, Yu, Lee, Liu, Wei: an optimistic algorithm for online CMDPs with anytime adversarial constraints, arXiv 2505.21841"


def _half(horizon: int) -> float:
    return horizon / 2


def _cycle(scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three states in a circle: to stay is free, to move from state s pays (s + 1) / scale and costs 1 (Zheng and Ratliff 2020)."""
    stay, move = np.eye(3), np.roll(np.eye(3), 1, axis=1)
    pay = np.stack([np.zeros(3), np.arange(1, 4) / scale], axis=1)
    return np.stack([stay, move], axis=1), pay, (pay > 0).astype(float)


@entry("dope/factored", f"{DOPE}; rewards are the negative of its objective", noise=False, horizon=6, budget=_half)
def factored(horizon: int, budget: Any) -> LayeredCMDP:
    """The circle of three states, from the first."""
    return from_arrays(*_cycle(3.0), horizon=horizon, budget=budget)


@entry("dope/media", f"{DOPE}; rewards are the negative of its objective", noise=False, horizon=10, budget=_half)
def media(horizon: int, budget: Any) -> LayeredCMDP:
    """A play-out buffer of ten levels, which starts empty: the fast service costs 1, and an empty buffer pays -1."""
    levels, play, P = 10, 0.8, np.zeros((10, 2, 10))
    for action, arrive in enumerate((0.9, 0.1)):
        for level in range(levels):
            P[level, action, level] += arrive * play + (1 - arrive) * (1 - play)
            P[level, action, min(level + 1, levels - 1)] += arrive * (1 - play)
            P[level, action, max(level - 1, 0)] += (1 - arrive) * play
    pay, cost = np.zeros((levels, 2)), np.zeros((levels, 2))
    pay[0], cost[:, 0] = -1.0, 1.0
    return from_arrays(P, pay, cost, horizon=horizon, budget=budget)


@entry("dope/inventory", DOPE, optimum=6.665322, noise=False, horizon=7, budget=_half)
def inventory(horizon: int, budget: Any) -> LayeredCMDP:
    """A store of at most five goods: orders and storage cost, sales pay; both in units of the largest."""
    most, demand = 5, (0.3, 0.2, 0.2, 0.2, 0.05, 0.05)
    size = most + 1
    P, pay, cost, mask = np.zeros((size, size, size)), np.zeros((size, size)), np.zeros((size, size)), np.zeros((size, size), bool)
    for stock in range(size):
        for order in range(size - stock):
            full = stock + order
            mask[stock, order], cost[stock, order] = True, full + (4 + 2 * order if order else 0)
            for asked, chance in enumerate(demand):
                P[stock, order, max(full - asked, 0)] += chance
            # weighed, as published, by the probability of the stock that is left rather than of the demand
            pay[stock, order] = sum(P[stock, order, full - asked] * 0.08 * asked for asked in range(full + 1))
    return from_arrays(P, pay / pay.max(), cost / cost.max(), horizon=horizon, budget=budget, mask=mask)


@entry("alwayssafe/simple", ALWAYS_SAFE, noise=False, horizon=6, budget=3.0)
def simple(horizon: int, budget: Any) -> LayeredCMDP:
    """The circle of three states, from any of them alike."""
    return from_arrays(*_cycle(1.0), horizon=horizon, budget=budget, start=np.full(3, 1 / 3))


@entry("alwayssafe/cliff", ALWAYS_SAFE, noise=False, horizon=15, budget=2.0)
def cliff(horizon: int, budget: Any) -> LayeredCMDP:
    """Cliff walking on 4 x 6 squares, where entering an inner square costs the number of its row."""
    rows, columns = 4, 6
    P, pay, cost = np.zeros((24, 4, 24)), np.full((24, 4), -1.0), np.zeros((24, 4))
    for row in range(rows):
        for column in range(columns):
            for action, (down, right) in enumerate(((-1, 0), (0, 1), (1, 0), (0, -1))):
                to, side = min(max(row + down, 0), rows - 1), min(max(column + right, 0), columns - 1)
                fell = to == rows - 1 and 0 < side < columns - 1
                here, there = row * columns + column, (rows - 1) * columns if fell else to * columns + side
                P[here, action, there] = 1
                pay[here, action] = -100.0 if fell else -1.0
                cost[here, action] = to if 0 < to < rows - 1 and 0 < side < columns - 1 else 0.0
    return from_arrays(P, pay, cost, horizon=horizon, budget=budget, start=(rows - 1) * columns, terminal=[rows * columns - 1])


@entry("alwayssafe/factored", f"{ALWAYS_SAFE} (its cost chain); the budget is ours", noise=False, horizon=6, budget=0.5)
def chain(horizon: int, budget: Any) -> LayeredCMDP:
    """A chain of three places times a hidden coin, drawn anew at even places, that says which of two actions pays at odd ones."""
    length, tails = 3, 0.1
    P, pay, cost = np.zeros((6, 3, 6)), np.zeros((6, 3)), np.zeros((6, 3))
    for place in range(length):
        for coin in range(2):
            here = 2 * place + coin
            P[here, 2, coin] = 1  # back to the first place
            for action in range(2):
                if place == length - 1:
                    P[here, :, :] = np.eye(6)[here]
                elif place % 2 == 0:
                    P[here, action, 2 * (place + 1) : 2 * (place + 2)] = tails, 1 - tails
                else:
                    P[here, action, here + 2] = 1
                    pay[here, action], cost[here, action] = float(action != coin), float(action == 0)
    return from_arrays(P, pay, cost, horizon=horizon, budget=budget, start=[0.5, 0.5, 0, 0, 0, 0], terminal=[4, 5])


@entry(
    "machine/replacement",
    "machine replacement as in the public code of robust CMDP papers (four states, discounted there); horizon and budget are ours",
    noise=False,
    horizon=10,
    budget=4.0,
)
def machine(horizon: int, budget: Any) -> LayeredCMDP:
    """A machine that wears out: the older, the more its running costs; a new one costs 0.7, and 0.4 of the safety budget."""
    states = 4
    running, ages = np.linspace(0.2, 0.99, states), np.arange(1, states + 1)
    wear = np.triu(np.outer(ages, ages)).astype(float)
    renew = np.zeros((states, states))
    renew[:, 0] = 1
    P = np.stack([wear / wear.sum(1, keepdims=True), renew], axis=1)
    pay = np.stack([-running, np.full(states, -0.7 - running[0])], axis=1)
    cost = np.stack([running, np.full(states, 0.4 + running[0])], axis=1)
    return from_arrays(P, pay, cost, horizon=horizon, budget=budget)


@entry("uniform-pac/random", f"{UNIFORM_PAC}; another generator than theirs", noise=False, horizon=10, budget=None, seed=0)
def uniform_pac(horizon: int, budget: Any, seed: int) -> LayeredCMDP:
    """30 states, 3 actions, all by step: rewards of 0 or 1, a utility of 1 where they are 0, half of which is asked."""
    states, actions, rng = 30, 3, np.random.default_rng(seed)
    pay = (rng.random((horizon, states, actions)) < 0.5).astype(float)
    P = rng.dirichlet(np.full(states, 0.1), (horizon, states, actions))
    start = int(rng.integers(states))
    if budget is None:
        most = np.zeros(states)
        for step in reversed(range(horizon)):
            most = (1 - pay[step] + P[step] @ most).max(-1)
        budget = 0.5 * most[start]
    return from_arrays(P, pay, (1 - pay)[None], horizon=horizon, budget=budget, sense=">=", start=start)


@entry(
    "omdpd/dirichlet", f"{OMDPD}: its sizes; Dirichlet(1) rows, rewards, costs and budget are ours", horizon=5, budget=2.0, seed=0
)
def omdpd(horizon: int, budget: Any, seed: int) -> LayeredCMDP:
    """5 states and 3 actions with rows from Dirichlet(1), rewards and costs from U[0, 1], which may sum to 2 of 5."""
    states, actions, rng = 5, 3, np.random.default_rng(seed)
    P = rng.dirichlet(np.ones(states), (states, actions))
    pay, cost = rng.random((states, actions)), rng.random((states, actions))
    return from_arrays(P, pay, cost, horizon=horizon, budget=budget, cost_range=(0.0, 1.0), reward_range=(0.0, 1.0))


@entry("grid/hazard", "a grid world with a hazard; ours, after those of constrained RL papers", horizon=12, budget=0.15)
def grid(horizon: int, budget: Any) -> LayeredCMDP:
    """3 x 5 squares with wind: from the left to the right of the middle row through a hazard, or around it in more steps.

    A step goes astray to one of the sides with probability 0.1 each. Every step into a hazard costs 1; the goal pays 1 and ends.
    """
    rows, columns, hazards, goal = 3, 5, {(1, 1), (1, 2), (1, 3)}, (1, 4)
    moves = ((-1, 0), (0, 1), (1, 0), (0, -1))
    P, pay, cost = np.zeros((15, 4, 15)), np.zeros((15, 4)), np.zeros((15, 4))
    for row in range(rows):
        for column in range(columns):
            for action in range(4):
                for turn, chance in ((0, 0.8), (1, 0.1), (-1, 0.1)):
                    down, right = moves[(action + turn) % 4]
                    to = (min(max(row + down, 0), rows - 1), min(max(column + right, 0), columns - 1))
                    P[row * columns + column, action, to[0] * columns + to[1]] += chance
                    pay[row * columns + column, action] += chance * (to == goal)
                    cost[row * columns + column, action] += chance * (to in hazards)
    return from_arrays(P, pay, cost, horizon=horizon, budget=budget, start=columns, terminal=[goal[0] * columns + goal[1]])
