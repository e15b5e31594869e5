from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP, stack_cmdps
from torchcmdp.errors import InvalidInput
from torchcmdp.identity import fingerprint
from torchcmdp.instances import random_cmdp
from torchcmdp.planning import rho
from torchcmdp.processes import (
    Bernoulli,
    Cyclic,
    Fixed,
    OGDAdversary,
    Process,
    Recorder,
    Replay,
    Switching,
    safe_caps,
)
from torchcmdp.simulator import Simulator
from torchcmdp.testing import check_process

MakePolicy = Callable[..., Tensor]


@pytest.mark.parametrize("low", [0.0, -1.0, -0.5])
def test_bernoulli_takes_two_values_with_the_right_mean(low: float) -> None:
    means = torch.linspace(low, 1, 7, dtype=torch.float64)
    process = Bernoulli(means.view(7, 1, 1), low=low)
    n = 20_000
    uniforms = torch.rand(n, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = process.observe(means.expand(n, 7), uniforms)
    assert set(seen.unique().tolist()) == {low, 1.0}
    p = (means - low) / (1 - low)
    sigma = (1 - low) * (p * (1 - p) / n).sqrt()
    assert ((seen.mean(0) - means).abs() <= 5 * sigma).all()  # with equality at the ends, where nothing is random


def test_certain_outcomes_are_certain_at_both_ends_of_the_unit_interval() -> None:
    edge = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    for low in (0.0, -1.0, -0.3):
        process = Bernoulli(torch.zeros(1, 1, 1), low=low)
        assert (process.observe(torch.full((2,), 1.0, dtype=torch.float64), edge) == 1).all()
        assert (process.observe(torch.full((2,), low, dtype=torch.float64), edge) == low).all()


def test_fixed_shows_its_mean(cmdp: LayeredCMDP) -> None:
    process = Fixed(cmdp.costs)
    seen = torch.rand(4, 4, 2, dtype=torch.float64)
    assert torch.equal(process.observe(seen, torch.rand(4, 4, 2)), seen)
    assert torch.equal(process.values, cmdp.costs)


@pytest.mark.parametrize("process", [Bernoulli, Fixed])
def test_values_are_the_mean_and_advancing_changes_nothing(cmdp: LayeredCMDP, process: type[Bernoulli] | type[Fixed]) -> None:
    rewards = process(cmdp.rewards)
    rewards.advance(torch.zeros(2, *cmdp.layout.pair_shape))
    assert torch.equal(rewards.values, cmdp.rewards)
    assert (rewards.values[~cmdp.layout.pair_mask()] == 0).all()
    assert rewards.state_dict() == {}
    rewards.load_state_dict({})


def test_type_follows_the_mean() -> None:
    mean = torch.full((1, 1, 2), 0.5, dtype=torch.float32)
    seen = Bernoulli(mean, low=-1).observe(mean.view(1, 2), torch.rand(1, 2, dtype=torch.float64))
    assert seen.dtype == torch.float32


ONE = torch.full((1, 1, 1), 0.5, dtype=torch.float64)


def adversary(base: Tensor, **changed: object) -> OGDAdversary:
    return OGDAdversary(base, **{"sign": -1, "step": 1.0, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bernoulli(torch.full((1, 1, 1), -0.5)), r"-0.5 at index \[0, 0, 0\]; expected a value in \[0, 1\]"),
        (lambda: Bernoulli(torch.full((1, 1, 1), 1.5), low=-1), r"expected a value in \[-1, 1\]"),
        (lambda: Bernoulli(torch.full((1, 1, 1), torch.nan)), "mean of Bernoulli is nan"),
        (lambda: Fixed(torch.full((1, 1, 1), 2.0)), "mean of Fixed is 2"),
        (lambda: Fixed(torch.zeros(1, 1, 1, dtype=torch.int64)), "floating-point tensor"),
        (lambda: Fixed([0.5]), r"not \[0.5\]"),  # type: ignore[arg-type]
        (lambda: Fixed(torch.zeros(3, 2)), r"ends in \(L x S x A\)"),
        (lambda: Bernoulli(torch.zeros(1, 1, 1), low=0.5), "low is 0.5"),
        (lambda: Bernoulli(torch.zeros(1, 1, 1), low=-2), "low is -2"),
        (lambda: Fixed(torch.zeros(1, 1, 1)).load_state_dict({"values": 1}), "Fixed keeps no state, but was given values"),
        (lambda: adversary(ONE, sign=0), "sign is 0"),
        (lambda: adversary(ONE, step=-1), "step is -1"),
        (lambda: adversary(ONE, step=float("nan")), "step is nan"),
        (lambda: adversary(ONE, schedule="sqrt"), "schedule is 'sqrt'; did you mean 'sqrt_t'"),
        (lambda: adversary(ONE, schedule="sqrt_T"), "'sqrt_T' needs a horizon"),
        (lambda: adversary(ONE, horizon=5), "'sqrt_t' none"),
        (lambda: adversary(ONE, low=1), "low is 1"),
        (lambda: adversary(ONE, low=-1), r"shape \(1, 1, 1\); expected \(\[runs x\] m x L x S x A\)"),
        (lambda: adversary(ONE.expand(2, 2, 1, 1, 1)), r"expected \(\[runs x\] L x S x A\) for rewards"),
        (lambda: adversary(ONE, high=-0.5), r"high goes from -0.5 to -0.5; it must lie in \[0, 1\]"),
        (lambda: adversary(ONE, high=torch.ones(2)), "must broadcast"),
        (lambda: adversary(4 * ONE), "mean of OGDAdversary is 2"),
        (lambda: adversary(ONE).load_state_dict({}), "state of OGDAdversary has episode, values, but was given nothing"),
        (lambda: adversary(ONE).load_state_dict({"episode": 1, "values": ONE.expand(1, 2, 1)}), r"values of shape \(1, 2, 1\)"),
        (lambda: Switching([], []), "no blocks"),
        (lambda: Switching([ONE, ONE], [0]), "expected 1 increasing"),
        (lambda: Switching([ONE, ONE, ONE], [5, 5]), "expected 2 increasing"),
        (lambda: Switching([ONE], [5]), "expected 0 increasing"),
        (lambda: Switching([ONE, ONE.expand(2, 1, 1)], [5]), "Block 1 of Switching"),
        (lambda: Switching([ONE], [], noise="gauss"), "noise is 'gauss'"),
        (lambda: Switching([-ONE], [], noise="bernoulli"), "mean of Switching is -0.5"),
        (lambda: Cyclic([ONE], 0), "length is 0"),
        (lambda: Recorder(Fixed(ONE), 0), "episodes is 0"),
        (lambda: Replay(ONE), "after an axis of episodes"),
        (lambda: Replay(torch.zeros(0, 1, 1, 1)), "at least one episode"),
        (lambda: safe_caps(random_cmdp(), 1.5), "rho0 is 1.5"),
    ],
)
def test_refuses_with_a_sentence(make: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()  # type: ignore[operator]


def test_config_is_json_and_tells_processes_apart(cmdp: LayeredCMDP) -> None:
    configs = [
        p.config() for p in (Bernoulli(cmdp.rewards), Bernoulli(cmdp.rewards, -1), Bernoulli(cmdp.rewards / 2), Fixed(cmdp.rewards))
    ]
    assert len({json.dumps(config) for config in configs}) == 4
    assert configs[0] == Bernoulli(cmdp.rewards.clone()).config()
    assert Process().config() == {"name": "Process"}


def test_fingerprints_see_shape_type_and_contents() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert fingerprint(x) == fingerprint(x.clone()) == fingerprint(x.T.contiguous().T)
    assert len({fingerprint(t) for t in (x, x.view(3, 2), x.double(), x + 1, x.to("meta"))}) == 5


def play(process: Process, policies: list[Tensor]) -> list[Tensor]:
    """The values of every episode, the one after the last included."""
    values = [process.values]
    for policy in policies:
        process.advance(policy)
        values.append(process.values)
    return values


def policies_of(cmdp: LayeredCMDP, random_policy: MakePolicy, episodes: int, runs: int = 2) -> list[Tensor]:
    return [random_policy(cmdp.layout, runs, seed=t) for t in range(episodes)]


def kinds(cmdp: LayeredCMDP) -> Iterator[Process]:
    """A process of every kind that changes, for costs."""
    blocks = [cmdp.costs, -cmdp.costs, cmdp.costs / 2]
    yield OGDAdversary(cmdp.costs, sign=1, step=0.3, low=-1, high=safe_caps(cmdp, 0.1))
    yield OGDAdversary(cmdp.costs, sign=-1, step=0.3, low=-1, schedule="sqrt_T", horizon=9)
    yield Switching(blocks, [2, 5])
    yield Cyclic(blocks, 2, noise="bernoulli", low=-1)
    yield Recorder(OGDAdversary(cmdp.costs, sign=1, step=0.3, low=-1), 4)
    yield Recorder(Bernoulli(cmdp.costs, low=-1), 6)
    yield Replay(torch.stack(blocks * 4))


def test_the_adversary_follows_its_formula(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    policies = policies_of(cmdp, random_policy, 12)
    for schedule, horizon in (("sqrt_t", None), ("sqrt_T", 12)):
        seen = play(OGDAdversary(cmdp.rewards, sign=-1, step=0.7, schedule=schedule, horizon=horizon), policies)
        expected = cmdp.rewards.expand(2, -1, -1, -1)
        for t, policy in enumerate(policies, start=1):
            expected = (expected - 0.7 / (horizon or t) ** 0.5 * policy * cmdp.rewards).clamp(0, 1)
            torch.testing.assert_close(seen[t], expected, rtol=0, atol=1e-14)
    costs = play(OGDAdversary(cmdp.costs, sign=1, step=0.7, low=-1), policies[:1])[1]
    for j in range(2):
        for i in range(2):
            expected = (cmdp.costs[i] + 0.7 * policies[0][j] * cmdp.costs[i]).clamp(-1, 1)
            torch.testing.assert_close(costs[j, i], expected, rtol=0, atol=1e-14)


def test_the_capped_adversary_steps_along_its_uncut_base(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    policies, caps = policies_of(cmdp, random_policy, 12), safe_caps(cmdp, 0.2)
    assert ((cmdp.costs > 0) & (caps < 0)).any()  # a cost that wants to rise where it may not
    seen = play(OGDAdversary(cmdp.costs, sign=1, step=0.7, low=-1, high=caps), policies)
    expected = torch.minimum(cmdp.costs, caps).expand(2, -1, -1, -1, -1)
    for t, policy in enumerate(policies, start=1):
        moved = expected + 0.7 / t**0.5 * policy.unsqueeze(1) * cmdp.costs
        expected = torch.minimum(moved.clamp_min(-1), caps)
        torch.testing.assert_close(seen[t], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("sign", [-1, 1])
def test_every_coordinate_of_the_adversary_is_monotone_and_stays_in_its_range(
    cmdp: LayeredCMDP, random_policy: MakePolicy, sign: int
) -> None:
    policies = policies_of(cmdp, random_policy, 60)
    caps = safe_caps(cmdp, 0.2)
    rewards = torch.stack(play(OGDAdversary(cmdp.rewards, sign=sign, step=1.0), policies)[1:])
    costs = torch.stack(play(OGDAdversary(cmdp.costs, sign=sign, step=1.0, low=-1, high=caps), policies)[1:])
    assert (sign * rewards.diff(dim=0) >= 0).all() and (rewards >= 0).all() and (rewards <= 1).all()
    assert (sign * cmdp.costs.sign() * costs.diff(dim=0) >= 0).all() and (costs >= -1).all() and (costs <= caps).all()
    assert ((rewards[-1] == 0) | (rewards[-1] == 1)).any() and rewards.diff(dim=0).abs().max() > 0.01
    assert (rewards[:, :, ~cmdp.layout.pair_mask()] == 0).all() and (costs[..., ~cmdp.layout.pair_mask()] == 0).all()


def test_uniform_play_reaches_the_floor_soon() -> None:
    """Base 0.8 and three actions hit zero at t = 5 (1/sqrt t), and at t = 300 (1/sqrt T, T = 10^4)."""
    base = torch.full((1, 1, 3), 0.8, dtype=torch.float64)
    policy = torch.full((1, 1, 1, 3), 1 / 3, dtype=torch.float64)
    seen = play(OGDAdversary(base, sign=-1, step=1.0), [policy] * 5)
    assert (seen[3] > 0).all() and (seen[5] == 0).all()
    seen = play(OGDAdversary(base, sign=-1, step=1.0, schedule="sqrt_T", horizon=10_000), [policy] * 301)
    assert (seen[298] > 0).all() and (seen[301] == 0).all()


@pytest.mark.parametrize("sign", [-1, 1])
def test_caps_keep_rho_above_what_was_asked_for(random_policy: MakePolicy, sign: int) -> None:
    """For every sequence the adversary can make: here for its strongest, with huge steps along random policies."""
    cmdps = [random_cmdp((1, 3, 2, 4, 1), constraints=2, seed=seed, feasibility="any") for seed in range(5)]
    cmdp = stack_cmdps(cmdps)
    caps = safe_caps(cmdp, 0.3)
    assert caps.shape == cmdp.costs.shape and set(caps.unique().tolist()) == {-0.3, 0.0, 1.0}
    assert (caps[..., ~cmdp.layout.pair_mask()] == 0).all()
    process = OGDAdversary(cmdp.costs, sign=sign, step=50.0, low=-1, high=caps)
    worst = torch.stack(play(process, policies_of(cmdp, random_policy, 10, runs=5))).amax(0)
    assert (rho(cmdp, worst) >= 0.3).all()
    if sign == 1:
        open_process = OGDAdversary(cmdp.costs, sign=1, step=50.0, low=-1)
        assert (rho(cmdp, torch.stack(play(open_process, policies_of(cmdp, random_policy, 10, runs=5))).amax(0)) < 0.3).any()


def test_caps_follow_possible_successors_only() -> None:
    cmdp = random_cmdp((1, 2, 1), actions=2, constraints=1, seed=0, feasibility="any")
    transitions = cmdp.transitions.clone()
    transitions[0, 0, :, 0], transitions[0, 0, :, 1] = 1, 0
    caps = safe_caps(LayeredCMDP(cmdp.layout, transitions, cmdp.rewards, cmdp.costs), 0.5)
    assert (caps[0, 1, 0] == -0.5).sum() == 1 and (caps[0, 1, 1] == 1).all()


def test_switching_and_cyclic_change_when_they_say() -> None:
    blocks = [torch.full((1, 1, 1), float(j), dtype=torch.float64) / 4 for j in range(3)]
    nobody = [torch.ones(1, 1, 1, 1)] * 8
    assert [4 * v.item() for v in play(Switching(blocks, [2, 5]), nobody)] == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert [4 * v.item() for v in play(Cyclic(blocks, 2), nobody)] == [0, 0, 1, 1, 2, 2, 0, 0, 1]


def test_blocks_with_noise_are_bernoulli_and_without_are_not() -> None:
    mean = torch.full((1, 1, 2), -0.5, dtype=torch.float64)
    uniforms = torch.rand(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = mean.view(1, 2).expand(50, 2)
    noisy = Switching([mean], [], noise="bernoulli", low=-1)
    assert torch.equal(noisy.observe(values, uniforms), Bernoulli(mean, low=-1).observe(values, uniforms))
    assert torch.equal(Switching([mean], []).observe(values, uniforms), values)
    assert torch.equal(noisy.largest(mean), torch.ones_like(mean)) and torch.equal(Switching([mean], []).largest(mean), mean)
    assert torch.equal(Bernoulli(mean, low=-1).largest(-torch.ones_like(mean)), -torch.ones_like(mean))


def test_a_recorded_sequence_replays_what_was_played(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    """Record an adaptive process against one learner, and feed it to another: same values, in rewards and in costs."""

    def simulate(rewards: Process, costs: Process, seed: int) -> list[tuple[Tensor, Tensor]]:
        env, seen = Simulator(cmdp, rewards, costs, runs=2), []
        for t in range(6):
            env.rollout(random_policy(cmdp.layout, 2, seed=100 * seed + t))
            seen.append((env.reward_values.expand(2, -1, -1, -1), env.cost_values.expand(2, -1, -1, -1, -1)))
        return seen

    rewards = Recorder(OGDAdversary(cmdp.rewards, sign=-1, step=0.5), 6)
    costs = Recorder(OGDAdversary(cmdp.costs, sign=1, step=0.5, low=-1), 6)
    played = simulate(rewards, costs, seed=0)
    assert rewards.sequence.shape == (6, 2, *cmdp.layout.pair_shape)
    assert costs.sequence.shape == (6, 2, 2, *cmdp.layout.pair_shape)
    for one, two in zip(played, simulate(Replay(rewards.sequence), Replay(costs.sequence), seed=1), strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_a_replay_ends_with_a_sentence_and_not_before(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    policy = random_policy(cmdp.layout)
    env = Simulator(cmdp, Replay(cmdp.rewards.expand(3, -1, -1, -1)), Fixed(cmdp.costs))
    for _ in range(3):
        env.rollout(policy)
    twin = Simulator(cmdp, Replay(cmdp.rewards.expand(3, -1, -1, -1)), Fixed(cmdp.costs))
    twin.load_state_dict(env.state_dict())  # a finished run can be loaded
    for each in (env, twin):
        with pytest.raises(InvalidInput, match="has played all of its 3 episodes"):
            each.rollout(policy)


def test_recording_stops_after_as_many_episodes_as_asked(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    recorder = Recorder(Fixed(cmdp.rewards), 2)
    assert recorder.sequence.shape == (0, *cmdp.layout.pair_shape) and recorder.stationary
    play(recorder, policies_of(cmdp, random_policy, 5))
    assert torch.equal(recorder.sequence, cmdp.rewards.expand(2, -1, -1, -1))


@pytest.mark.parametrize("kind", range(9))
def test_the_contract_of_a_process(kind: int) -> None:
    def make(cmdp: LayeredCMDP, runs: int) -> Process:
        return [*kinds(cmdp), Fixed(cmdp.costs), Bernoulli(cmdp.costs, low=-1)][kind]

    check_process(make, "costs")


def test_the_contract_of_rewards() -> None:
    check_process(lambda cmdp, runs: Bernoulli(cmdp.rewards), "rewards")
    check_process(lambda cmdp, runs: OGDAdversary(cmdp.rewards, sign=-1, step=0.5), "rewards")


def test_a_recording_continues_from_its_state(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    policies = policies_of(cmdp, random_policy, 8)
    straight, before, resumed = (Recorder(OGDAdversary(cmdp.costs, sign=1, step=0.3, low=-1), 4) for _ in range(3))
    play(straight, policies)
    play(before, policies[:3])
    resumed.load_state_dict(before.state_dict())
    play(resumed, policies[3:])
    assert len(resumed.sequence) == 4 and torch.equal(straight.sequence, resumed.sequence)


def test_every_kind_is_its_own_configuration_and_says_whether_it_changes(cmdp: LayeredCMDP) -> None:
    processes = [*kinds(cmdp), Fixed(cmdp.costs), Bernoulli(cmdp.costs, low=-1)]
    assert len({json.dumps(process.config()) for process in processes}) == len(processes)
    assert [process.stationary for process in processes] == [False] * 5 + [True, False, True, True]


def test_every_setting_is_in_the_configuration() -> None:
    mean = torch.full((1, 1, 2, 2), 0.1, dtype=torch.float64)
    half = mean / 2
    differing = [
        [Fixed(mean), Fixed(half)],
        [Bernoulli(mean), Bernoulli(half), Bernoulli(mean, low=-1)],
        [
            Switching([mean, half], [2]),
            Switching([half, mean], [2]),
            Switching([mean, half], [3]),
            Switching([mean, half], [2], noise="bernoulli"),
            Switching([mean, half], [2], low=-1),
        ],
        [Cyclic([mean, half], 2), Cyclic([mean, half], 3), Cyclic([mean, mean], 2)],
        [Recorder(Fixed(mean), 2), Recorder(Fixed(mean), 3), Recorder(Fixed(half), 2)],
        [Replay(mean.expand(2, *mean.shape)), Replay(half.expand(2, *mean.shape))],
        [
            OGDAdversary(mean, sign=1, step=0.5, low=-1),
            OGDAdversary(half, sign=1, step=0.5, low=-1),
            OGDAdversary(mean, sign=-1, step=0.5, low=-1),
            OGDAdversary(mean, sign=1, step=0.6, low=-1),
            OGDAdversary(mean, sign=1, step=0.5, low=-0.5),
            OGDAdversary(mean, sign=1, step=0.5, low=-1, high=0.5),
            OGDAdversary(mean, sign=1, step=0.5, low=-1, schedule="sqrt_T", horizon=9),
            OGDAdversary(mean, sign=1, step=0.5, low=-1, schedule="sqrt_T", horizon=8),
        ],
    ]
    for processes in differing:
        assert len({json.dumps(process.config()) for process in processes}) == len(processes), processes[0]
