"""Our CMDPs as environments of OmniSafe, whose pins exclude ours: held against the part of its interface that it asks for."""

from __future__ import annotations

import importlib
import sys
import types

import numpy as np
import pytest
import torch

import torchcmdp as tc
from torchcmdp.adapters.gymnasium import CMDPVectorEnv


@pytest.fixture
def omnisafe(monkeypatch):
    """Stands in for `omnisafe.envs.core`: the base class, and the registry by id."""
    core = types.ModuleType("omnisafe.envs.core")
    found: dict[str, type] = {}

    class CMDP:
        _support_envs: list[str]

        def __init__(self, env_id: str) -> None:
            assert env_id in self._support_envs

    def env_register(kind: type) -> type:
        found.update(dict.fromkeys(kind._support_envs, kind))
        return kind

    core.CMDP, core.env_register, core.support_envs, core.found = CMDP, env_register, lambda: list(found), found
    for name in ("omnisafe", "omnisafe.envs"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "omnisafe.envs.core", core)
    monkeypatch.delitem(sys.modules, "torchcmdp.adapters.omnisafe", raising=False)
    module = importlib.import_module("torchcmdp.adapters.omnisafe")
    yield module, core.found
    sys.modules.pop("torchcmdp.adapters.omnisafe", None)


def test_episodes_are_the_vector_environment_s(cmdp, omnisafe):
    module, found = omnisafe
    feedback = {"rewards": tc.Bernoulli(cmdp.rewards), "costs": tc.Bernoulli(cmdp.costs, low=-1)}
    module.register("Ours-v0", cmdp, **feedback)
    env = found["Ours-v0"]("Ours-v0", num_envs=4)
    plain = CMDPVectorEnv(cmdp, 4, **feedback, observation="one-hot", autoreset_mode="same-step")
    env.set_seed(3)
    plain.reset(seed=3)
    for t in range(2 * cmdp.layout.layers):
        actions = np.arange(4) % 3
        wanted = torch.nn.functional.one_hot(torch.from_numpy(actions), 3) * 0.5 - 0.2  # the largest entry counts
        observation, reward, cost, ended, cut, info = env.step(wanted)
        expected = plain.step(actions)
        assert np.array_equal(observation, expected[0]) and reward.tolist() == pytest.approx(expected[1].tolist())
        assert cost.tolist() == pytest.approx(expected[4]["cost"].tolist()) and reward.dtype == torch.float32
        assert ended.tolist() == expected[2].tolist() and not cut.any()
        assert ("final_observation" in info) == ((t + 1) % cmdp.layout.layers == 0)
    assert info["final_observation"].argmax(-1).tolist() == [cmdp.layout.total_states - 1] * 4
    assert env.max_episode_steps == cmdp.layout.layers and env.cost_limit == 0


def test_one_run_has_no_axis_of_runs_and_ids_are_not_taken_twice(cmdp, omnisafe):
    module, found = omnisafe
    module.register("Single-v0", cmdp)
    env = found["Single-v0"]("Single-v0")
    observation, _ = env.reset(seed=0)
    assert observation.shape == (cmdp.layout.total_states,)
    assert env.step(torch.zeros(3))[1].shape == ()
    with pytest.raises(tc.InvalidInput, match="already has an environment 'Single-v0'"):
        module.register("Single-v0", cmdp)
