"""Our CMDPs as a TorchRL environment: it passes the checker, follows the simulator, and a step depends on its input alone."""

from __future__ import annotations

import pytest
import torch
from torchrl.envs.utils import check_env_specs

from torchcmdp import Bernoulli, InvalidInput, LayeredCMDP, OGDAdversary, Simulator, random_cmdp, stack_cmdps, uniform_policy
from torchcmdp.adapters.torchrl import TabularPolicy, TorchRLEnv


def feedback(cmdp: LayeredCMDP) -> dict:
    return {"rewards": Bernoulli(cmdp.rewards), "costs": Bernoulli(cmdp.costs, low=-1)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("observation", ["index", "one-hot"])
def test_the_checker_is_content(cmdp, observation, dtype):
    cmdp = cmdp.to(dtype=dtype)
    check_env_specs(TorchRLEnv(cmdp, **feedback(cmdp), runs=3, observation=observation))


@pytest.mark.parametrize("batched", [False, True])
def test_a_rollout_is_the_simulator_s(cmdp, random_policy, batched):
    runs, episodes, layers = 4, 3, cmdp.layout.layers
    if batched:
        cmdp = stack_cmdps([random_cmdp(cmdp.layout.widths, 3, 2, seed=s) for s in range(runs)])
    policy = random_policy(cmdp.layout, runs)
    env = TorchRLEnv(cmdp, **feedback(cmdp), runs=runs, seed=11, constraint=0)
    simulator = Simulator(cmdp, **feedback(cmdp), runs=runs, seed=11)
    played = env.rollout(episodes * layers, TabularPolicy(policy, env), break_when_any_done=False)
    assert played.shape == (runs, episodes * layers)
    for e in range(episodes):
        trajectory, part = simulator.rollout(policy), played[:, e * layers : (e + 1) * layers]
        assert torch.equal(part["state"], trajectory.states) and torch.equal(part["next", "state"], trajectory.next_states)
        assert torch.equal(part["action"], trajectory.actions)
        assert torch.equal(part["next", "reward"].squeeze(-1), trajectory.rewards)
        assert torch.equal(part["next", "costs"], trajectory.costs)
        assert torch.equal(part["next", "cost"].squeeze(-1), trajectory.costs[..., 0])
        assert part["next", "done"].squeeze(-1).tolist() == [[k == layers - 1 for k in range(layers)]] * runs
        assert (part["episode"] == e).all() and part["layer"].tolist() == [list(range(layers))] * runs


def test_observations_number_the_states_through(cmdp):
    env, one_hot = (TorchRLEnv(cmdp, runs=6, seed=1, observation=kind) for kind in ("index", "one-hot"))
    first = torch.tensor([0, *cmdp.layout.widths[:-1]]).cumsum(0)
    policy = uniform_policy(cmdp.layout)
    played = env.rollout(100, TabularPolicy(policy, env))
    assert torch.equal(played["observation"], first[played["layer"]] + played["state"])
    assert (played["next", "observation"][:, -1] == cmdp.layout.total_states - 1).all()
    assert torch.equal(one_hot.rollout(100, TabularPolicy(policy, one_hot))["observation"].argmax(-1), played["observation"])
    assert torch.equal(played["next", "cost"].squeeze(-1), played["next", "costs"].sum(-1))


def test_a_step_depends_on_its_input_alone(cmdp):
    env = TorchRLEnv(cmdp, **feedback(cmdp), runs=3, seed=2)
    begun = env.reset()
    begun["action"] = torch.tensor([0, 1, 2])
    first = env.step(begun.clone())
    env.reset()
    env.rollout(3)
    again = env.step(begun.clone())
    for name in ("state", "reward", "costs"):
        assert torch.equal(first["next", name], again["next", name])


def test_a_partial_reset_begins_an_episode_in_those_runs_alone(cmdp):
    env = TorchRLEnv(cmdp, **feedback(cmdp), runs=3, seed=2)
    begun = env.reset()
    begun["action"] = torch.zeros(3, dtype=torch.int64)
    moved = env.step(begun)["next"]
    moved["_reset"] = torch.tensor([[True], [False], [True]])
    partial = env.reset(moved.clone())
    assert partial["layer"].tolist() == [0, 1, 0] and partial["episode"].tolist() == [1, 0, 1]
    assert partial["state"][1] == moved["state"][1]
    assert env.reset()["episode"].tolist() == [2, 1, 2]


def test_seeds_repeat(cmdp):
    env = TorchRLEnv(cmdp, **feedback(cmdp), runs=3, seed=5)
    policy = TabularPolicy(uniform_policy(cmdp.layout), env)
    first = env.rollout(10, policy)
    assert not torch.equal(env.rollout(10, policy)["next", "costs"], first["next", "costs"])
    env.set_seed(5)
    assert torch.equal(env.rollout(10, policy)["next", "costs"], first["next", "costs"])
    env.set_seed(6)
    assert not torch.equal(env.rollout(10, policy)["next", "costs"], first["next", "costs"])


def test_everything_is_on_the_cmdp_s_device(cmdp):
    cmdp = cmdp.to("meta")
    env = TorchRLEnv(cmdp, **feedback(cmdp), runs=3)
    assert {spec.device.type for spec in (env.observation_spec, env.action_spec, env.reward_spec, env.done_spec)} == {"meta"}
    begun = env._reset()
    begun["action"] = torch.zeros(3, dtype=torch.int64, device="meta")
    assert {entry.device.type for entry in env._step(begun).values()} == {"meta"}


def test_mistakes_get_a_sentence(cmdp):
    for words, options in {
        "costs come from OGDAdversary": {"costs": OGDAdversary(cmdp.costs, sign=1, step=0.1, low=-1)},
        "constraint is 5": {"constraint": 5},
        "observation is 'pixels'": {"observation": "pixels"},
        "seed is -1": {"seed": -1},
    }.items():
        with pytest.raises(InvalidInput, match=words):
            TorchRLEnv(cmdp, **options)
    with pytest.raises(InvalidInput, match="policy has shape"):
        TabularPolicy(torch.ones(2, 2), TorchRLEnv(cmdp))
