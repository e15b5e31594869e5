from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from helpers import adversarial, measure, simulator
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP, stack_cmdps
from torchcmdp.errors import InvalidInput
from torchcmdp.instances import random_cmdp, single_state_cmdp, two_path_cmdp
from torchcmdp.kernels.engine import using
from torchcmdp.metrics import Tracker, episode_regret, growth_exponent, mean_and_interval, worst_constraint
from torchcmdp.occupancy import expected_value, pair_occupancy_of, policy_of, uniform_policy
from torchcmdp.planning import safe_optimum
from torchcmdp.processes import Bernoulli, Process
from torchcmdp.simulator import Simulator

MakePolicy = Callable[..., Tensor]


class Scripted(Process):
    """The given values, one after the other."""

    def __init__(self, *script: Tensor) -> None:
        self._script = list(script)

    @property
    def values(self) -> Tensor:
        return self._script[0]

    def advance(self, policy: Tensor) -> None:
        self._script.append(self._script.pop(0))


def test_occupancies_sum_to_the_number_of_layers(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    q = pair_occupancy_of(random_policy(cmdp.layout, 5), cmdp.transitions)
    torch.testing.assert_close(q.sum(dim=(-1, -2, -3)), torch.full((5,), 4.0, dtype=torch.float64))


@pytest.mark.parametrize("how", ["auto", "torch"])
def test_sums_equal_their_definitions(how: str, random_policy: MakePolicy) -> None:
    """R_T = T OPT - sum <r, q_t>; V_T and its positive part from the occupancies themselves; all against an explicit loop."""
    runs, episodes = 3, 9
    cmdp = random_cmdp((1, 3, 2, 4, 1), 3, 2, seed=3, feasibility="binding", margin=0.9)
    env = simulator(cmdp, runs=runs)
    tracker = Tracker(env)
    reward, seen_reward = torch.zeros(2, runs, dtype=torch.float64)
    violation, positive, seen_cost = torch.zeros(3, runs, 2, dtype=torch.float64)
    unsafe = torch.zeros(runs, dtype=torch.float64)
    for t in range(episodes):
        policy = random_policy(cmdp.layout, runs, seed=t)
        trajectory = env.rollout(policy)
        with using(how):
            tracker.update(policy, trajectory)
        for j in range(runs):
            q = pair_occupancy_of(policy[j], cmdp.transitions)
            reward[j] += (q * cmdp.rewards).sum()
            unsafe[j] += any(float((q * cost).sum()) > 0 for cost in cmdp.costs)
            for i in range(2):
                cost = (q * cmdp.costs[i]).sum()
                violation[j, i] += cost
                positive[j, i] += max(cost.item(), 0)
            seen_reward[j] += trajectory.rewards[j].sum()
            seen_cost[j] += trajectory.costs[j].sum(0)
    tracker.record(episodes)
    optimum = safe_optimum(cmdp).value
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-9)
    close(tracker.regret[:, 0], episodes * optimum - reward)
    close(tracker.reward[:, 0], reward)
    close(tracker.comparator_reward[:, 0], (episodes * optimum).expand(runs))
    close(tracker.violation_by_constraint[:, 0], violation)
    close(tracker.positive_violation_by_constraint[:, 0], positive)
    close(tracker.violation[:, 0], violation.max(1).values)
    close(tracker.positive_violation[:, 0], positive.max(1).values)
    close(tracker.realised_reward[:, 0], seen_reward)
    close(tracker.realised_cost[:, 0], seen_cost)
    assert 0 < unsafe.sum() < runs * episodes  # the test means something
    close(tracker.unsafe_share[:, 0], unsafe / episodes)


def test_bounds_and_order_hold_at_every_point(random_policy: MakePolicy) -> None:
    """|V_t| <= L t, V_t <= positive V_t for constant costs, and the positive violation never falls."""
    cmdp = stack_cmdps([random_cmdp((1, 3, 2, 1), seed=s) for s in range(6)])
    env = simulator(cmdp, runs=6)
    tracker = Tracker(env)
    for t in range(1, 11):
        policy = random_policy(cmdp.layout, 6, seed=t)
        env.rollout(policy)
        tracker.update(policy)
        tracker.record()
    assert tracker.episodes.tolist() == list(range(1, 11))
    assert (tracker.violation.abs() <= 3 * tracker.episodes).all()
    assert (tracker.violation <= tracker.positive_violation).all()
    assert (tracker.positive_violation.diff(dim=1) >= 0).all()


def test_the_safe_optimum_has_no_regret_and_no_violation() -> None:
    cmdp = two_path_cmdp()
    env = simulator(cmdp)
    tracker = Tracker(env)
    for _ in range(3):
        policy = policy_of(safe_optimum(cmdp).occupancy, cmdp.layout)
        env.rollout(policy)
        tracker.update(policy)
    tracker.record()
    assert tracker.regret.item() == pytest.approx(0, abs=1e-12)
    assert tracker.violation.item() == pytest.approx(0, abs=1e-9)
    assert tracker.reward.item() == pytest.approx(3 * 0.4)


def test_changing_values_count_in_their_own_episode_and_positive_parts_do_not_cancel(cmdp: LayeredCMDP) -> None:
    ones = cmdp.layout.pair_mask().to(cmdp.dtype)
    costs = ones.expand(2, -1, -1, -1) / 2
    env = Simulator(cmdp, Scripted(ones, 0 * ones, ones / 2), Scripted(costs, -costs, -costs / 2))
    tracker = Tracker(env)
    for _ in range(3):
        env.rollout(uniform_policy(cmdp.layout))
        tracker.update(uniform_policy(cmdp.layout))
        tracker.record()
    assert tracker.reward[0].tolist() == pytest.approx([4, 4, 6])
    assert tracker.violation[0].tolist() == pytest.approx([2, 0, -1])
    assert tracker.positive_violation[0].tolist() == pytest.approx([2, 2, 2])
    assert tracker.regret[0].tolist() == pytest.approx([0, 0, 0], abs=1e-12)  # every policy earns the same


def test_points_are_means_since_the_previous_one(cmdp: LayeredCMDP) -> None:
    env = simulator(cmdp)
    tracker = Tracker(env)
    policies = [uniform_policy(cmdp.layout), policy_of(safe_optimum(cmdp).occupancy, cmdp.layout)]
    for policy, repeats in zip(policies, (3, 5), strict=True):
        for _ in range(repeats):
            env.rollout(policy)
            tracker.update(policy)
        tracker.record()
    q = torch.stack([pair_occupancy_of(policy, cmdp.transitions) for policy in policies])
    torch.testing.assert_close(tracker.episode_return[0], expected_value(cmdp.rewards, q))
    torch.testing.assert_close(tracker.episode_cost[0], expected_value(cmdp.costs, q.unsqueeze(1)))


def test_an_infeasible_run_has_no_regret_and_leaves_the_others_alone() -> None:
    bad, good = single_state_cmdp([0.1, 0.9], [[0.5, 0.2]]), single_state_cmdp([0.1, 0.9], [[-0.5, 0.5]])
    env = simulator(stack_cmdps([bad, good]), runs=2)
    tracker = Tracker(env)
    env.rollout(uniform_policy(bad.layout))
    tracker.update(uniform_policy(bad.layout))
    tracker.record()
    assert tracker.feasible.tolist() == [False, True]
    assert tracker.regret[0].isnan().all() and tracker.regret[1].item() == pytest.approx(0, abs=1e-12)
    assert tracker.violation.flatten().tolist() == pytest.approx([0.35, 0.0])


def test_without_constraints_the_violation_is_zero() -> None:
    cmdp = random_cmdp(constraints=0)
    env = Simulator(cmdp, Bernoulli(cmdp.rewards), runs=2)
    tracker = Tracker(env)
    trajectory = env.rollout(uniform_policy(cmdp.layout))
    tracker.update(uniform_policy(cmdp.layout), trajectory)
    tracker.record()
    assert torch.equal(tracker.violation, torch.zeros(2, 1, dtype=torch.float64))
    assert torch.equal(tracker.positive_violation, torch.zeros(2, 1, dtype=torch.float64))
    assert tracker.episode_cost.shape == (2, 1, 0)


def test_resuming_is_bit_exact(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    """Across many points, more than there was room for, and through tensors alone."""

    def step(env: Simulator, tracker: Tracker, t: int) -> None:
        policy = random_policy(cmdp.layout, 2, seed=t)
        tracker.update(policy, env.rollout(policy))
        tracker.record(t)

    env, other_env = simulator(cmdp, runs=2), simulator(cmdp, runs=2)
    straight, resumed = Tracker(env), Tracker(other_env)
    for t in range(1, 21):
        step(env, straight, t)
    state = straight.state_dict()
    assert all(isinstance(value, Tensor) for value in state.values())
    other_env.load_state_dict(env.state_dict())
    resumed.load_state_dict(state)
    for t in range(21, 41):
        step(env, straight, t)
        step(other_env, resumed, t)
    assert straight.regret.shape == (2, 40) and straight.updates == resumed.updates == 40
    names = (
        "regret",
        "violation",
        "positive_violation",
        "episode_return",
        "episode_cost",
        "realised_reward",
        "realised_cost",
        "unsafe_share",
        "episodes",
    )
    for name in names:
        assert torch.equal(getattr(straight, name), getattr(resumed, name)), name
    assert len(state["points"]) == 20


def test_the_newest_point_is_the_last_and_looks_at_no_other(
    cmdp: LayeredCMDP, random_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, stack = random_cmdp((1, 3, 2, 1), constraints=0), torch.stack
    seen: list[int] = []
    monkeypatch.setattr(torch, "stack", lambda points, *dim, **named: seen.append(len(points)) or stack(points, *dim, **named))
    for env in (simulator(cmdp, runs=2), adversarial(cmdp, 2), adversarial(cmdp, 1), Simulator(free, Bernoulli(free.rewards))):
        for points in ([3], list(range(1, 41))):
            tracker = measure(env, random_policy, [env.episode + t for t in points])
            curves = tracker.curves()
            seen.clear()
            newest = tracker.newest()
            assert newest.keys() == curves.keys() and max(seen) <= 2  # the last, and the one before it
            for name, curve in curves.items():
                assert torch.equal(newest[name], curve if name in ("rho", "alpha") else curve[:, -1]), name
            assert len(tracker.curves()["regret"].T) == len(points)


def test_float32_sums_are_kept_in_float64(cmdp: LayeredCMDP) -> None:
    env = simulator(cmdp.to(dtype=torch.float32))
    tracker = Tracker(env)
    policy = uniform_policy(cmdp.layout, dtype=torch.float32)
    tracker.update(policy, env.rollout(policy))
    tracker.record()
    assert tracker.regret.dtype == torch.float64
    double = Tracker(simulator(cmdp))
    double.update(uniform_policy(cmdp.layout))
    double.record()
    torch.testing.assert_close(tracker.regret, double.regret, rtol=0, atol=1e-5)


def test_updates_run_on_the_meta_device(cmdp: LayeredCMDP) -> None:
    env = simulator(cmdp.to("meta"), runs=3)
    tracker = Tracker(env)
    policy = torch.zeros(3, *cmdp.layout.pair_shape, dtype=torch.float64, device="meta")
    tracker.update(policy, env.rollout(policy))
    tracker.record(1)
    assert tracker.regret.shape == (3, 1) and tracker.regret.device.type == "meta"


def test_refuses_with_a_sentence(cmdp: LayeredCMDP) -> None:
    tracker = Tracker(simulator(cmdp))
    tracker.record(5)
    with pytest.raises(InvalidInput, match="episode 5 cannot follow one at episode 5"):
        tracker.record(5)
    with pytest.raises(InvalidInput, match="nothing for safe"):
        tracker.load_state_dict({})
    with pytest.raises(InvalidInput, match=r"for feasible; expected a tensor of shape \(1,\)"):
        tracker.load_state_dict(Tracker(simulator(cmdp, runs=2)).state_dict())
    with pytest.raises(InvalidInput, match="level is 1"):
        mean_and_interval(torch.zeros(3), level=1)


def test_formulas_on_numbers() -> None:
    values, q = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[0.25, 0.75]]])
    assert expected_value(values, q) == 1.75
    assert episode_regret(values, torch.tensor([[[0.0, 1.0]]]), q) == 0.25
    assert worst_constraint(torch.tensor([[-1.0, -3.0], [2.0, 5.0]])).tolist() == [-1.0, 5.0]
    assert worst_constraint(torch.zeros(3, 4, 0)).tolist() == [[0.0] * 4] * 3


@pytest.mark.filterwarnings("error")
def test_interval_is_students_t() -> None:
    """Ten runs: 2.262 standard errors; two runs: 12.706."""
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, half = mean_and_interval(x)
    torch.testing.assert_close(mean, x.sum(0) / 10)
    error = ((x - mean).square().sum(0) / 9).sqrt() / 10**0.5
    torch.testing.assert_close(half / error, torch.full((3,), 2.2622, dtype=torch.float64), rtol=1e-4, atol=0)
    assert mean_and_interval(torch.tensor([0.0, 2.0]))[1].item() == pytest.approx(12.7062, rel=1e-4)
    mean, half = mean_and_interval(x[:1])
    assert torch.equal(mean, x[0]) and half.isnan().all()


def test_interval_covers_as_often_as_it_says() -> None:
    x = torch.randn(5, 4000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean, half = mean_and_interval(x, level=0.8)
    covered = (mean.abs() <= half).double().mean().item()
    assert covered == pytest.approx(0.8, abs=5 * (0.16 / 4000) ** 0.5)


def test_growth_exponents_of_power_laws() -> None:
    t = torch.arange(1, 201)
    curves = torch.stack([c * t.double() ** 0.5 for c in (1.0, 3.0, 40.0)])
    slope, half = growth_exponent(t, curves)
    assert slope.item() == pytest.approx(0.5) and half.item() == pytest.approx(0, abs=1e-9)
    broken = torch.where(t <= 100, curves, t.double())  # only the last half counts
    assert growth_exponent(t, broken)[0].item() == pytest.approx(1.0)


def test_growth_exponents_use_positive_points_and_have_an_interval() -> None:
    t = torch.arange(10, 101, 10)
    noise = torch.rand(4, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    curves = t * (0.5 + noise)
    curves[1, 7] = -2
    slopes = []
    for curve in curves[:, 5:].numpy():
        used = curve > 0
        slopes.append(np.polyfit(np.log(t[5:].numpy()[used]), np.log(curve[used]), 1)[0])
    mean, half = mean_and_interval(torch.tensor(np.array(slopes)))
    found = growth_exponent(t, curves)
    torch.testing.assert_close(torch.stack(found), torch.stack((mean, half)))
    for bad in (-1.0, torch.nan):
        curves[2, 6:] = bad  # one positive point has no slope
        assert growth_exponent(t, curves)[0].isnan()
    assert growth_exponent(t[:1], curves[:, :1])[0].isnan()


def test_a_policy_on_the_boundary_is_not_unsafe() -> None:
    """The best safe policies spend their budgets to the last digit, and what rounding makes of that is no violation."""
    cmdp = stack_cmdps([random_cmdp((1, 3, 3, 1), seed=seed, feasibility="binding") for seed in range(20)])
    best = safe_optimum(cmdp).occupancy
    spent = expected_value(cmdp.costs, best.sum(-1).unsqueeze(-4)).amax(-1)
    assert (spent > 0).any() and (spent.abs() < 1e-9).sum() > 10  # the test means something
    for kind in ("torch", "compiled"):
        tracker = Tracker(simulator(cmdp, runs=20))
        with using(kind):
            tracker.update(policy_of(best, cmdp.layout))
        tracker.record(1)
        assert not tracker.unsafe_share.any()
