"""What tuning needs of WC-OPS: constants as multiples, expected feedback, derivatives that fade; and the empirical threshold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import ADAPTIVE, LAYOUT, SMALL, World, play

import torchcmdp as tc
from torchcmdp.confidence import confidence_set, visited_transitions
from torchcmdp.errors import InvalidInput
from torchcmdp.estimation import bonus, empirical_threshold, step_uncertainty
from torchcmdp.layout import Layout
from torchcmdp.learners import WCOPS
from torchcmdp.learners.practical import RECIPE
from torchcmdp.learners.wcops import default_step
from torchcmdp.occupancy import occupancy_of
from torchcmdp.trajectory import Trajectory
from torchcmdp.tuning.evidence import expected_evidence, fade


@pytest.mark.parametrize("carrier", ["gradient", "tangent"])
def test_a_state_is_not_loaded_over_a_hyperparameter_with_a_derivative(carrier: str) -> None:
    eta = torch.tensor(0.3, dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(eta, torch.ones_like(eta))
        learner = WCOPS(LAYOUT, 1, 100, runs=2, eta=dual if carrier == "tangent" else eta.clone().requires_grad_())
        with pytest.raises(InvalidInput, match="eta carries a gradient or a tangent"):
            learner.load_state_dict(WCOPS(LAYOUT, 1, 100, runs=2).state_dict())
    parameter = WCOPS(LAYOUT, 1, 100, runs=2, eta=torch.nn.Parameter(torch.tensor([0.1, 0.2], dtype=torch.float64)))
    parameter.load_state_dict(WCOPS(LAYOUT, 1, 100, runs=2, eta=0.7).state_dict())
    assert parameter.eta.tolist() == [0.7, 0.7]


def test_scales_are_multiples_of_the_papers_constants_and_practical_takes_its_recipe() -> None:
    step = default_step(LAYOUT, 100, 0.05)
    scaled = WCOPS.scaled(LAYOUT, 1, 100, 0.05, 2, eta_scale=3.0, gamma_scale=torch.tensor([0.5, 2.0]), bonus_scale=0.1)
    assert torch.allclose(scaled.eta, torch.full((2,), 3 * step, dtype=torch.float64))
    assert torch.allclose(scaled.gamma, torch.tensor([0.5, 2.0], dtype=torch.float64) * step)
    assert (scaled.bonus_scale == 0.1).all() and (scaled.radius_scale == 1).all()
    practical = WCOPS.practical(LAYOUT, 1, 100, 0.05, 2, radius_scale=0.7)
    assert (practical.radius_scale == 0.7).all() and (practical.share == RECIPE["share"]).all()
    assert torch.allclose(practical.eta, torch.full((2,), RECIPE["eta_scale"] * step, dtype=torch.float64))
    with pytest.raises(InvalidInput, match="horizon is 0"):
        WCOPS.practical(LAYOUT, 1, 0)


class TestExpectedFeedback:
    def test_certain_trajectories_are_the_sampled_update(self) -> None:
        """Where the policy and the transitions leave no choice, the expectation of an episode is the episode."""
        layout = Layout((1, 1, 1), 1)
        sampled, expected = (WCOPS(layout, 1, 100, **SMALL) for _ in range(2))
        zeros = torch.zeros(1, 2, dtype=torch.int64)
        occupancy = torch.ones(1, *layout.transition_shape, dtype=torch.float64)
        for reward, cost in ((0.3, 0.5), (0.6, -0.2), (1.0, 0.1)):
            rewards, costs = torch.full((1, 2), reward, dtype=torch.float64), torch.full((1, 2, 1), cost, dtype=torch.float64)
            sampled.update(Trajectory(zeros, zeros, zeros, rewards, costs))
            means = rewards[..., None, None], costs.transpose(1, 2)[..., None, None]
            expected.learn(expected_evidence(expected, occupancy, *means))
        state, other = sampled.state_dict(), expected.state_dict()
        assert all(torch.allclose(state[key], other[key], atol=1e-12) for key in state)

    def test_everything_is_known_of_what_is_visited_at_all(self) -> None:
        cmdp = tc.random_cmdp((1, 2, 3, 1), 2, 2, seed=1)
        learner = WCOPS(cmdp.layout, 2, 100, runs=3, **SMALL)
        for _ in range(3):
            occupancy = occupancy_of(learner.policy, cmdp.transitions)
            learner.learn(expected_evidence(learner, occupancy, cmdp.rewards, cmdp.costs))
        assert torch.allclose(learner.cost_estimate, cmdp.costs.expand(3, -1, -1, -1, -1), atol=1e-12)
        real = cmdp.layout.transition_mask()
        assert (learner.kernels.lower <= cmdp.transitions + 1e-12).all()
        assert (learner.kernels.upper >= cmdp.transitions - 1e-12)[:, real].all()
        assert (learner.visits.sum((-1, -2)) - 3).abs().max() < 1e-12
        assert (learner.occupancy[:, ~cmdp.layout.transition_mask()] == 0).all()
        assert (learner.visits[:, ~cmdp.layout.pair_mask()] == 0).all()

    def test_with_a_sample_the_values_are_those_of_the_sample(self) -> None:
        world, other = (World(LAYOUT, 2, 3, [0, 1]) for _ in range(2))
        sampled, mixed = (WCOPS(LAYOUT, 2, 100, runs=2, **ADAPTIVE) for _ in range(2))
        rewards = torch.rand(2, *LAYOUT.pair_shape, dtype=torch.float64) * LAYOUT.pair_mask()
        costs = torch.rand(2, 2, *LAYOUT.pair_shape, dtype=torch.float64) * LAYOUT.pair_mask()
        for _ in range(8):
            sampled.update(world.rollout(sampled.policy))
            sample = other.rollout(mixed.policy)
            mixed.learn(expected_evidence(mixed, mixed.occupancy, rewards, costs, sample))
        state, mine = sampled.state_dict(), mixed.state_dict()
        assert all(torch.allclose(state[key], mine[key], atol=1e-9) for key in state)

    def test_fading_scales_derivatives_and_moves_no_value(self) -> None:
        eta = torch.tensor([0.3, 0.2], dtype=torch.float64, requires_grad=True)
        learner = WCOPS(LAYOUT, 1, 100, runs=2, eta=eta, gamma=0.1)
        play(learner, World(LAYOUT, 1, 0, [0, 1]), 3)
        before = learner.log_occupancy
        fade(learner, 0.25)
        assert torch.equal(learner.log_occupancy, before)
        weights = torch.linspace(0, 1, before.numel(), dtype=torch.float64).view_as(before)
        whole, faded = (
            torch.autograd.grad((x * weights).sum(), eta, retain_graph=True)[0] for x in (before, learner.log_occupancy)
        )
        assert torch.allclose(faded, 0.25 * whole) and (whole != 0).all()


class TestEmpiricalThreshold:
    def test_it_sums_the_widths_in_force_along_the_paths(self) -> None:
        learner = WCOPS(LAYOUT, 2, 100, runs=2, violation_threshold="empirical", **SMALL)
        total, like = torch.zeros(2, dtype=torch.float64), {"horizon": 100, "delta": 0.01}
        for trajectory in play(WCOPS(LAYOUT, 2, 100, runs=2, **SMALL), World(LAYOUT, 2, 0, [0, 1]), 5):
            kernels = confidence_set("entrywise", learner.visits, learner.transition_visits, LAYOUT, radius_scale=0.1, **like)
            b = bonus(learner.visits, LAYOUT, 2, bonus_scale=0.05, **like)
            step = step_uncertainty(kernels.lower, kernels.upper, b, learner.visits, LAYOUT)
            total = total + (step * visited_transitions(trajectory, LAYOUT, torch.float64).sum(-1)).sum((-1, -2, -3))
            learner.update(trajectory)
        assert torch.allclose(learner.uncertainty, total) and (total > 0).all()

    def test_gamma_is_the_excess_over_it(self) -> None:
        """A bandit that can only lose: with the threshold scaled down, Gamma is what the path exceeds it by, up to the cap."""
        layout, scale = Layout((1, 1), 1), 0.05
        learner = WCOPS(layout, 1, 500, violation_threshold="empirical", threshold_scale=scale, bonus_scale=0.01)
        zero, cost = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, 1, dtype=torch.float64)
        for _ in range(40):
            learner.update(Trajectory(zero, zero, zero, cost[..., 0], cost))
        threshold = empirical_threshold(learner.uncertainty, 40, layout, 1, horizon=500, delta=0.01)
        gamma = 40 - scale * float(threshold)
        assert gamma > 0 and learner.diagnostics()["Learner/gamma_active"].item() == 1
        assert math.isclose(learner.diagnostics()["Learner/max_beta"].item(), min(1, (1 + gamma) / 40), rel_tol=1e-9)

    def test_it_sleeps_where_costs_are_stochastic(self) -> None:
        """The premise, on random bandits: at most one episode in a hundred has Gamma > 0. Costs all at +1 do wake it there."""
        cmdps = tc.stack_cmdps([tc.random_cmdp((1, 1), 3, 1, seed=seed) for seed in range(100)])
        stochastic, hopeless = (
            tc.Bernoulli(cmdps.costs, low=-1),
            tc.Fixed(torch.ones_like(cmdps.costs[:1]).expand(100, -1, -1, -1, -1)),
        )
        shares = []
        for costs in (stochastic, hopeless):
            env = tc.Simulator(cmdps, tc.Bernoulli(cmdps.rewards), costs, runs=100, seed=0)
            learner = WCOPS(cmdps.layout, 1, 1500, runs=100, violation_threshold="empirical", bonus_scale=0.1)
            awake = torch.zeros(100, dtype=torch.float64)
            for _ in range(1500):
                learner.update(env.rollout(learner.policy))
                awake += learner.diagnostics()["Learner/gamma_active"]
            shares.append(awake / 1500)
        assert float((shares[0] <= 0.01).double().mean()) >= 0.99
        assert (shares[1] > 0.1).all()

    def test_its_state_continues_bit_for_bit(self) -> None:
        settings: dict[str, Any] = {**SMALL, "runs": 2, "violation_threshold": "empirical", "threshold_scale": 0.01}
        original, restored = (WCOPS(LAYOUT, 2, 100, **settings) for _ in range(2))
        world = World(LAYOUT, 2, 2, [0, 1])
        play(original, world, 4)
        restored.load_state_dict(original.state_dict())
        for trajectory in play(original, world, 4):
            restored.update(trajectory)
        state, other = original.state_dict(), restored.state_dict()
        with pytest.raises(InvalidInput, match="did you mean 'empirical'"):
            WCOPS(LAYOUT, 2, 100, violation_threshold="empircal")
        assert "costs.uncertainty" in state and all(torch.equal(state[key], other[key]) for key in state)
