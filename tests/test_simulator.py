from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from helpers import simulator
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP, stack_cmdps
from torchcmdp.errors import InvalidInput
from torchcmdp.instances import random_cmdp
from torchcmdp.occupancy import occupancy_of, uniform_policy
from torchcmdp.processes import Bernoulli, Fixed, Process, Recorder
from torchcmdp.sampling import draw, thresholds
from torchcmdp.simulator import Simulator
from torchcmdp.streams import RunStreams
from torchcmdp.testing import check_environment
from torchcmdp.trajectory import Trajectory

MakePolicy = Callable[..., Tensor]


def fields(trajectory: Trajectory) -> dict[str, Tensor]:
    return {field.name: getattr(trajectory, field.name) for field in dataclasses.fields(trajectory)}


def assert_same(first: Trajectory, second: Trajectory) -> None:
    for name, tensor in fields(first).items():
        assert torch.equal(tensor, getattr(second, name)), name


def runs_of(trajectory: Trajectory, runs: slice) -> Trajectory:
    return Trajectory(**{name: tensor[runs] for name, tensor in fields(trajectory).items()})


class Drifting(Process):
    """Values that fall where the last policy played: an adaptive adversary in small."""

    def __init__(self, mean: Tensor, runs: int) -> None:
        self._values = mean.expand(runs, *mean.shape)

    @property
    def values(self) -> Tensor:
        return self._values

    def advance(self, policy: Tensor) -> None:
        policy = policy.reshape(-1, *(1,) * (self._values.dim() - 4), *policy.shape[1:])  # costs have an axis of constraints
        self._values = self._values * (1 - 0.1 * policy)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self._values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = state["values"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_contract_of_an_environment(cmdp: LayeredCMDP, dtype: torch.dtype) -> None:
    own, away = cmdp.to(dtype=dtype), cmdp.to("meta")
    check_environment(lambda runs: simulator(own, runs), meta=lambda runs: simulator(away, runs))
    check_environment(lambda runs: Simulator(own, Drifting(own.rewards, runs), Fixed(own.costs), runs=runs, seed=8))


def test_visits_match_the_exact_occupancy_within_five_sigma(random_policy: MakePolicy) -> None:
    """20,000 episodes, with per-run CMDPs, against q(x,a,y) entry by entry."""
    cmdps = [random_cmdp((1, 3, 2, 4, 1), seed=s) for s in range(2)]
    runs, episodes = 2000, 10
    cmdp = stack_cmdps([cmdps[j % 2] for j in range(runs)])
    policies = random_policy(cmdp.layout, 2)
    env = simulator(cmdp, runs=runs, seed=1)
    counts = torch.zeros(2, *cmdp.layout.transition_shape, dtype=torch.float64)
    member, layers = (torch.arange(runs) % 2)[:, None].expand(runs, 4), torch.arange(4).expand(runs, 4)
    for _ in range(episodes):
        t = env.rollout(policies.repeat(runs // 2, 1, 1, 1))
        counts.index_put_(
            (member, layers, t.states, t.actions, t.next_states), torch.ones((), dtype=torch.float64), accumulate=True
        )
    n = episodes * runs / 2
    for j in range(2):
        q = occupancy_of(policies[j], cmdps[j].transitions)
        assert ((counts[j] / n - q).abs() <= 5 * (q * (1 - q) / n).sqrt() + 1e-12).all()


def test_feedback_comes_from_the_visited_pairs(cmdp: LayeredCMDP) -> None:
    """With fixed feedback the trajectory shows exactly the means; with runs of their own, exactly the run's own."""
    scale = torch.linspace(0.1, 1, 6, dtype=torch.float64)
    own = cmdp.costs * scale.view(-1, 1, 1, 1, 1)
    t = Simulator(cmdp, Fixed(cmdp.rewards), Fixed(own), runs=6).rollout(uniform_policy(cmdp.layout))
    for j in range(6):
        for k in range(4):
            x, a = t.states[j, k], t.actions[j, k]
            assert t.rewards[j, k] == cmdp.rewards[k, x, a]
            assert torch.equal(t.costs[j, k], own[j, :, k, x, a])


def test_bernoulli_feedback_has_the_mean_of_the_visited_pair(cmdp: LayeredCMDP) -> None:
    """Sum of (observed - mean), which has mean zero: within five of its standard deviations for rewards and for each cost."""
    env = simulator(cmdp, runs=4000, seed=2)
    t = env.rollout(uniform_policy(cmdp.layout))
    layers = torch.arange(4)
    r, g = cmdp.rewards[layers, t.states, t.actions], cmdp.costs[:, layers, t.states, t.actions].movedim(0, -1)
    assert (t.rewards - r).sum().abs() < 5 * (r * (1 - r)).sum().sqrt()
    assert ((t.costs - g).sum((0, 1)).abs() < 5 * (1 - g.square()).sum((0, 1)).sqrt()).all()
    assert set(t.costs.unique().tolist()) == {-1.0, 1.0}


def test_every_draw_has_a_number_of_its_own(cmdp: LayeredCMDP) -> None:
    """Feedback uses the columns of its purpose, so it is independent of the path and of the other feedback."""
    env = simulator(cmdp, runs=50, seed=6)
    t = env.rollout(uniform_policy(cmdp.layout))
    u = RunStreams(6, 50).uniform(0, constraints=2, layers=4)
    layers = torch.arange(4)
    assert torch.equal(t.rewards, (u[..., 2] < cmdp.rewards[layers, t.states, t.actions]).double())
    for i in range(2):
        assert torch.equal(t.costs[..., i], 2 * (u[..., 3 + i] < (1 + cmdp.costs[i, layers, t.states, t.actions]) / 2).double() - 1)


@pytest.mark.parametrize("batched", [False, True])
def test_a_run_does_not_depend_on_its_batch(cmdp: LayeredCMDP, random_policy: MakePolicy, batched: bool) -> None:
    cmdps = [random_cmdp(cmdp.layout.widths, seed=j) if batched else cmdp for j in range(16)]
    policy = random_policy(cmdp.layout, 16)
    together = simulator(stack_cmdps(cmdps) if batched else cmdp, runs=16, seed=4)
    alone = [simulator(cmdps[j], runs=1, seed=4, first_run=j) for j in range(16)]
    half = simulator(stack_cmdps(cmdps[5:13]) if batched else cmdp, runs=8, seed=4, first_run=5)
    for _ in range(20):
        whole = together.rollout(policy)
        assert_same(half.rollout(policy[5:13]), runs_of(whole, slice(5, 13)))
        for j in range(16):
            assert_same(alone[j].rollout(policy[j]), runs_of(whole, slice(j, j + 1)))


def test_same_seed_same_episodes_and_other_seed_others(cmdp: LayeredCMDP) -> None:
    policy = uniform_policy(cmdp.layout)
    first, again, other = (simulator(cmdp, runs=32, seed=seed) for seed in (1, 1, 2))
    for _ in range(3):
        assert_same(first.rollout(policy), again.rollout(policy))
    assert not torch.equal(again.rollout(policy).actions, other.rollout(policy).actions)
    assert not torch.equal(first.rollout(policy).actions, first.rollout(policy).actions)


def test_adding_a_constraint_leaves_the_episodes_alone(cmdp: LayeredCMDP) -> None:
    """Common random numbers: the same states, actions and rewards, and the same costs of the constraints that were there."""
    fewer = LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards, cmdp.costs[:1])
    policy = uniform_policy(cmdp.layout)
    a, b = simulator(cmdp, runs=9).rollout(policy), simulator(fewer, runs=9).rollout(policy)
    assert torch.equal(a.next_states, b.next_states) and torch.equal(a.rewards, b.rewards)
    assert torch.equal(a.costs[..., :1], b.costs)


def test_resuming_gives_the_same_episodes_and_values(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    policy = random_policy(cmdp.layout, 3)

    def make() -> Simulator:
        return Simulator(cmdp, Drifting(cmdp.rewards, 3), Bernoulli(cmdp.costs, low=-1), runs=3, seed=8)

    env, resumed = make(), make()
    for _ in range(7):
        env.rollout(policy)
    resumed.load_state_dict(env.state_dict())
    assert resumed.episode == 7
    for _ in range(5):
        assert_same(env.rollout(policy), resumed.rollout(policy))
        assert torch.equal(env.reward_values, resumed.reward_values)


def test_values_are_those_of_the_episode_just_played(cmdp: LayeredCMDP) -> None:
    """An adaptive process has moved on by the time `rollout` returns; the metrics still need what was played against."""
    policy = uniform_policy(cmdp.layout)
    env = Simulator(cmdp, Drifting(cmdp.rewards, 2), Drifting(cmdp.costs, 2), runs=2)
    assert torch.equal(env.reward_values, cmdp.rewards.expand(2, -1, -1, -1))
    for t in range(3):
        env.rollout(policy)
        shrunk = (1 - 0.1 * policy) ** t
        torch.testing.assert_close(env.reward_values, (cmdp.rewards * shrunk).expand(2, -1, -1, -1))
        torch.testing.assert_close(env.cost_values, (cmdp.costs * shrunk).expand(2, -1, -1, -1, -1))
        assert not torch.equal(env.rewards.values, env.reward_values)


@pytest.mark.parametrize("batched", [False, True])
def test_rollout_runs_on_the_meta_device(cmdp: LayeredCMDP, batched: bool) -> None:
    meta = (stack_cmdps([cmdp] * 3) if batched else cmdp).to("meta")
    env = simulator(meta, runs=3)
    trajectory = env.rollout(torch.zeros(3, *cmdp.layout.pair_shape, dtype=torch.float64, device="meta"))
    assert trajectory.states.shape == (3, 4) and trajectory.costs.shape == (3, 4, 2)
    assert all(tensor.device.type == "meta" for tensor in fields(trajectory).values())


def test_no_constraints_and_no_cost_process() -> None:
    cmdp = random_cmdp(constraints=0)
    trajectory = Simulator(cmdp, Bernoulli(cmdp.rewards), runs=3).rollout(uniform_policy(cmdp.layout))
    assert trajectory.costs.shape == (3, 4, 0)


def test_impossible_actions_and_successors_are_never_drawn(cmdp: LayeredCMDP) -> None:
    """Also where the possible entries lie between impossible ones."""
    policy = torch.zeros(cmdp.layout.pair_shape, dtype=torch.float64)
    policy[:, :, 1] = 1
    transitions = torch.zeros_like(cmdp.transitions)
    transitions[..., 0] = 1
    transitions[0] = 0
    transitions[0, :, :, 1] = 1
    transitions *= cmdp.layout.transition_mask()
    t = simulator(LayeredCMDP(cmdp.layout, transitions, cmdp.rewards, cmdp.costs), runs=500).rollout(policy)
    assert (t.actions == 1).all()
    assert (t.next_states == torch.tensor([1, 0, 0, 0])).all()


def test_drawing_at_the_edges_of_the_unit_interval() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(2000, 7, generator=generator, dtype=torch.float64) * (torch.rand(2000, 7, generator=generator) < 0.6)
    p = p[p.sum(-1) > 0] * torch.rand(1, generator=generator)
    possible = (p > 0).long()
    first, last = possible.argmax(-1), 6 - possible.flip(-1).argmax(-1)
    edges = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert torch.equal(draw(thresholds(p), edges[0]), first)
    assert torch.equal(draw(thresholds(p), edges[1]), last)
    steps = thresholds(p).diff(dim=-1, prepend=torch.zeros(len(p), 1, dtype=torch.float64))
    assert (steps[p == 0] == 0).all() and (thresholds(p)[:, -1] == 1).all()
    assert (draw(thresholds(torch.zeros(1, 7)), edges[1]) == 0).all()


def test_a_cumulated_sum_that_rounds_up_and_down_still_draws_possible_entries_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a parallel scan may: each partial sum with a rounding error of its own."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(500, 9, generator=generator, dtype=torch.float64) * (torch.rand(500, 9, generator=generator) < 0.5)
    p = p[p.sum(-1) > 0]
    exact = torch.Tensor.cumsum

    def rounded(self: Tensor, dim: int) -> Tensor:
        return exact(self, dim) * (1 + 1e-15 * torch.randn(self.shape, generator=generator, dtype=torch.float64))

    monkeypatch.setattr(torch.Tensor, "cumsum", rounded)
    drawn_from = thresholds(p)
    steps = drawn_from.diff(dim=-1, prepend=torch.zeros(len(p), 1, dtype=torch.float64))
    assert (steps >= 0).all() and (steps[p == 0] == 0).all() and (drawn_from[:, -1] == 1).all()


def test_gradients_do_not_leak_into_the_trajectory(cmdp: LayeredCMDP) -> None:
    env = Simulator(cmdp, Drifting(cmdp.rewards, 1), Fixed(cmdp.costs))
    env.rollout(uniform_policy(cmdp.layout).requires_grad_())
    assert not env.rollout(uniform_policy(cmdp.layout)).rewards.requires_grad


def test_layout_and_constraints_are_those_of_the_cmdp(cmdp: LayeredCMDP) -> None:
    env = Simulator(cmdp, Bernoulli(cmdp.rewards), Fixed(cmdp.costs))
    assert env.layout == cmdp.layout and env.constraints == 2


def test_config_is_json_and_tells_simulators_apart(cmdp: LayeredCMDP) -> None:
    envs = [simulator(cmdp), simulator(cmdp, seed=1), simulator(cmdp, runs=2), simulator(cmdp, first_run=1)]
    envs += [simulator(random_cmdp(cmdp.layout.widths, seed=9)), simulator(cmdp.to(dtype=torch.float32))]
    assert len({json.dumps(env.config()) for env in envs}) == len(envs)
    assert simulator(cmdp).config() == envs[0].config()
    assert json.loads(json.dumps(envs[0].config())) == envs[0].config()


def test_refuses_with_a_sentence(cmdp: LayeredCMDP) -> None:
    rewards, costs = Bernoulli(cmdp.rewards), Bernoulli(cmdp.costs, low=-1)
    with pytest.raises(InvalidInput, match="costs is missing, but the CMDP has 2 constraints"):
        Simulator(cmdp, rewards)
    with pytest.raises(InvalidInput, match=r"batch shape \(3,\); it must be a single one or one for each of the 2 runs"):
        Simulator(stack_cmdps([cmdp] * 3), rewards, costs, runs=2)
    with pytest.raises(InvalidInput, match="rewards has values of shape"):
        Simulator(cmdp, costs, costs)
    with pytest.raises(InvalidInput, match="costs has values of shape"):
        Simulator(cmdp, rewards, Bernoulli(cmdp.costs[:1], low=-1))
    with pytest.raises(InvalidInput, match="rewards has values on meta"):
        Simulator(cmdp, Bernoulli(cmdp.rewards.to("meta")), costs)
    with pytest.raises(InvalidInput, match="seed is -1"):
        Simulator(cmdp, rewards, costs, seed=-1)
    with pytest.raises(InvalidInput, match=r"policy has shape \(3, 4, 4, 3\); expected .* = \(2, 4, 4, 3\) or"):
        Simulator(cmdp, rewards, costs, runs=2).rollout(torch.zeros(3, *cmdp.layout.pair_shape))
    with pytest.raises(InvalidInput, match="of Simulator has episode, rewards, costs, but was given nothing"):
        Simulator(cmdp, rewards, costs).load_state_dict({})


@pytest.mark.parametrize(("name", "factor"), [("rewards", -1.0), ("rewards", 3.0), ("costs", 50.0), ("costs", float("nan"))])
def test_a_process_of_ones_own_that_leaves_the_range_gets_a_sentence(cmdp, name, factor) -> None:
    class Own(Process):
        @property
        def values(self) -> Tensor:
            return factor * getattr(cmdp, name)

    with pytest.raises(InvalidInput, match=f"{name} has values outside of"):
        Simulator(cmdp, **{"rewards": Bernoulli(cmdp.rewards), "costs": Bernoulli(cmdp.costs, low=-1), name: Own()})


class Rising(Process):
    """Half of the true costs at first, and more with every episode; or what is seen of them."""

    def __init__(self, mean: Tensor, seen: float = 1.0) -> None:
        self.mean, self.seen, self.episode = mean, seen, 0

    @property
    def values(self) -> Tensor:
        return self.mean.sign() * 0.4 * (1 + self.episode)

    def observe(self, values: Tensor, uniforms: Tensor) -> Tensor:
        return values * self.seen

    def advance(self, policy: Tensor) -> None:
        self.episode += 1


@pytest.mark.parametrize(("name", "values"), [("rewards", r"1\.2"), ("costs", r"-1\.2")])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_process_that_leaves_the_range_later_gets_a_sentence_and_no_episode(cmdp, name, values, recorded) -> None:
    own: Process = Rising(getattr(cmdp, name))
    own = Recorder(own, episodes=9) if recorded else own
    env = Simulator(cmdp, **{"rewards": Bernoulli(cmdp.rewards), "costs": Bernoulli(cmdp.costs, low=-1), name: own}, runs=2)
    policy = uniform_policy(cmdp.layout)
    env.rollout(policy), env.rollout(policy)
    with pytest.raises(InvalidInput, match=f"{name} has values outside of .*: Rising gives {values} in episode 2"):
        env.rollout(policy)
    assert env.episode == 2


def test_feedback_that_leaves_the_range_gets_a_sentence(cmdp) -> None:
    env = Simulator(cmdp, Rising(cmdp.rewards, seen=2.0), Bernoulli(cmdp.costs, low=-1))
    env.rollout(uniform_policy(cmdp.layout))
    with pytest.raises(InvalidInput, match=r"rewards has feedback outside of \[0, 1\], or a NaN: Rising gives 1.6 in episode 1"):
        env.rollout(uniform_policy(cmdp.layout))
