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

from torchcmdp import Bernoulli, Cyclic, InvalidInput, LayeredCMDP, OGDAdversary, Simulator, random_cmdp, stack_cmdps
from torchcmdp.adapters.gymnasium import CMDPEnv, CMDPVectorEnv
from torchcmdp.processes import Process
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
            assert info["costs"].tolist() == trajectory.costs[0, k].tolist() and info["cost"] == max(info["costs"])
            assert isinstance(info["cost"], np.float64) and ("episode_costs" in info) == terminated
            assert terminated == (k == cmdp.layout.layers - 1)
        assert observation == cmdp.layout.total_states - 1
        assert info["episode_costs"].tolist() == trajectory.costs[0].sum(0).tolist()
        assert info["episode_cost"] == trajectory.costs[0].amax(1).sum()


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


@pytest.mark.parametrize("mode", list(gym.vector.AutoresetMode))
def test_the_vector_environment_behaves_as_gymnasium_s_own(cmdp, mode):
    seeds, layers = [2, 9, 4], cmdp.layout.layers

    def rollout(env) -> list:
        seen = [env.reset(seed=seeds)[0].tolist()]
        for t in range(2 * (layers + 1)):
            observation, reward, terminated, truncated, info = env.step(np.arange(3) % cmdp.layout.actions)
            seen.append((observation.tolist(), reward.tolist(), terminated.tolist(), truncated.tolist()))
            if mode.name != "SAME_STEP":  # where ours shows the last cost of an episode beside the final one
                seen.append((info.get("_cost", np.zeros(3, bool)).tolist(), info.get("cost", np.zeros(3)).tolist()))
            if terminated.any() and mode.name == "SAME_STEP":
                final = info["final_info"]
                seen.append(
                    (list(info["final_obs"]), *(final[name].tolist() for name in ("cost", "costs", "episode_costs", "_cost")))
                )
            if mode.name == "DISABLED" and t == 1:
                seen.append(env.reset(options={"reset_mask": np.array([True, False, True])})[0].tolist())
            if mode.name == "DISABLED" and terminated.any():
                seen.append(env.reset(options={"reset_mask": terminated.copy()})[0].tolist())
        seen.append(env.reset(seed=[None, 9, None])[0].tolist())
        return [*seen, env.step(np.zeros(3, dtype=np.int64))[1].tolist()]

    ours = CMDPVectorEnv(cmdp, 3, **feedback(cmdp), autoreset_mode=mode)
    assert rollout(ours) == rollout(gym.vector.SyncVectorEnv([lambda: CMDPEnv(cmdp, **feedback(cmdp))] * 3, autoreset_mode=mode))
    assert ours.metadata["autoreset_mode"] == mode


def test_runs_that_share_a_changing_process_are_reset_together(cmdp):
    env = CMDPVectorEnv(cmdp, 2, costs=OGDAdversary(cmdp.costs, sign=1, step=0.5, low=-1), autoreset_mode="disabled")
    env.reset(seed=0)
    with pytest.raises(InvalidInput, match="they must be reset together"):
        env.reset(options={"reset_mask": np.array([True, False])})


@pytest.mark.parametrize("mode", ["next-step", "same-step", "disabled"])
def test_feedback_that_changes_does_so_once_an_episode_whatever_resets(cmdp, mode):
    layers, blocks = cmdp.layout.layers, [0.1 * j * cmdp.layout.pair_mask().expand_as(cmdp.costs) for j in range(3)]
    env = CMDPVectorEnv(cmdp, 2, costs=Cyclic(blocks, 1), constraint=0, autoreset_mode=mode)
    env.reset(seed=0)
    seen = []
    for _ in range(4):
        for _ in range(layers):
            info = env.step(np.zeros(2, int))[4]
        seen.append(info["episode_cost"][0] / layers)
        if mode == "next-step":
            env.step(np.zeros(2, int))
        elif mode == "disabled":
            env.reset()
    np.testing.assert_allclose(seen, [0.0, 0.1, 0.2, 0.0], atol=1e-12)


class Rising(Process):
    """Costs that leave their range in the third episode."""

    def __init__(self, mean):
        self.mean, self.episode = mean, 0

    @property
    def values(self):
        return self.mean.sign() * 0.4 * (1 + self.episode)

    def advance(self, policy):
        self.episode += 1

    def state_dict(self):
        return {"episode": self.episode}

    def load_state_dict(self, state):
        self.episode = state["episode"]


@pytest.mark.parametrize("many", [False, True])
def test_a_process_that_leaves_its_range_later_is_not_shown(cmdp, many):
    env = CMDPVectorEnv(cmdp, 2, costs=Rising(cmdp.costs)) if many else CMDPEnv(cmdp, costs=Rising(cmdp.costs))
    for seed in (0, 1):  # a seed begins again
        env.reset(seed=seed)
        with pytest.raises(InvalidInput, match="Rising gives -?1.2 in episode 2"):
            for _ in range(20):
                over = env.step(np.zeros(2, int) if many else 0)[2]
                if not many and over:
                    env.reset()


def test_no_constraint_pays_for_another(cmdp):
    """Who keeps the sum of the steps' worst costs at the limit keeps every constraint; with a sum in its place one could pay."""
    env = CMDPEnv(cmdp, **feedback(cmdp))
    for seed in range(20):
        env.reset(seed=seed)
        info = [env.step(seed % 3)[4] for _ in range(cmdp.layout.layers)][-1]
        assert info["episode_cost"] >= info["episode_costs"].max() - 1e-12 and env.cost_limit == 0


def test_each_run_of_a_batch_without_units_shows_its_own_worst_cost():
    env = CMDPVectorEnv(stack_cmdps([random_cmdp((1, 2, 2, 1), 2, 2, seed=seed) for seed in range(6)]), 6)
    env.reset(seed=0)
    for _ in range(3):
        info = env.step(np.zeros(6, np.int64))[4]
        assert np.array_equal(info["cost"], info["costs"].max(-1)) and env.cost_limit == 0


@pytest.mark.parametrize(
    "program",
    [
        "import gymnasium; env = gymnasium.make('torchcmdp/TwoPath-v0')",
        "import gymnasium; env = gymnasium.make('torchcmdp:torchcmdp/TwoPath-v0')",
        "import gymnasium, torchcmdp; env = gymnasium.make('torchcmdp/TwoPath-v0')",
        "import torchcmdp, gymnasium; env = gymnasium.make('torchcmdp.adapters.gymnasium:torchcmdp/TwoPath-v0')",
    ],
)
def test_a_registered_id_is_found(program):
    """By what `make` installed, by the module before a colon, and by ours, imported before or after."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; print(env.unwrapped.constraints)"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


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
    assert first[0] == pytest.approx(float(cmdp.costs[:, 0, 0, 1].max()))
    assert second[0] == pytest.approx(float((1.5 * cmdp.costs[:, 0, 0, 1]).clamp(-1, 1).max())) and second != first
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


@pytest.mark.parametrize("like", [int, np.int32, np.array, torch.tensor])
def test_an_action_may_be_any_whole_number(cmdp, like):
    """SB3's `predict` returns an array without axes, which is in the space."""
    env, same = CMDPEnv(cmdp, **feedback(cmdp)), CMDPEnv(cmdp, **feedback(cmdp))
    env.reset(seed=0)
    same.reset(seed=0)
    assert env.step(like(1))[:2] == same.step(1)[:2]


def test_mistakes_get_a_sentence(cmdp):
    env, many = CMDPEnv(cmdp), CMDPVectorEnv(cmdp, 2)
    env.reset(seed=0)
    many.reset(seed=0)
    for words, call in {
        "it must be a whole number from 0 to 2": lambda: env.step(3),
        "2 whole numbers from 0 to 2": lambda: many.step(np.array([0, 3])),
        r"action is array\(0\.\); it must be a whole number": lambda: env.step(np.array(0.0)),
        r"action is array\(\[0\]\); it must": lambda: env.step(np.array([0])),
        "constraint is 2": lambda: CMDPEnv(cmdp, constraint=2),
        "constraint is True": lambda: CMDPEnv(cmdp, constraint=True),
        "did you mean 'one-hot'": lambda: CMDPEnv(cmdp, observation="onehot"),
        "seed is -1": lambda: many.reset(seed=[0, -1]),
        "seed has 3 entries": lambda: many.reset(seed=[0, 1, 2]),
        "2 booleans with one True": lambda: many.reset(options={"reset_mask": np.zeros(2, dtype=bool)}),
        "autoreset_mode is 'never'": lambda: CMDPVectorEnv(cmdp, 2, autoreset_mode="never"),
        "an episode is over": lambda: CMDPVectorEnv(cmdp, 2).step(np.zeros(2, dtype=np.int64)),
        "the episode is over": lambda: [env.step(0) for _ in range(cmdp.layout.layers + 1)],
    }.items():
        with pytest.raises(InvalidInput, match=words):
            call()
    with pytest.raises(InvalidInput, match="call reset"):
        CMDPEnv(cmdp).step(0)


def test_without_the_extras_the_core_imports_and_a_sentence_says_what_to_install():
    program = """
import sys
sys.modules.update(gymnasium=None, torchrl=None)
import torchcmdp, torchcmdp.adapters, torchcmdp.nn
for adapter in ("gymnasium", "torchrl", "sb3"):
    try:
        getattr(torchcmdp.adapters, adapter)
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    packages = [("gymnasium", "gym"), ("torchrl", "torchrl"), ("gymnasium", "gym")]
    sentence = "this adapter needs the package {}: pip install 'torchcmdp[{}]' installs it."
    assert done.stdout.splitlines() == [sentence.format(*names) for names in packages]
