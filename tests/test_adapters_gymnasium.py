"""Our CMDPs as Gymnasium environments: they pass the checkers, follow the simulator, and tell costs; extras may be missing."""

from __future__ import annotations

import subprocess
import sys
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from torchcmdp import Bernoulli, InvalidInput, LayeredCMDP, OGDAdversary, Simulator, random_cmdp, stack_cmdps
from torchcmdp.adapters.gymnasium import CMDPEnv, CMDPVectorEnv
from torchcmdp.trajectory import Trajectory


def feedback(cmdp: LayeredCMDP) -> dict:
    return {"rewards": Bernoulli(cmdp.rewards), "costs": Bernoulli(cmdp.costs, low=-1)}


def simulated(cmdp: LayeredCMDP, policy: torch.Tensor, runs: int, episodes: int, seed: int) -> list[Trajectory]:
    simulator = Simulator(cmdp, **feedback(cmdp), runs=runs, seed=seed)
    return [simulator.rollout(policy) for _ in range(episodes)]


@pytest.mark.parametrize("observation", ["index", "one-hot"])
def test_the_checkers_are_content(cmdp, observation):
    from stable_baselines3.common.env_checker import check_env as check_for_baselines

    env = CMDPEnv(cmdp, **feedback(cmdp), observation=observation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)
        check_for_baselines(env)


@pytest.mark.parametrize("name", ["TwoPath", "Random"])
def test_registered_environments(name):
    single = gym.make(f"torchcmdp/{name}-v0", observation="one-hot")
    many = gym.make_vec(f"torchcmdp/{name}-v0", num_envs=3, vectorization_mode="vector_entry_point")
    assert isinstance(single.unwrapped, CMDPEnv) and isinstance(many.unwrapped, CMDPVectorEnv)
    check_env(single.unwrapped)
    single.reset(seed=0)
    many.reset(seed=0)
    many.step(many.action_space.sample())


def test_an_instance_can_be_chosen():
    env = gym.make("torchcmdp/Random-v0", widths=(1, 2, 1), actions=2, constraints=1, instance=5)
    assert torch.equal(env.unwrapped.cmdp.costs, random_cmdp((1, 2, 1), 2, 1, seed=5).costs)


def test_the_simulator_s_actions_lead_through_the_simulator_s_episodes(cmdp, random_policy):
    env, first = CMDPEnv(cmdp, **feedback(cmdp)), torch.tensor([0, *cmdp.layout.widths[:-1]]).cumsum(0)
    for e, trajectory in enumerate(simulated(cmdp, random_policy(cmdp.layout), 1, 3, seed=7)):
        observation, _ = env.reset(seed=7 if e == 0 else None)
        for k in range(cmdp.layout.layers):
            assert observation == first[k] + trajectory.states[0, k]
            observation, reward, terminated, truncated, info = env.step(int(trajectory.actions[0, k]))
            assert reward == trajectory.rewards[0, k] and not truncated
            assert info["costs"].tolist() == trajectory.costs[0, k].tolist() and info["cost"] == sum(info["costs"])
            assert terminated == (k == cmdp.layout.layers - 1)
        assert observation == cmdp.layout.total_states - 1


def test_the_vector_environment_plays_all_runs_at_once(cmdp, random_policy):
    runs, first = 5, torch.tensor([0, *cmdp.layout.widths[:-1]]).cumsum(0)
    env = CMDPVectorEnv(cmdp, runs, **feedback(cmdp), constraint=1)
    observation, _ = env.reset(seed=3)
    for e, trajectory in enumerate(simulated(cmdp, random_policy(cmdp.layout), runs, 3, seed=3)):
        if e > 0:  # the step after the last is a reset, whatever the actions
            observation, reward, terminated, _, info = env.step(env.action_space.sample())
            assert not terminated.any() and not reward.any() and not info["costs"].any()
        for k in range(cmdp.layout.layers):
            assert observation.tolist() == (first[k] + trajectory.states[:, k]).tolist()
            observation, reward, terminated, truncated, info = env.step(trajectory.actions[:, k].numpy())
            assert reward.tolist() == trajectory.rewards[:, k].tolist() and not truncated.any()
            assert info["costs"].tolist() == trajectory.costs[:, k].tolist()
            assert info["cost"].tolist() == trajectory.costs[:, k, 1].tolist()
            assert (terminated == (k == cmdp.layout.layers - 1)).all()
    assert env.metadata["autoreset_mode"] == gym.vector.AutoresetMode.NEXT_STEP


def test_the_vector_environment_behaves_as_gymnasium_s_own(cmdp):
    def rollout(env, episodes: int = 2) -> list:
        seen = [env.reset(seed=2)[0].tolist()]
        for t in range(episodes * (cmdp.layout.layers + 1)):
            observation, _, terminated, truncated, info = env.step(np.full(1, t % cmdp.layout.actions))
            seen.append((observation.tolist(), terminated.tolist(), truncated.tolist(), np.asarray(info.get("_cost")).tolist()))
        return seen

    ours = rollout(CMDPVectorEnv(cmdp, 1, **feedback(cmdp)))
    theirs = rollout(gym.vector.SyncVectorEnv([lambda: CMDPEnv(cmdp, **feedback(cmdp))]))
    assert [step[:3] for step in ours[1:]] == [step[:3] for step in theirs[1:]] and ours[0] == theirs[0]


def test_each_run_may_have_its_own_cmdp():
    cmdps = [random_cmdp((1, 3, 1), 2, 1, seed=s) for s in range(3)]
    env = CMDPVectorEnv(stack_cmdps(cmdps), 3, costs=None)
    env.reset(seed=0)
    _, reward, *_ = env.step(np.zeros(3, dtype=np.int64))
    assert reward.tolist() == pytest.approx([float(c.rewards[0, 0, 0]) for c in cmdps])


def test_seeds_repeat_and_episodes_differ(cmdp):
    env = CMDPEnv(cmdp, **feedback(cmdp))

    def play(seed: int | None) -> list:
        env.reset(seed=seed)
        return [env.step(0)[:2] for _ in range(cmdp.layout.layers)]

    first, second, third = play(4), play(None), play(None)
    assert [play(4), play(None), play(None)] == [first, second, third]
    assert len({str(x) for x in (first, second, third)}) > 1
    env.reset(seed=4)
    env.step(0)  # an episode left early is over
    assert play(None) == second


def test_processes_move_with_the_episodes_and_return_with_a_seed(cmdp):
    env = CMDPEnv(cmdp, costs=OGDAdversary(cmdp.costs, sign=1, step=0.5, low=-1))

    def play(seed: int | None) -> list[float]:
        env.reset(seed=seed)
        return [env.step(1)[4]["cost"] for _ in range(cmdp.layout.layers)]

    first, second = play(0), play(None)
    assert first[0] == pytest.approx(float(cmdp.costs[:, 0, 0, 1].sum()))
    assert second[0] == pytest.approx(float((1.5 * cmdp.costs[:, 0, 0, 1]).clamp(-1, 1).sum())) and second != first
    assert play(0) == first


def test_safety_gymnasium_s_six_values(cmdp):
    env = CMDPEnv(cmdp, **feedback(cmdp), six_tuple=True)
    env.reset(seed=0)
    _, reward, cost, terminated, truncated, info = env.step(0)
    assert cost == info["cost"] and isinstance(cost, float) and not terminated and not truncated
    many = CMDPVectorEnv(cmdp, 2, **feedback(cmdp), six_tuple=True)
    many.reset(seed=0)
    _, _, costs, _, _, info = many.step(np.zeros(2, dtype=np.int64))
    assert costs is info["cost"] and costs[0] == cost


def test_mistakes_get_a_sentence(cmdp):
    env, many = CMDPEnv(cmdp), CMDPVectorEnv(cmdp, 2)
    env.reset(seed=0)
    many.reset(seed=0)
    for words, call in {
        "it must be a whole number from 0 to 2": lambda: env.step(3),
        "2 whole numbers from 0 to 2": lambda: many.step(np.array([0, 3])),
        "constraint is 2": lambda: CMDPEnv(cmdp, constraint=2),
        "did you mean 'one-hot'": lambda: CMDPEnv(cmdp, observation="onehot"),
        "seed is -1": lambda: CMDPVectorEnv(cmdp, 2)._episodes.begin(-1),
        "the episode is over": lambda: [env.step(0) for _ in range(cmdp.layout.layers + 1)],
    }.items():
        with pytest.raises(InvalidInput, match=words):
            call()
    with pytest.raises(InvalidInput, match="call reset"):
        CMDPEnv(cmdp).step(0)


@pytest.mark.slow
def test_ppo_trains_and_reads_the_cost(cmdp):
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback

    class Costs(BaseCallback):
        seen: list[float] = []

        def _on_step(self) -> bool:
            self.seen.extend(info["cost"] for info in self.locals["infos"])
            return True

    callback = Costs()
    callback.seen = []
    model = PPO("MlpPolicy", CMDPEnv(cmdp, **feedback(cmdp)), n_steps=250, batch_size=50, seed=0, device="cpu")
    before = [p.detach().clone() for p in model.policy.parameters()]
    model.learn(2_000, callback=callback)
    assert len(callback.seen) == 2_000 and len(set(callback.seen)) > 1
    assert any(not torch.equal(old, new) for old, new in zip(before, model.policy.parameters(), strict=True))


def test_without_the_extras_the_core_imports_and_a_sentence_says_what_to_install():
    program = """
import sys
sys.modules.update(gymnasium=None, torchrl=None)
import torchcmdp, torchcmdp.adapters, torchcmdp.nn
for adapter in ("gymnasium", "tabular", "torchrl"):
    try:
        getattr(torchcmdp.adapters, adapter)
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    packages = [("gymnasium", "gym"), ("gymnasium", "gym"), ("torchrl", "torchrl")]
    sentence = "this adapter needs the package {}: pip install 'torchcmdp[{}]' installs it."
    assert done.stdout.splitlines() == [sentence.format(*names) for names in packages]
