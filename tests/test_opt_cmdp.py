"""OptCMDP and Greedy: known-model limits, optimism, equality where they must agree, and the drill of an empty safe set."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from helpers import play

import torchcmdp as tc
from torchcmdp.confidence import confidence_set
from torchcmdp.learners import Greedy, OptCMDP
from torchcmdp.occupancy import expected_value
from torchcmdp.optimistic import optimistic_optimum
from torchcmdp.safe_set import SafeSet
from train import extended_lp

WIDTHS, ACTIONS, M = (1, 3, 3, 1), 2, 2


def simulator(runs: int = 4, seed: int = 0, shift: float = 0.0) -> tc.Simulator:
    cmdp = tc.random_cmdp(WIDTHS, ACTIONS, M, seed)
    costs = ((cmdp.costs + shift) * cmdp.layout.pair_mask()).clamp(-1, 1)
    return tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), tc.Bernoulli(costs, low=-1), runs=runs, seed=seed)


def side_by_side(learner: tc.Learner, other: tc.Learner, env: tc.Simulator, episodes: int) -> Iterator[None]:
    """Let both learn from what one of them plays, and stop after every episode."""
    for _ in range(episodes):
        trajectory = env.rollout(learner.policy)
        learner.update(trajectory)
        other.update(trajectory)
        yield


def know(learner: OptCMDP, cmdp: tc.LayeredCMDP, visits: float = 1000.0) -> None:
    """Data that describe the CMDP without error."""
    mask = cmdp.layout.pair_mask()
    learner.visits = (visits * mask).expand_as(learner.visits).to(cmdp.dtype)
    learner.transition_visits = (visits * cmdp.transitions).expand_as(learner.transition_visits)
    learner.reward_sum = (visits * cmdp.rewards).expand_as(learner.reward_sum)
    learner.cost_sum = (visits * cmdp.costs).expand_as(learner.cost_sum)


@pytest.mark.parametrize("kind", [Greedy, OptCMDP])
def test_known_model_without_widths_gives_the_safe_optimum(kind: type[OptCMDP]) -> None:
    for seed in range(5):
        cmdp = tc.random_cmdp(WIDTHS, ACTIONS, M, seed)
        scales = {} if kind is Greedy else {"bonus_scale": 0.0, "radius_scale": 0.0}
        learner = kind(cmdp.layout, M, 1000, **scales)
        know(learner, cmdp)
        plan = optimistic_optimum(*learner.program())
        assert torch.allclose(plan.value, tc.safe_optimum(cmdp).value, atol=1e-9)


@pytest.mark.parametrize("radii", ["published", "matched"])
def test_greedy_is_optcmdp_without_widths(radii: str) -> None:
    env = simulator(runs=3, seed=2)
    greedy = Greedy(env.cmdp.layout, M, 500, runs=3)
    optimist = OptCMDP(env.cmdp.layout, M, 500, runs=3, bonus_scale=0.0, radius_scale=0.0, radii=radii)
    uniform = tc.uniform_policy(env.cmdp.layout).expand(3, -1, -1, -1)
    for _ in range(150):  # under the uniform policy every pair is visited, and then the conventions for N = 0 do not matter
        trajectory = env.rollout(uniform)
        greedy.count(trajectory)
        optimist.count(trajectory)
    assert (greedy.visits[:, env.cmdp.layout.pair_mask()] > 0).all()
    one, other = optimistic_optimum(*greedy.program()), optimistic_optimum(*optimist.program())
    assert torch.allclose(one.value, other.value, atol=1e-7)
    rewards, safe_set = greedy.program()
    arrays = (tensor[0].numpy() for tensor in (rewards, safe_set.lower, safe_set.upper, safe_set.costs))
    assert math.isclose(extended_lp.solve(env.cmdp.layout, *arrays)[0], float(one.value[0]), abs_tol=1e-7)


@pytest.mark.parametrize("radii", ["published", "matched"])
def test_optimism_on_the_good_event(radii: str) -> None:
    """Where the truth lies in the confidence sets, the plan promises at least OPT, and q* is safe in WC-OPS's set as well."""
    env = simulator(runs=6, seed=1)
    cmdp, horizon = env.cmdp, 200
    optimum = tc.safe_optimum(cmdp)
    learner = OptCMDP(cmdp.layout, M, horizon, runs=6, radii=radii)
    wcops = tc.WCOPS(cmdp.layout, M, horizon, runs=6)
    checked = 0
    for _ in side_by_side(learner, wcops, env, 60):
        rewards, safe_set = learner.program()
        own = wcops.safe_set()
        good = inside(cmdp, rewards, safe_set)
        assert (learner.diagnostics()["Learner/planned_value"][good] >= optimum.value - 1e-9).all()
        both = good & inside(cmdp, rewards, own)
        assert (expected_value(own.costs, optimum.occupancy.sum(-1)) <= 1e-9).all(-1)[both].all()
        checked += int(both.sum())
    assert checked > 200  # of 360: the sets hold with probability 1 - delta


def inside(cmdp: tc.LayeredCMDP, rewards: torch.Tensor, safe_set: SafeSet) -> torch.Tensor:
    """Which runs have optimistic rewards and costs, and kernels that hold the truth."""
    kernel = (safe_set.lower <= cmdp.transitions + 1e-12) & (cmdp.transitions <= safe_set.upper + 1e-12)
    ok = kernel.all(-1) & (rewards >= cmdp.rewards - 1e-12) & (safe_set.costs <= cmdp.costs + 1e-12).all(1)
    return ok.flatten(1).all(-1)


def test_widths_enter_the_program() -> None:
    env = simulator(runs=2)
    layout = env.cmdp.layout
    learner = OptCMDP(layout, M, 100, runs=2, bonus_scale=torch.tensor([0.01, 0.02], dtype=torch.float64), radius_scale=0.01)
    play(learner, env, 30)
    rewards, safe_set = learner.program()
    log = math.log(6 * layout.total_states * ACTIONS * (M + 1) * 100 / 0.01)
    for j, scale in enumerate((0.01, 0.02)):
        for k, x, a in (learner.visits[j] > 0).nonzero().tolist():
            n = float(learner.visits[j, k, x, a])
            reward, cost = float(learner.reward_sum[j, k, x, a]) / n, float(learner.cost_sum[j, 0, k, x, a]) / n
            assert math.isclose(float(rewards[j, k, x, a]), min(1, reward + scale * math.sqrt(log / (2 * n))), abs_tol=1e-12)
            assert math.isclose(float(safe_set.costs[j, 0, k, x, a]), max(-1, cost - scale * math.sqrt(2 * log / n)), abs_tol=1e-12)
    unseen = (learner.visits == 0) & layout.pair_mask()
    assert unseen.any() and (rewards[unseen] == 1).all() and (safe_set.costs.movedim(1, -1)[unseen] == -1).all()
    like = {"horizon": 100, "delta": 0.01, "radius_scale": torch.tensor([0.01, 0.01], dtype=torch.float64)}
    expected = confidence_set("efroni", learner.visits, learner.transition_visits, layout, **like)
    assert torch.equal(safe_set.lower, expected.lower) and torch.equal(safe_set.upper, expected.upper)


def test_matched_widths_are_those_of_wcops() -> None:
    env = simulator(runs=2)
    learner = OptCMDP(env.cmdp.layout, M, 100, runs=2, radii="matched")
    wcops = tc.WCOPS(env.cmdp.layout, M, 100, runs=2)
    for _ in side_by_side(learner, wcops, env, 20):
        pass
    _, safe_set = learner.program()
    own = wcops.safe_set()
    assert torch.equal(safe_set.lower, own.lower) and torch.equal(safe_set.upper, own.upper)
    assert torch.allclose(safe_set.costs, own.costs, atol=1e-12)


@pytest.mark.parametrize("kind", [Greedy, OptCMDP])
def test_without_any_safe_policy_it_keeps_the_violation_least(kind: type[OptCMDP]) -> None:
    """g = +0.5 everywhere: the least violation of an episode is 0.5 L, found as soon as the widths allow."""
    cmdp = tc.random_cmdp(WIDTHS, ACTIONS, 1, 0)
    costs = tc.Fixed(0.5 * cmdp.layout.pair_mask().to(torch.float64).unsqueeze(0))
    env = tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), costs, runs=2)
    scales = {} if kind is Greedy else {"bonus_scale": 0.001, "radius_scale": 0.001}
    learner = kind(cmdp.layout, 1, 400, runs=2, **scales)
    play(learner, env, 400)
    assert (learner.diagnostics()["Solver/infeasible"] == 1).all()
    assert learner.policy.isfinite().all()
    least = optimistic_optimum(*learner.program()).excess
    unvisited = bool(((learner.visits == 0) & cmdp.layout.pair_mask()).any())
    assert unvisited or torch.allclose(least, torch.full_like(least, 0.5 * cmdp.layout.layers), atol=0.05)


def test_optcmdp_learns_the_safe_optimum() -> None:
    env = simulator(runs=4, seed=5)
    optimum = tc.safe_optimum(env.cmdp).value
    learner = OptCMDP(env.cmdp.layout, M, 1500, runs=4, bonus_scale=0.2, radius_scale=0.2)
    play(learner, env, 1500)
    occupancy = tc.pair_occupancy_of(learner.policy, env.cmdp.transitions)
    assert (expected_value(env.cmdp.rewards, occupancy) > optimum - 0.15).all()
    assert (expected_value(env.cmdp.costs, occupancy.unsqueeze(1)) < 0.15).all()


def test_options_are_checked() -> None:
    layout = tc.Layout(WIDTHS, ACTIONS)
    with pytest.raises(tc.InvalidInput, match="radii is 'publised'; did you mean 'published'"):
        OptCMDP(layout, M, 10, radii="publised")
    with pytest.raises(tc.InvalidInput, match="solver is 'newton'.*'column_generation'"):
        Greedy(layout, M, 10, solver="newton")
