"""PDB-PS against a literal implementation, and the properties that its formulas promise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import play, simulator
from literal_wcops import greedy_fill
from torch import Tensor

import torchcmdp as tc
from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.confidence import CONFIDENCE_KINDS, Intervals, confidence_set
from torchcmdp.errors import InvalidInput
from torchcmdp.learners.pdbps import PDBPS, dilated_bonus
from torchcmdp.trajectory import Trajectory

DELTA, HORIZON = 0.01, 300
FAST: dict[str, Any] = {"eta": 0.05, "gamma": 0.1, "share": 0.02, "dual_step": 0.2, "radius_scale": 0.05}


def with_costs(trajectory: Trajectory, cost: float) -> Trajectory:
    index = (trajectory.states, trajectory.actions, trajectory.next_states)
    return Trajectory(*index, trajectory.rewards, torch.full_like(trajectory.costs, cost))


class Literal:
    """One run of section f, loop by loop and sharing no code with the library."""

    def __init__(self, widths: tuple[int, ...], A: int, m: int, kind: str, settings: dict[str, float]) -> None:
        self.n, self.A, self.m, self.kind, self.s = widths, A, m, kind, settings
        self.L, self.X = len(widths) - 1, sum(widths)
        self.policy = [np.full((n, A), 1 / A) for n in widths[:-1]]
        self.M = [np.zeros((n, A, after)) for n, after in zip(widths, widths[1:], strict=False)]
        self.multipliers, self.range = np.zeros(m), 0.0

    def interval(self, k: int, x: int, a: int) -> tuple[np.ndarray, np.ndarray]:
        N, after = self.M[k][x, a].sum(), self.n[k + 1]
        if N == 0:
            return np.zeros(after), np.ones(after)
        P, iota = self.M[k][x, a] / N, math.log(HORIZON * self.X * self.A / DELTA)
        if self.kind == "luo":
            width = 4 * np.sqrt(P * iota / N) + 28 * iota / (3 * N)
        else:
            width = np.full(after, math.sqrt(2 * after * iota / N))
        width = self.s["radius_scale"] * width
        return np.maximum(0, P - width), np.minimum(1, P + width)

    def best(self, k: int, x: int, a: int, values: np.ndarray) -> float:
        return greedy_fill(*self.interval(k, x, a), values)

    def occupancy(self, K: int, z: int, a: int, sign: int) -> float:
        """The largest (sign 1) or smallest (sign -1) occupancy of a pair."""
        f = np.zeros(self.n[K])
        f[z] = 1.0
        for k in range(K - 1, -1, -1):
            f = np.array(
                [sum(self.policy[k][x, b] * sign * self.best(k, x, b, sign * f) for b in range(self.A)) for x in range(self.n[k])]
            )
        return float(self.policy[K][z, a] * f[0])

    def dilated(self) -> list[np.ndarray]:
        gamma, scale = self.s["gamma"], self.L * self.range
        B: list[np.ndarray] = [np.empty(0)] * self.L
        after = np.zeros(1)
        for k in range(self.L - 1, -1, -1):
            B[k] = np.zeros((self.n[k], self.A))
            for x in range(self.n[k]):
                b = 0.0
                for a in range(self.A):
                    high, low = self.occupancy(k, x, a, 1), self.occupancy(k, x, a, -1)
                    b += self.policy[k][x, a] * (3 * gamma * scale + scale * (high - low)) / (high + gamma)
                for a in range(self.A):
                    B[k][x, a] = b + (1 + 1 / self.L) * self.best(k, x, a, after)
            after = (self.policy[k] * B[k]).sum(-1)
        return B

    def update(self, trajectory: Trajectory) -> None:
        states, actions = trajectory.states[0].tolist(), trajectory.actions[0].tolist()
        rewards, costs = trajectory.rewards[0].numpy(), trajectory.costs[0].numpy()
        c = 1 + self.multipliers.sum()
        self.range = max(self.range, 2 * c)
        losses = [c + self.multipliers @ costs[k] - rewards[k] for k in range(self.L)]
        Q = [np.zeros_like(p) for p in self.policy]
        for k, (x, a) in enumerate(zip(states, actions, strict=True)):
            Q[k][x, a] = sum(losses[k:]) / (self.occupancy(k, x, a, 1) + self.s["gamma"])
        B = self.dilated()
        for k in range(self.L):
            y = self.policy[k] * np.exp(-self.s["eta"] / self.range * (Q[k] - B[k]))
            self.policy[k] = (1 - self.s["share"]) * y / y.sum(-1, keepdims=True) + self.s["share"] / self.A
        self.multipliers = np.clip(self.multipliers + self.s["dual_step"] * costs.sum(0), 0, HORIZON**0.25)
        for k, (x, a, y) in enumerate(zip(states, actions, trajectory.next_states[0].tolist(), strict=True)):
            self.M[k][x, a, y] += 1


@pytest.mark.parametrize("kind", ["luo", "entrywise"])
def test_it_is_the_literal_algorithm(kind: str) -> None:
    cmdp = tc.random_cmdp((1, 3, 2, 1), actions=2, constraints=2, seed=1)
    learner = PDBPS(cmdp.layout, 2, HORIZON, DELTA, confidence=kind, **FAST)
    literal = Literal(cmdp.layout.widths, 2, 2, kind, FAST)
    env, fell = simulator(cmdp), False
    for _ in range(25):
        trajectory = env.rollout(learner.policy)
        learner.update(trajectory)
        literal.update(trajectory)
        for k, n in enumerate(cmdp.layout.widths[:-1]):
            assert np.allclose(learner.policy[0, k, :n].numpy(), literal.policy[k], atol=1e-11)
        assert np.allclose(learner.multipliers[0].numpy(), literal.multipliers, atol=1e-12)
        assert math.isclose(float(learner.loss_range[0]), literal.range, rel_tol=1e-12)
        fell |= literal.range > 2 * (1 + literal.multipliers.sum())
    assert fell, "the range must keep its maximum while the multipliers fall"
    assert (learner.policy - tc.uniform_policy(cmdp.layout)).abs().max() > 0.05


@pytest.mark.parametrize("confidence", CONFIDENCE_KINDS)
def test_what_the_formulas_promise_holds_on_the_way(confidence: str, cmdp: LayeredCMDP) -> None:
    learner, env = PDBPS(cmdp.layout, 2, HORIZON, runs=4, confidence=confidence, **FAST), simulator(cmdp, 4)
    states, pairs = cmdp.layout.state_mask(), cmdp.layout.pair_mask()
    for _ in range(30):
        seen = env.rollout(learner.policy)
        loss, before = learner.lagrangian_loss(seen), learner.loss_range
        learner.update(seen)
        assert (loss >= 0).all() and (loss <= learner.loss_range.unsqueeze(-1)).all()
        assert (learner.loss_range >= before).all() and (learner.loss_range >= 2).all()
        assert (learner.multipliers >= 0).all() and (learner.multipliers <= HORIZON**0.25).all()
        assert (learner.policy[:, pairs] >= FAST["share"] / 3 * (1 - 1e-12)).all() and (learner.policy[:, ~pairs] == 0).all()
        assert torch.allclose(learner.policy.sum(-1), states.to(torch.float64).expand(4, -1, -1), atol=1e-12)
        assert (learner.logits[:, ~pairs] == 0).all()
    assert (learner.visits.sum((-1, -2)) == 30).all() and int(learner.episode) == 30


def test_multipliers_reach_their_ceiling_and_their_floor(cmdp: LayeredCMDP) -> None:
    learner, env = PDBPS(cmdp.layout, 2, HORIZON, runs=2, **FAST), simulator(cmdp, 2)
    for t in range(1, 12):
        learner.update(with_costs(env.rollout(learner.policy), 1.0))
        expected = min(t * 0.2 * cmdp.layout.layers, HORIZON**0.25)
        assert torch.allclose(learner.multipliers, torch.full((2, 2), expected, dtype=torch.float64), atol=1e-12)
    for _ in range(12):
        learner.update(with_costs(env.rollout(learner.policy), -1.0))
    assert (learner.multipliers == 0).all()
    assert torch.allclose(learner.loss_range, torch.tensor(2 * (1 + 2 * HORIZON**0.25), dtype=torch.float64))


def known(cmdp: LayeredCMDP) -> Intervals:
    return Intervals(cmdp.transitions, cmdp.transitions)


def test_in_a_known_model_only_the_exploration_is_paid_for(cmdp: LayeredCMDP, random_policy: Callable[..., Tensor]) -> None:
    """lower = upper: the two occupancies are one, and b(x) = sum_a pi 3 gamma L Xi / (q + gamma)."""
    layout, gamma = cmdp.layout, FAST["gamma"]
    learner = PDBPS(layout, 2, HORIZON, runs=3, **{**FAST, "radius_scale": 0.0})
    learner.visits = 4 * layout.pair_mask().to(torch.float64).expand(3, -1, -1, -1)
    learner.transition_visits = 4 * cmdp.transitions.expand(3, -1, -1, -1, -1)
    assert torch.allclose(learner.kernels.lower, learner.kernels.upper, atol=1e-15)
    policy, seen = learner.policy, simulator(cmdp, 3).rollout(learner.policy)
    learner.update(seen)
    occupancy = tc.pair_occupancy_of(policy, cmdp.transitions)
    bonus = (policy * 3 * gamma * layout.layers * 2 / (occupancy + gamma)).sum(-1)
    expected = dilated_bonus(bonus, policy, known(cmdp))
    assert torch.allclose(learner.diagnostics()["Learner/max_bonus"], expected.flatten(1).amax(-1), atol=1e-12)
    visited = torch.zeros_like(policy)
    for j in range(3):
        for k in range(layout.layers):
            to_go = (1 - seen.rewards[j, k:]).sum()
            x, a = int(seen.states[j, k]), int(seen.actions[j, k])
            visited[j, k, x, a] = to_go / (occupancy[j, k, x, a] + gamma)
    moved = (policy.clamp_min(1e-300).log() - FAST["eta"] / 2 * (visited - expected)).softmax(-1)
    mixed = ((1 - FAST["share"]) * moved + FAST["share"] / layout.actions) * layout.pair_mask()
    assert torch.allclose(learner.policy, mixed, atol=1e-12)


def test_the_dilated_bonus_grows_by_one_over_l_a_layer(cmdp: LayeredCMDP, random_policy: Callable[..., Tensor]) -> None:
    layout = cmdp.layout
    L, policy = layout.layers, random_policy(cmdp.layout, 2)
    constant = layout.state_mask().to(torch.float64).expand(2, -1, -1)
    dilated = dilated_bonus(constant, policy, known(cmdp))
    for k, n in enumerate(layout.widths[:-1]):
        expected = sum((1 + 1 / L) ** j for j in range(L - k))
        assert torch.allclose(dilated[:, k, :n], torch.tensor(expected, dtype=torch.float64), atol=1e-12)
    assert (dilated[:, ~layout.pair_mask()] == 0).all()


def test_the_dilated_bonus_takes_the_worst_plausible_kernel(cmdp: LayeredCMDP, random_policy: Callable[..., Tensor]) -> None:
    """It ends with b itself, since the terminal state pays nothing, and before that no plausible kernel gives more."""
    layout, policy = cmdp.layout, random_policy(cmdp.layout)
    bonus = policy[..., 0] * layout.state_mask()
    counts = 200 * layout.pair_mask().to(torch.float64)
    kernels = confidence_set(
        "entrywise", counts, counts.unsqueeze(-1) * cmdp.transitions, layout, horizon=100, delta=DELTA, radius_scale=0.3
    )
    worst, true = dilated_bonus(bonus, policy, kernels), dilated_bonus(bonus, policy, known(cmdp))
    assert torch.equal(worst[-1], bonus[-1, :, None].expand_as(worst[-1]))
    assert (worst >= true - 1e-12).all() and (worst[0, 0] > true[0, 0] + 1e-3).all()


def test_single_state_is_exp3_ix_with_fixed_share() -> None:
    cmdp, eta, gamma, share = tc.single_state_cmdp([0.1, 0.3, 0.9]), 1.0, 0.05, 0.1
    learner, env = PDBPS(cmdp.layout, 0, 100, runs=1, eta=eta, gamma=gamma, share=share), simulator(cmdp)
    expected, mean = np.full(3, 1 / 3), np.zeros(3)
    for _ in range(100):
        assert np.allclose(learner.policy[0, 0, 0].numpy(), expected, atol=1e-12)
        seen = env.rollout(learner.policy)
        learner.update(seen)
        a = int(seen.actions[0, 0])
        # the bonus is the same for every action, so that it does not move a softmax
        y = expected * np.exp(-eta / 2 * np.where(np.arange(3) == a, (1 - float(seen.rewards[0, 0])) / (expected[a] + gamma), 0))
        expected = (1 - share) * y / y.sum() + share / 3
        mean += expected / 100
    assert mean[2] > 0.5


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_extreme_shares(share: float, cmdp: LayeredCMDP) -> None:
    learner = PDBPS(cmdp.layout, 2, HORIZON, runs=2, **{**FAST, "share": share, "eta": 50.0, "gamma": 0.0})
    play(learner, simulator(cmdp, learner.runs), 20)
    assert learner.policy.isfinite().all()
    distance = (learner.policy - tc.uniform_policy(cmdp.layout)).abs().max()
    assert distance < 1e-12 if share == 1 else distance > 0.5


def test_defaults() -> None:
    layout, T, m = tc.Layout((1, 4, 4, 4, 1), 3), 1000, 2
    learner = PDBPS(layout, m, T)
    eta = min(1 / (24 * 4**3), 1 / math.sqrt(14 * 3 * 4 * T))
    assert np.allclose([float(learner.eta), float(learner.gamma)], [eta, 2 * eta * 4], rtol=1e-12)
    assert np.allclose([float(learner.share), float(learner.dual_step)], [1 / T, 1 / (4 * math.sqrt(m * T))], rtol=1e-12)
    assert float(PDBPS(layout, m, 10**8).eta) == pytest.approx(1 / math.sqrt(14 * 3 * 4 * 1e8))
    swept = PDBPS(layout, m, T, runs=2, eta=torch.tensor([0.005, 0.02]))
    assert np.allclose(swept.gamma.tolist(), [0.04, 0.16]), "gamma follows the step"


def test_config_diagnostics_and_bad_arguments(cmdp: LayeredCMDP) -> None:
    learner = PDBPS(cmdp.layout, 2, 100, runs=2, eta=torch.tensor([0.25, 0.5]), confidence="entrywise")
    config = json.loads(json.dumps(learner.config()))
    assert config["name"] == "PDB-PS" and config["eta"] == [0.25, 0.5] and config["confidence"] == "entrywise"
    assert not learner.diagnostics()
    play(learner, simulator(cmdp, learner.runs), 1)
    tags = {"Learner/max_multiplier", "Learner/loss_range", "Learner/max_bonus"}
    assert learner.diagnostics().keys() == tags and all(value.shape == (2,) for value in learner.diagnostics().values())
    for settings, message in (
        ({"share": 1.5}, "share contains 1.5; a weight must not exceed one"),
        ({"confidence": "lou"}, "did you mean 'luo'"),
        ({"eta": torch.ones(3)}, r"eta has shape \(3,\)"),
    ):
        with pytest.raises(InvalidInput, match=message):
            PDBPS(cmdp.layout, 2, 100, runs=2, **settings)
