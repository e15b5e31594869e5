"""Gymnasium environments as what `run` plays in: the same numbers as the simulator's, resumable, and nothing known is assumed."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

import torchcmdp as tc
from torchcmdp.adapters.gymnasium import CMDPEnv, GymnasiumSimulator, Layered
from torchcmdp.adapters.tabular import fell_in_a_hole, from_gymnasium, told_cost
from torchcmdp.occupancy import expected_value
from torchcmdp.streams import REWARD
from torchcmdp.testing import check_environment

Z_999 = 3.2905  # 99.9% two-sided


def simulator(cmdp: tc.LayeredCMDP, **options) -> GymnasiumSimulator:
    feedback = {"rewards": tc.Bernoulli(cmdp.rewards), "costs": tc.Bernoulli(cmdp.costs, low=-1)}
    return GymnasiumSimulator(lambda: CMDPEnv(cmdp, **feedback), **options)


def frozen_lake(horizon: int = 6) -> Layered:
    return Layered(gym.make("FrozenLake-v1"), horizon, fell_in_a_hole, 0.2)


def test_episodes_have_the_cmdp_s_means(cmdp, random_policy):
    env, policy, episodes = simulator(cmdp, runs=8, seed=1), random_policy(cmdp.layout), 60
    played = [env.rollout(policy) for _ in range(episodes)]
    occupancy = tc.pair_occupancy_of(policy, cmdp.transitions)
    returns, costs = torch.cat([t.rewards.sum(1) for t in played]), torch.cat([t.costs.sum(1) for t in played])
    for samples, expected in ((returns, expected_value(cmdp.rewards, occupancy)), (costs, expected_value(cmdp.costs, occupancy))):
        assert ((samples.mean(0) - expected).abs() <= Z_999 * samples.std(0) / len(samples) ** 0.5).all()
    visits = torch.stack([(t.states[:, 2] == 0).double().mean() for t in played]).mean()
    assert abs(visits - occupancy[2, 0].sum()) <= Z_999 * 0.5 / (8 * episodes) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_contract_of_an_environment(cmdp, dtype):
    check_environment(lambda runs: simulator(cmdp, runs=runs, seed=5, dtype=dtype))


def test_runs_and_episodes_have_streams_of_their_own(cmdp, random_policy):
    policy = random_policy(cmdp.layout)
    env = simulator(cmdp, runs=2, seed=5)
    first, second = env.rollout(policy), env.rollout(policy)
    assert not torch.equal(first.costs, second.costs) and not torch.equal(first.costs[0], first.costs[1])


def test_wcops_learns_where_transitions_are_never_seen(tmp_path):
    env = GymnasiumSimulator(frozen_lake, runs=2, seed=0)
    learner = tc.WCOPS(env.layout, env.constraints, horizon=30, runs=2)
    result = tc.run(learner, env, episodes=30, logdir=tmp_path / "lake", log_every=10, progress=False)
    assert result.completed and result.regret.isnan().all() and result.rho.isnan().all()
    assert result.violation.isfinite().all() and (result.positive_violation >= result.violation).all()
    assert float(learner.visits.sum()) == 2 * 30 * env.layout.layers
    assert (tmp_path / "lake" / "metrics.csv").exists()


def test_a_resumed_run_is_the_uninterrupted_one(cmdp, tmp_path):
    def play(learner, episodes: int, logdir=None, **options):
        return tc.run(learner, simulator(cmdp, runs=2, seed=3), episodes, logdir, 2, progress=False, images=False, **options)

    class Interrupted(tc.WCOPS):
        def update(self, trajectory):
            super().update(trajectory)
            if int(self.episode) == 5:
                raise KeyboardInterrupt

        def config(self):
            return super().config()

    make = {"layout": cmdp.layout, "constraints": 2, "horizon": 8, "runs": 2}
    whole = play(tc.WCOPS(**make), 8)
    with pytest.raises(KeyboardInterrupt):
        play(Interrupted(**make), 8, tmp_path, checkpoint_every=0.0)
    resumed = play(tc.WCOPS(**make), 8, tmp_path)
    assert torch.equal(resumed.violation, whole.violation) and resumed.episodes.tolist() == whole.episodes.tolist()


def test_realised_sums(cmdp, random_policy):
    env, policy = simulator(cmdp, runs=3, seed=2), random_policy(cmdp.layout)
    tracker = env.tracker()
    played = []
    for _ in range(4):
        played.append(env.rollout(policy))
        tracker.update(policy, played[-1])
    tracker.record()
    costs = torch.stack([t.costs.sum(1) for t in played])
    assert torch.equal(tracker.violation_by_constraint[:, 0], costs.sum(0))
    assert torch.equal(tracker.positive_violation_by_constraint[:, 0], costs.clamp_min(0).sum(0))
    assert torch.equal(tracker.reward[:, 0], torch.stack([t.rewards.sum(1) for t in played]).sum(0))
    assert tracker.regret.isnan().all() and tracker.best_reward.isnan().all() and tracker.best_reward.shape == (3, 1)
    other = env.tracker()
    other.load_state_dict(tracker.state_dict())
    assert torch.equal(other.violation, tracker.violation) and other.best_reward.shape == (3, 1)


def test_layered_frozen_lake_is_the_imported_one():
    horizon = 6
    env = GymnasiumSimulator(lambda: frozen_lake(horizon), runs=400, seed=0)
    imported = from_gymnasium("FrozenLake-v1", horizon, fell_in_a_hole, 0.2)
    assert env.layout.widths == (1, *[17] * (horizon - 1), 1)
    policy = tc.uniform_policy(env.layout)
    costs = torch.cat([env.rollout(policy).costs.sum(1) for _ in range(5)])
    occupancy = tc.pair_occupancy_of(tc.uniform_policy(imported.cmdp.layout), imported.cmdp.transitions, imported.cmdp.layout)
    expected = expected_value(imported.cmdp.costs, occupancy)
    assert (costs.mean(0) - expected).abs() <= Z_999 * costs.std(0) / len(costs) ** 0.5


def test_layered_waits_at_the_end_in_the_environments_own_units():
    env = Layered(gym.make("FrozenLake-v1", is_slippery=False), 8, fell_in_a_hole, 0.4, rewards=(-1.0, 1.0))
    assert env.reset(seed=0)[0] == 0
    steps = [env.step(action) for action in (1, 2, 0, 0, 0, 0, 0, 0)]  # down, then right into a hole
    observations, rewards, terminated, truncated, infos = zip(*steps, strict=True)
    assert observations == (1 + 4, 1 + 17 + 16, *[1 + 17 * k + 16 for k in range(2, 7)], 1 + 17 * 7)
    assert rewards == (0.0,) * 8 and terminated == (False,) * 7 + (True,) and not any(truncated)
    assert [info["cost"] for info in infos] == [0.0, 1.0] + [0.0] * 6 and env.cost_limit == 0.4
    assert env.normal_form(0.0, infos[1]["costs"], 1) == (0.5, pytest.approx([0.95]))


class Pay(gym.Env):
    """Two steps in one state: action a earns 10 a - 5 and costs 7 a - 30."""

    observation_space, action_space = gym.spaces.Discrete(1), gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.left = 2
        return 0, {}

    def step(self, action):
        self.left -= 1
        return 0, 10.0 * action - 5, self.left == 0, False, {"cost": 7.0 * action - 30}


def test_layered_takes_costs_of_any_range_and_either_sense():
    """Five steps, of which three wait: what is played in normal form is shown in the environment's units."""
    ranges = {"rewards": (-5.0, 15.0), "costs": [(-30.0, -16.0), (16.0, 30.0)], "sense": ["<=", ">="]}
    env = GymnasiumSimulator(lambda: Layered(Pay(), 5, [told_cost, lambda move: -told_cost(move)], [-40.0, 45.0], **ranges))
    single = env.envs[0]
    assert single.cost_limits.tolist() == pytest.approx([-40.0, -45.0]) and single.cost_limit == 0
    policy = torch.nn.functional.one_hot(torch.full((5, env.layout.width), 2), 3).double()
    played = env.rollout(policy)
    assert played.costs.abs().max() <= 1 and played.rewards[0].tolist() == [1, 1, 0.25, 0.25, 0.25]
    assert env.units.episode_return(played.rewards.sum(1)).tolist() == pytest.approx([30.0])
    assert env.units.episode_costs(played.costs.sum(1))[0].tolist() == pytest.approx([-32.0, 32.0])
    assert env.units.violations(played.costs.sum(1))[0].tolist() == pytest.approx([8.0, 13.0])
    result = tc.run(tc.WCOPS.for_env(env, horizon=3), env, 3, progress=False)
    torch.testing.assert_close(
        result.violation_by_constraint, env.units.cost_scale * result.scaled.violation_by_constraint, rtol=1e-12, atol=0
    )


def test_a_budget_is_part_of_what_is_played(tmp_path):
    def play(budget: float):
        env = GymnasiumSimulator(lambda: Layered(Pay(), 3, told_cost, budget, rewards=(-5, 15), costs=(-30, -16)))
        return tc.run(tc.WCOPS.for_env(env, horizon=2), env, 2, tmp_path, progress=False, images=False)

    play(-40.0)
    with pytest.raises(tc.TorchCMDPError, match=r"units\.budget = \[-40.0\], and this one has \[-35.0\]"):
        play(-35.0)


def test_layered_around_our_own_environment_keeps_its_units():
    cmdp = tc.problems.make("alwayssafe/simple", horizon=4, budget=2.0).cmdp
    inside = CMDPEnv(cmdp)
    ends = {"rewards": (-20.0, 20.0), "costs": (-1.0, 6.0)}
    env = GymnasiumSimulator(lambda: Layered(CMDPEnv(cmdp), cmdp.layout.layers, told_cost, 2.0, **ends), runs=2)
    assert env.envs[0].cost_limit == inside.cost_limit == 2.0 and float(env.units.reward_scale) == 40
    played = env.rollout(tc.uniform_policy(env.layout))
    for j in range(2):
        inside.reset(seed=int(env.streams.uniform(0, 0, env.layout.layers)[j, 0, REWARD] * 2**31))
        steps = [inside.step(int(action)) for action in played.actions[j]]
        assert float(env.units.episode_return(played.rewards.sum(1))[j]) == pytest.approx(sum(step[1] for step in steps))
        assert env.units.episode_costs(played.costs.sum(1))[j].tolist() == pytest.approx(steps[-1][-1]["episode_costs"].tolist())


def test_an_environment_in_the_users_units_is_played_in_normal_form():
    cmdp = tc.problems.make("alwayssafe/simple", horizon=4, budget=2.0).cmdp
    for budget in (None, 3.0):
        env = GymnasiumSimulator(lambda b=budget: CMDPEnv(cmdp, budget=b), runs=2)
        single = env.envs[0]
        assert single.cost_limit == (budget or 2.0) and float(env.units.budget) == single.cost_limit
        played = env.rollout(tc.uniform_policy(cmdp.layout))
        shown = env.units.episode_costs(played.costs.sum(1))
        single.reset(seed=0)
        infos = [single.step(int(np.flatnonzero(single.action_masks())[0])) for _ in range(cmdp.layout.layers)]
        assert infos[-1][-1]["episode_costs"] == pytest.approx(sum(info[-1]["costs"] for info in infos))
        index = (torch.arange(cmdp.layout.layers), played.states[0], played.actions[0])
        own = cmdp.units.episode_costs(cmdp.costs[0][index].sum()[None])
        assert shown[0].tolist() == pytest.approx(own.tolist()) and played.costs.abs().max() <= 1
    learner = tc.WCOPS.for_env(env, horizon=3)
    assert tc.run(learner, env, 3, progress=False).violation.isfinite().all()
    with pytest.raises(tc.InvalidInput, match="budget is -9 for constraint 0, which no policy keeps"):
        CMDPEnv(cmdp, budget=-9)


class Fake(gym.Env):
    """One state a layer, two layers, and whatever is to be wrong."""

    observation_space, action_space = gym.spaces.Discrete(3), gym.spaces.Discrete(2)

    def __init__(self, observation: int = 1, reward: float = 0.5, info: dict | None = None, ends: bool = False) -> None:
        self.answer = (observation, reward, ends, False, {"cost": 0.1} if info is None else info)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return self.answer


def test_an_environment_that_knows_nothing_of_us():
    env = GymnasiumSimulator(Fake, layout=tc.Layout((1, 1, 1), 2), constraints=1)
    trajectory = env.rollout(tc.uniform_policy(env.layout))
    assert trajectory.costs.flatten().tolist() == [0.1, 0.1] and trajectory.rewards.tolist() == [[0.5, 0.5]]


def test_mistakes_get_a_sentence(cmdp):
    layout = tc.Layout((1, 1, 1), 2)

    def roll(**wrong):
        return GymnasiumSimulator(lambda: Fake(**wrong), layout=layout, constraints=1).rollout(tc.uniform_policy(layout))

    def beyond(**ends):
        env = Layered(Pay(), 3, told_cost, **{"rewards": (-5, 15), "costs": (-30, 0), **ends})
        env.reset()
        env.step(1)

    cheap = Layered(Pay(), 3, lambda move: "much", rewards=(-5, 15))  # type: ignore[arg-type, return-value]

    def random_start():
        taxi = Layered(gym.make("Taxi-v4"), 3, rewards=(-10.0, 20.0))
        for seed in range(9):
            taxi.reset(seed=seed)

    for words, call in {
        "observation 2 came in layer 1, whose states are 1 to 1": lambda: roll(observation=2),
        "gave reward 1.5": lambda: roll(reward=1.5),
        r"costs \[2.0\]": lambda: roll(info={"costs": np.array([2.0])}),
        "must hold 1 costs": lambda: roll(info={}),
        "ended after 1 of 2 steps": lambda: roll(ends=True),
        "does not say its layout": lambda: GymnasiumSimulator(Fake),
        r"widths \(1, 2, 1\) need Discrete\(4\)": lambda: GymnasiumSimulator(Fake, layout=tc.Layout((1, 2, 1), 2), constraints=1),
        "policy has shape": lambda: simulator(cmdp).rollout(torch.ones(1)),
        "policy is nan at layer 0": lambda: simulator(cmdp).rollout(tc.uniform_policy(cmdp.layout) * torch.nan),
        "policy sums to 0.5 at": lambda: simulator(cmdp).rollout(tc.uniform_policy(cmdp.layout) / 2),
        "the cost of Move.* is 'much'": lambda: (cheap.reset(), cheap.step(1)),
        "it must be Discrete": lambda: Layered(gym.make("CartPole-v1"), 3),
        "the start must be fixed": random_start,
        "rewards is .*two finite numbers": lambda: Layered(Fake(), 3, rewards=(2.0, 1.0)),
        "costs is .*two finite numbers": lambda: Layered(Fake(), 3, told_cost, costs=(0.0, float("inf"))),
        "budget is -1 for constraint 0, which no policy keeps: .* costs at least 0": lambda: Layered(Fake(), 3, told_cost, -1.0),
        "which no policy keeps: .* gets at most 3": lambda: Layered(Fake(), 3, told_cost, 4.0, sense=">="),
        r"cost 0 of action 1 in state 0 is -23; costs= says that it lies in \[0, 1\]": lambda: beyond(costs=(0.0, 1.0)),
        r"reward of action 1 in state 0 is 5; rewards= says": lambda: beyond(rewards=(0.0, 1.0)),
        "Simulator has episode, but was given nothing": lambda: simulator(cmdp).load_state_dict({}),
        "pass the trajectory": lambda: simulator(cmdp).tracker().update(tc.uniform_policy(cmdp.layout)),
    }.items():
        with pytest.raises(tc.InvalidInput, match=words):
            call()
