"""What policies are compared with where rewards or costs change: hindsight, rho, alpha, and the memory that takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import adversarial, measure, simulator
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP, stack_cmdps
from torchcmdp.errors import InvalidInput
from torchcmdp.instances import random_cmdp
from torchcmdp.metrics import Tracker
from torchcmdp.occupancy import expected_value, pair_occupancy_of
from torchcmdp.planning import alpha_of, rho, safe_optimum, unconstrained_optimum
from torchcmdp.processes import Bernoulli, Fixed, OGDAdversary, Switching
from torchcmdp.simulator import Simulator

MakePolicy = Callable[..., Tensor]


def test_comparators_in_hindsight_equal_their_definitions(random_policy: MakePolicy) -> None:
    """Every regret of an adversarial run against the whole history, run by run, at points that are not equally far apart."""
    cmdp = stack_cmdps([random_cmdp((1, 3, 2, 1), seed=s) for s in range(3)])
    points, env = [3, 4, 11], adversarial(cmdp, 3)
    tracker, history = Tracker(env), []
    for t in range(1, 12):
        policy = random_policy(cmdp.layout, 3, seed=t)
        tracker.update(policy, env.rollout(policy))
        q = pair_occupancy_of(policy, cmdp.transitions)
        history.append((env.reward_values.clone(), env.cost_values.clone(), q))
        if t in points:
            tracker.record(t)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-9)
    rewards, costs, played = (torch.stack(tensors) for tensors in zip(*history, strict=True))
    for j in range(3):
        one, r, g = cmdp[j], rewards[:, j], costs[:, j]
        earned = expected_value(r, played[:, j]).cumsum(0)
        q_star = safe_optimum(one, r.mean(0), g.mean(0)).occupancy.sum(-1)
        q_best = unconstrained_optimum(one, r.mean(0)).occupancy.sum(-1)
        room = rho(one, g.amax(0))
        assert room >= 0.1
        close(tracker.rho[j], room)
        close(tracker.alpha[j], room / (1 + room))
        for p, t in enumerate(points):
            close(tracker.comparator_reward[j, p], expected_value(r[:t], q_star).sum())
            close(tracker.regret[j, p], expected_value(r[:t], q_star).sum() - earned[t - 1])
            close(tracker.anytime_regret[j, p], t * safe_optimum(one, r[:t].mean(0), g[:t].mean(0)).value - earned[t - 1])
            close(tracker.alpha_regret[j, p], room / (1 + room) * expected_value(r[:t], q_best).sum() - earned[t - 1])
            close(tracker.violation_by_constraint[j, p], expected_value(g[:t], played[:t, j].unsqueeze(1)).sum(0))
        close(tracker.regret[j, -1], 11 * safe_optimum(one, r.mean(0), g.mean(0)).value - earned[-1])
    close(tracker.regret[:, -1], tracker.anytime_regret[:, -1])
    assert tracker.feasible.tolist() == [True] * 3 and torch.equal(tracker.alpha, alpha_of(tracker.rho))


def test_hindsight_of_a_constant_sequence_is_the_foresight_of_its_mean(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    fixed = Simulator(cmdp, Fixed(cmdp.rewards), Fixed(cmdp.costs), runs=2)
    changing = Simulator(cmdp, Switching([cmdp.rewards] * 2, [3]), Switching([cmdp.costs] * 2, [3]), runs=2)
    one, two = (measure(env, random_policy, [2, 6, 8]) for env in (fixed, changing))
    names = ("regret", "anytime_regret", "alpha_regret", "comparator_reward", "best_reward", "violation", "rho", "alpha")
    for name in names:
        torch.testing.assert_close(getattr(one, name), getattr(two, name), rtol=0, atol=1e-9, msg=name)
    assert torch.equal(one.regret, one.anytime_regret)


def test_a_stationary_cost_process_counts_with_its_mean_beside_adversarial_rewards(
    cmdp: LayeredCMDP, random_policy: MakePolicy
) -> None:
    env = Simulator(cmdp, OGDAdversary(cmdp.rewards, sign=-1, step=0.5), Bernoulli(cmdp.costs, low=-1))
    tracker, rewards = Tracker(env), []
    for t in range(5):
        policy = random_policy(cmdp.layout, 1, seed=t)
        tracker.update(policy, env.rollout(policy))
        rewards.append(env.reward_values.expand(1, *cmdp.layout.pair_shape)[0])
    tracker.record()
    optimum = safe_optimum(cmdp, torch.stack(rewards).mean(0))
    torch.testing.assert_close(tracker.comparator_reward[0, 0], 5 * optimum.value)
    assert tracker.rho.tolist() == [-1] and tracker.alpha.tolist() == [0]  # a cost of 1 can happen everywhere


def test_alpha_regret_of_fixed_means(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    safe = -0.25 * cmdp.layout.pair_mask().to(cmdp.dtype).expand_as(cmdp.costs)
    tracker = measure(Simulator(cmdp, Bernoulli(cmdp.rewards), Fixed(safe), runs=2), random_policy, [2, 5])
    assert tracker.rho.tolist() == [0.25] * 2 and tracker.alpha.tolist() == pytest.approx([0.2] * 2)
    best = unconstrained_optimum(cmdp).value * torch.tensor([2.0, 5.0])
    torch.testing.assert_close(tracker.alpha_regret, 0.2 * best - tracker.reward)
    free = random_cmdp(constraints=0)
    tracker = measure(Simulator(free, Bernoulli(free.rewards)), random_policy, [3])
    assert tracker.rho.tolist() == [torch.inf] and tracker.alpha.tolist() == [1]
    torch.testing.assert_close(tracker.alpha_regret, tracker.regret)


def test_without_constraints_an_adversary_of_rewards_has_its_alpha_regret_as_regret(random_policy: MakePolicy) -> None:
    cmdp = random_cmdp((1, 3, 2, 1), constraints=0)
    tracker = measure(Simulator(cmdp, OGDAdversary(cmdp.rewards, sign=-1, step=0.3), runs=2), random_policy, [4, 9])
    torch.testing.assert_close(tracker.alpha_regret, tracker.regret)
    assert (tracker.regret[:, -1] > 0).all() and tracker.rho.tolist() == [torch.inf] * 2


def test_costs_that_become_unsafe_leave_no_regret_but_an_alpha_regret(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    ones = cmdp.layout.pair_mask().to(cmdp.dtype).expand_as(cmdp.costs)
    env = Simulator(cmdp, Bernoulli(cmdp.rewards), Switching([-ones / 4, ones], [4]), runs=2)
    tracker = measure(env, random_policy, [4, 8])
    assert tracker.anytime_regret[:, 0].isfinite().all() and tracker.anytime_regret[:, 1].isnan().all()
    assert tracker.regret.isnan().all() and not tracker.feasible.any()
    assert torch.equal(tracker.comparator.isnan(), cmdp.layout.pair_mask().expand(2, -1, -1, -1))
    assert tracker.rho.tolist() == [-1, -1] and torch.equal(tracker.alpha_regret, -tracker.reward)


def test_memory_grows_with_points_and_not_with_episodes(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    def stored(points: list[int]) -> int:
        env = adversarial(cmdp, 2)
        tracker = measure(env, random_policy, points)
        alive = [value for part in (tracker, tracker.comparators) for value in vars(part).values() if isinstance(value, Tensor)]
        tensors = [*alive, *tracker.state_dict().values(), *env.state_dict()["costs"].values()]
        return sum(tensor.numel() for tensor in tensors if isinstance(tensor, Tensor))

    few = stored([4, 8, 12])
    assert stored([40, 80, 120]) == few
    assert stored([10 * j for j in range(1, 13)]) > few


def test_resuming_under_an_adversary_is_bit_exact(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    env, other_env = adversarial(cmdp, 2), adversarial(cmdp, 2)
    straight = measure(env, random_policy, [2, 5, 6])
    env.rollout(policy := random_policy(cmdp.layout, 2, seed=7))
    straight.update(policy)  # a state between two points: its comparators are those of the last
    resumed = Tracker(other_env)
    resumed.load_state_dict(straight.state_dict())
    other_env.load_state_dict(env.state_dict())
    names = ("regret", "anytime_regret", "alpha_regret", "comparator", "rho", "violation")
    for name in names:
        assert torch.equal(getattr(straight, name), getattr(resumed, name)), name
    measure(env, random_policy, [8, 12], straight)
    measure(other_env, random_policy, [8, 12], resumed)
    for name in names:
        assert torch.equal(getattr(straight, name), getattr(resumed, name)), name
    with pytest.raises(InvalidInput, match=r"for reward_points; expected a tensor of shape \(5, 2, 4, 4, 3\)"):
        resumed.load_state_dict({**straight.state_dict(), "reward_points": torch.zeros(4, 2, 4, 4, 3)})
    with pytest.raises(InvalidInput, match="nothing for best"):
        resumed.load_state_dict(Tracker(simulator(stack_cmdps([cmdp] * 2), runs=2)).state_dict())


def test_a_run_is_measured_alike_in_any_batch(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    def alone_or_not(runs: int) -> Tracker:
        def make(layout: object, count: int, seed: int) -> Tensor:
            return random_policy(cmdp.layout, 3, seed=seed)[:count]

        return measure(adversarial(cmdp, runs), make, [3, 8])

    three, one = alone_or_not(3), alone_or_not(1)
    for name in ("regret", "anytime_regret", "alpha_regret", "rho"):
        torch.testing.assert_close(getattr(three, name)[:1], getattr(one, name), rtol=0, atol=1e-12)


def test_adversarial_updates_run_on_the_meta_device_and_in_single_precision(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    env = adversarial(cmdp.to("meta"), 3)
    tracker = Tracker(env)
    policy = torch.zeros(3, *cmdp.layout.pair_shape, dtype=torch.float64, device="meta")
    for _ in range(2):
        tracker.update(policy, env.rollout(policy))
    tracker.record(2)
    assert tracker.regret.shape == tracker.alpha_regret.shape == (3, 1) and tracker.alpha_regret.device.type == "meta"
    make = partial(random_policy, dtype=torch.float32)
    single = measure(adversarial(cmdp.to(dtype=torch.float32), 2), make, [3, 6])
    double = measure(adversarial(cmdp, 2), random_policy, [3, 6])
    assert single.regret.dtype == single.alpha_regret.dtype == torch.float64
    torch.testing.assert_close(single.anytime_regret, double.anytime_regret, rtol=0, atol=1e-4)
