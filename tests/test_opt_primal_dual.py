"""OptPrimalDual against a literal implementation, and its optimism, its limits and its step sizes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import play, simulator

import torchcmdp as tc
from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput
from torchcmdp.learners.empirical import RADIUS_MODES
from torchcmdp.learners.opt_primal_dual import OptPrimalDual
from torchcmdp.trajectory import Trajectory

DELTA, HORIZON = 0.01, 200


def constant_costs(learner: OptPrimalDual, cmdp: LayeredCMDP, cost: float, episodes: int) -> None:
    env = simulator(cmdp, learner.runs)
    for _ in range(episodes):
        seen = env.rollout(learner.policy)
        index = (seen.states, seen.actions, seen.next_states)
        learner.update(Trajectory(*index, seen.rewards, torch.full_like(seen.costs, cost)))


class Literal:
    """One run of section d, loop by loop and sharing no code with the library."""

    def __init__(
        self, widths: tuple[int, ...], A: int, m: int, gap: float, mode: str, bonus_scale: float, radius_scale: float
    ) -> None:
        self.n, self.A, self.m, self.mode, self.scales = widths, A, m, mode, (bonus_scale, radius_scale)
        self.L, self.X = len(widths) - 1, sum(widths)
        rho = self.L / max(gap, 0.05 * self.L)
        self.t_lambda = math.sqrt(self.L**2 * m * HORIZON / rho**2)
        self.t_K = math.sqrt(2 * math.log(A) / (self.L**2 * (1 + m * rho) ** 2 * HORIZON))
        self.policy = [np.full((n, A), 1 / A) for n in widths[:-1]]
        self.multipliers = np.zeros(m)
        self.M = [np.zeros((n, A, after)) for n, after in zip(widths, widths[1:], strict=False)]
        self.R = [np.zeros((n, A)) for n in widths[:-1]]
        self.G = [np.zeros((m, n, A)) for n in widths[:-1]]

    def transition_radius(self, mean: float, N: float, after: int) -> float:
        if N == 0:
            return 1.0
        if self.mode == "matched":
            iota = math.log(HORIZON * self.X * self.A / DELTA)
            return min(1.0, self.scales[1] * math.sqrt(2 * after * iota / N))
        iota = math.log(6 * self.X * self.A * HORIZON / DELTA)
        return min(1.0, self.scales[1] * (2 * math.sqrt(mean * (1 - mean) * iota / N) + 14 * iota / (3 * N)))

    def action_values(self) -> tuple[list[np.ndarray], list[np.ndarray], float, np.ndarray]:
        if self.mode == "matched":
            iota = math.log(2 * self.m * self.X * self.A * HORIZON / DELTA)
        else:
            iota = math.log(6 * self.X * self.A * (self.m + 1) * HORIZON / DELTA)
        scale = self.scales[0] * (2 if self.mode == "literal" else 1)
        Vr, Vg = np.zeros(self.n[-1]), np.zeros((self.m, self.n[-1]))
        Qr: list[np.ndarray] = [np.empty(0)] * self.L
        Qg: list[np.ndarray] = [np.empty(0)] * self.L
        for k in range(self.L - 1, -1, -1):
            Qr[k], Qg[k] = np.zeros((self.n[k], self.A)), np.zeros((self.m, self.n[k], self.A))
            for x in range(self.n[k]):
                for a in range(self.A):
                    N = self.M[k][x, a].sum()
                    P = self.M[k][x, a] / N if N else np.full(self.n[k + 1], 1 / self.n[k + 1])
                    B = self.L * sum(self.transition_radius(p, N, self.n[k + 1]) for p in P) if self.n[k + 1] > 1 else 0.0
                    N = max(N, 1)
                    r = self.R[k][x, a] / N + scale * math.sqrt(iota / (2 * N)) + B + P @ Vr
                    Qr[k][x, a] = min(max(r, 0), self.L - k)
                    for i in range(self.m):
                        g = self.G[k][i, x, a] / N - scale * math.sqrt(2 * iota / N) - B + P @ Vg[i]
                        Qg[k][i, x, a] = min(max(g, -(self.L - k)), self.L - k)
            Vr, Vg = (self.policy[k] * Qr[k]).sum(-1), (self.policy[k] * Qg[k]).sum(-1)
        return Qr, Qg, float(Vr[0]), Vg[:, 0]

    def update(self, trajectory: Trajectory) -> None:
        Qr, Qg, _, Vg = self.action_values()
        for k in range(self.L):
            Q = Qr[k] - sum(self.multipliers[i] * Qg[k][i] for i in range(self.m))
            y = self.policy[k] * np.exp(self.t_K * Q)
            self.policy[k] = y / y.sum(-1, keepdims=True)
        self.multipliers = np.maximum(0, self.multipliers + Vg / self.t_lambda)
        steps = zip(trajectory.states[0].tolist(), trajectory.actions[0].tolist(), trajectory.next_states[0].tolist(), strict=True)
        for k, (x, a, y) in enumerate(steps):
            self.M[k][x, a, y] += 1
            self.R[k][x, a] += float(trajectory.rewards[0, k])
            self.G[k][:, x, a] += trajectory.costs[0, k].numpy()


@pytest.mark.parametrize("mode", RADIUS_MODES)
@pytest.mark.parametrize("scale", [1.0, 0.001])
def test_it_is_the_literal_algorithm(mode: str, scale: float, cmdp: LayeredCMDP) -> None:
    layout, gap = cmdp.layout, 0.7
    cmdp = LayeredCMDP(layout, cmdp.transitions, cmdp.rewards, (cmdp.costs + 0.6).clamp_max(1) * layout.pair_mask())
    settings: dict[str, Any] = {"radii": mode, "bonus_scale": scale, "radius_scale": scale}
    learner = OptPrimalDual(layout, 2, HORIZON, DELTA, slater_gap=gap, **settings)
    literal = Literal(layout.widths, layout.actions, 2, gap, mode, scale, scale)
    env, priced = simulator(cmdp), False
    for _ in range(60):
        action_values, start = learner.evaluate()
        Qr, Qg, Vr, Vg = literal.action_values()
        for k, n in enumerate(layout.widths[:-1]):
            assert np.allclose(action_values[0, 0, k, :n].numpy(), Qr[k], atol=1e-12)
            assert np.allclose(action_values[0, 1:, k, :n].numpy(), Qg[k], atol=1e-12)
            assert np.allclose(learner.policy[0, k, :n].numpy(), literal.policy[k], atol=1e-12)
        assert np.allclose(start[0].numpy(), [Vr, *Vg], atol=1e-12)
        assert np.allclose(learner.multipliers[0].numpy(), literal.multipliers, atol=1e-12)
        trajectory = env.rollout(learner.policy)
        learner.update(trajectory)
        literal.update(trajectory)
        priced |= bool((literal.multipliers > 0).any())
    assert priced == (scale < 1)  # at this horizon the published bonuses never let a policy look unsafe


@pytest.mark.parametrize("mode", RADIUS_MODES)
def test_published_matched_and_literal_radii(mode: str) -> None:
    layout = tc.Layout((1, 2, 1), 3)
    visits = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64).expand(2, *layout.pair_shape) * layout.pair_mask()
    scales = torch.tensor([1.0, 0.5], dtype=torch.float64)
    learner = OptPrimalDual(layout, 2, 50, 0.1, runs=2, radii=mode, bonus_scale=scales, confidence="bernstein")
    learner.visits = visits
    rewards, costs = learner.feedback_radii()
    inside = 2 * 2 * 4 * 3 * 50 / 0.1 if mode == "matched" else 6 * 4 * 3 * 3 * 50 / 0.1
    # the published radius is for costs in [0, 1], and costs in [-1, 1] have twice that range
    full = math.sqrt(2 * math.log(inside)) * (2 if mode == "literal" else 1)
    assert np.allclose(costs[:, 1, 1].numpy(), np.outer([1, 0.5], [full, full, full / 2]), rtol=1e-14)
    assert torch.equal(rewards, costs / 2) and (costs[:, ~layout.pair_mask()] == 0).all()
    assert learner.kernel_kind == ("bernstein" if mode == "matched" else "efroni")


@pytest.mark.parametrize("mode", RADIUS_MODES)
def test_evaluation_is_optimistic(mode: str, cmdp: LayeredCMDP) -> None:
    """With the published constants a policy looks at least as rewarding, and at most as costly, as it is."""
    learner = OptPrimalDual(cmdp.layout, 2, 2000, DELTA, runs=4, radii=mode, slater_gap=1.0)
    play(learner, simulator(cmdp, learner.runs), 100)
    # as if every pair had been visited a million times: otherwise every value sits at its limit, and nothing is tested
    many, pairs = 1e6, cmdp.layout.pair_mask()
    learner.visits = many * pairs.expand_as(learner.visits)
    learner.transition_visits = many * cmdp.transitions.expand_as(learner.transition_visits)
    learner.reward_sum = many * cmdp.rewards.expand_as(learner.reward_sum)
    learner.cost_sum = many * cmdp.costs.expand_as(learner.cost_sum)
    occupancy = tc.pair_occupancy_of(learner.policy, cmdp.transitions)
    reward = (occupancy * cmdp.rewards).sum((-1, -2, -3))
    costs = (occupancy.unsqueeze(1) * cmdp.costs).sum((-1, -2, -3))
    _, values = learner.evaluate()
    assert (values[:, 0] > reward).all() and (values[:, 0] < reward + 0.5).all()
    assert (values[:, 1:] < costs).all() and (values[:, 1:] > costs - 0.5).all()


def test_without_widths_a_known_model_is_evaluated_exactly(cmdp: LayeredCMDP) -> None:
    learner = OptPrimalDual(cmdp.layout, 2, HORIZON, runs=2, bonus_scale=0.0, radius_scale=0.0)
    play(learner, simulator(cmdp, learner.runs), 30)
    learner.visits = cmdp.layout.pair_mask().to(torch.float64).expand(2, -1, -1, -1) * 8
    learner.transition_visits, learner.reward_sum = (
        8 * cmdp.transitions.expand(2, -1, -1, -1, -1),
        8 * cmdp.rewards.expand(2, -1, -1, -1),
    )
    learner.cost_sum = 8 * cmdp.costs.expand(2, -1, -1, -1, -1)
    occupancy = tc.pair_occupancy_of(learner.policy, cmdp.transitions)
    _, values = learner.evaluate()
    assert torch.allclose(values[:, 0], (occupancy * cmdp.rewards).sum((-1, -2, -3)), rtol=0, atol=1e-12)
    assert torch.allclose(values[:, 1:], (occupancy.unsqueeze(1) * cmdp.costs).sum((-1, -2, -3)), rtol=0, atol=1e-12)


def test_values_stay_within_their_limits(cmdp: LayeredCMDP) -> None:
    L = cmdp.layout.layers
    limits = torch.arange(L, 0, -1, dtype=torch.float64)[:, None, None]
    for scale in (0.0, 0.01, 1.0):
        learner = OptPrimalDual(cmdp.layout, 2, HORIZON, runs=3, bonus_scale=scale, radius_scale=scale)
        for _ in range(10):
            play(learner, simulator(cmdp, learner.runs), 2)
            action_values, start = learner.evaluate()
            assert (action_values.abs() <= limits).all() and (action_values[:, 0] >= 0).all() and (start.abs() <= L).all()
            assert (action_values[..., ~cmdp.layout.pair_mask()] == 0).all()
            assert (learner.logits[:, ~cmdp.layout.pair_mask()] == 0).all()


def test_without_constraints_it_is_optimistic_policy_optimisation(cmdp: LayeredCMDP) -> None:
    """The same as with constraints whose multipliers never move: what is left is ascent on the optimistic reward alone."""
    settings: dict[str, Any] = {"radii": "matched", "bonus_scale": 0.02, "radius_scale": 0.02, "primal_step": 0.3}
    free = OptPrimalDual(cmdp.layout, 0, HORIZON, runs=2, **settings)
    unpriced = OptPrimalDual(cmdp.layout, 1, HORIZON, runs=2, dual_step=0.0, **settings)
    one = LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards, cmdp.costs[:1])
    for seen in play(unpriced, simulator(one, unpriced.runs), 40):
        before, values = free.logits, free.evaluate()[0][:, 0]
        free.update(Trajectory(seen.states, seen.actions, seen.next_states, seen.rewards, seen.costs[..., :0]))
        assert torch.allclose(free.policy, (before + 0.3 * values).softmax(-1) * cmdp.layout.pair_mask(), atol=1e-12)
    assert torch.allclose(free.policy, unpriced.policy, atol=1e-12) and free.multipliers.shape == (2, 0)
    assert (free.policy - tc.uniform_policy(cmdp.layout)).abs().max() > 0.1


def test_multipliers_of_certain_safety_and_certain_danger(cmdp: LayeredCMDP) -> None:
    L, settings = cmdp.layout.layers, {"bonus_scale": 0.001, "radius_scale": 0.0, "dual_step": 0.125}
    safe = OptPrimalDual(cmdp.layout, 2, HORIZON, runs=2, **settings)
    constant_costs(safe, cmdp, -1.0, 40)
    assert (safe.multipliers == 0).all()
    danger = OptPrimalDual(cmdp.layout, 2, HORIZON, runs=2, **settings)
    constant_costs(danger, cmdp, 1.0, 200)
    before = danger.multipliers
    constant_costs(danger, cmdp, 1.0, 20)
    growth = danger.multipliers - before
    assert (growth <= 20 * L * 0.125).all() and (growth > 20 * (L - 0.5) * 0.125).all()


def test_a_cap_holds_the_multipliers(cmdp: LayeredCMDP) -> None:
    caps = torch.tensor([0.25, 1000.0], dtype=torch.float64)
    learner = OptPrimalDual(
        cmdp.layout, 2, HORIZON, runs=2, bonus_scale=0.001, radius_scale=0.0, dual_step=0.125, multiplier_cap=caps
    )
    constant_costs(learner, cmdp, 1.0, 100)
    assert (learner.multipliers[0] == 0.25).all() and (learner.multipliers[1] > 0.25).all()
    assert torch.equal(learner.diagnostics()["Learner/max_multiplier"], learner.multipliers.amax(-1))


def test_step_sizes_follow_the_slater_gap(cmdp: LayeredCMDP) -> None:
    L, m, T, A = cmdp.layout.layers, 2, 500, cmdp.layout.actions

    def steps(gap: Any) -> tuple[list[float], list[float], list[float]]:
        learner = OptPrimalDual(cmdp.layout, m, T, runs=3, slater_gap=gap)
        return learner.slater_gap.tolist(), learner.primal_step.tolist(), learner.dual_step.tolist()

    gaps, primal, dual = steps(torch.tensor([-0.3, 0.8, math.inf], dtype=torch.float64))
    assert np.allclose(gaps, [0.05 * L, 0.8, L])
    for gap, t_K, inverse_t_lambda in zip(gaps, primal, dual, strict=True):
        rho = L / gap
        assert math.isclose(t_K, math.sqrt(2 * math.log(A) / (L**2 * (1 + m * rho) ** 2 * T)), rel_tol=1e-12)
        assert math.isclose(inverse_t_lambda, 1 / math.sqrt(L**2 * m * T / rho**2), rel_tol=1e-12)
    assert steps(None) == steps(0.05 * L) and steps(0.8)[0] == [0.8, 0.8, 0.8]


def test_it_approaches_the_safe_optimum_of_two_paths() -> None:
    cmdp = tc.two_path_cmdp()
    learner = OptPrimalDual(
        cmdp.layout, 1, 700, runs=4, slater_gap=0.2, bonus_scale=0.01, radius_scale=0.01, primal_step=0.1, dual_step=0.05
    )
    env, costs, rewards = simulator(cmdp, 4), [], []
    for _ in range(700):
        occupancy = tc.pair_occupancy_of(learner.policy, cmdp.transitions)
        rewards.append((occupancy * cmdp.rewards).sum((-1, -2, -3)))
        costs.append((occupancy * cmdp.costs[0]).sum((-1, -2, -3)))
        learner.update(env.rollout(learner.policy))
    # 0.4 at cost 0, while the unconstrained optimum earns 0.84 at cost 0.44; its iterates circle around it
    assert abs(float(torch.stack(rewards[200:]).mean()) - 0.4) < 0.1 and abs(float(torch.stack(costs[200:]).mean())) < 0.1


def test_config_is_json_and_diagnostics_have_one_number_a_run(cmdp: LayeredCMDP) -> None:
    learner = OptPrimalDual(cmdp.layout, 2, 100, runs=2, slater_gap=torch.tensor([1.0, 2.0]), radii="matched", confidence="luo")
    config = json.loads(json.dumps(learner.config()))
    assert config["name"] == "OptPrimalDual" and config["slater_gap"] == [1.0, 2.0] and config["multiplier_cap"] is None
    assert config["radii"] == "matched" and config["confidence"] == "luo" and config["widths"] == list(cmdp.layout.widths)
    assert not learner.diagnostics()
    play(learner, simulator(cmdp, learner.runs), 1)
    assert all(value.shape == (2,) for value in learner.diagnostics().values()) and len(learner.diagnostics()) == 3
    learner.load_state_dict(learner.state_dict())
    assert not learner.diagnostics()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"radii": "publishd"}, "did you mean 'published'"),
        ({"confidence": "l1"}, "confidence is 'l1'"),
        ({"slater_gap": math.nan}, "slater_gap contains nan"),
        ({"slater_gap": torch.ones(3)}, r"slater_gap has shape \(3,\)"),
        ({"primal_step": -1.0}, "primal_step contains -1.0"),
    ],
)
def test_bad_arguments_get_a_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        OptPrimalDual(tc.Layout((1, 2, 1), 2), 1, 100, runs=2, **settings)
