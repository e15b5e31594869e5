"""Our CMDPs as a vectorised environment of Stable-Baselines3: the episodes are Gymnasium's, and its algorithms train."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from torchcmdp import Bernoulli, LayeredCMDP
from torchcmdp.adapters.gymnasium import CMDPEnv
from torchcmdp.adapters.sb3 import CMDPVecEnv


def feedback(cmdp: LayeredCMDP) -> dict:
    return {"rewards": Bernoulli(cmdp.rewards), "costs": Bernoulli(cmdp.costs, low=-1)}


class Costs(BaseCallback):
    """Keeps what the algorithm is told of the costs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.episodes: list[float] = []

    def _on_step(self) -> bool:
        self.seen.extend(info["cost"] for info in self.locals["infos"])
        self.episodes.extend(info["episode_cost"] for info in self.locals["infos"] if "episode_cost" in info)
        return True


def test_steps_are_those_of_baselines_own_vector(cmdp):
    ours = CMDPVecEnv(cmdp, 3, **feedback(cmdp))
    theirs = DummyVecEnv([lambda: CMDPEnv(cmdp, **feedback(cmdp))] * 3)
    played = []
    for env in (ours, theirs):
        env.seed(5)
        seen = [env.reset().tolist()]
        for t in range(2 * cmdp.layout.layers + 1):
            observation, reward, ended, infos = env.step(np.full(3, t % 3))
            terminal = [info.get("terminal_observation") for info in infos]
            seen.append((observation.tolist(), reward.tolist(), ended.tolist(), [info["cost"] for info in infos], terminal))
            seen.append([info.get("episode_cost") for info in infos])
        played.append(seen)
    assert played[0] == played[1]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [PPO, A2C, DQN, MaskablePPO])
def test_algorithms_train_and_read_the_cost(cmdp, algorithm):
    options = {"n_steps": 32} if algorithm is not DQN else {"learning_starts": 50}
    options |= {"batch_size": 64} if algorithm in (PPO, MaskablePPO) else {}
    env = CMDPVecEnv(cmdp, 4, **feedback(cmdp), observation="one-hot")
    model = algorithm("MlpPolicy", env if algorithm is MaskablePPO else VecMonitor(env), seed=0, device="cpu", **options)
    before, callback = [p.detach().clone() for p in model.policy.parameters()], Costs()
    model.learn(512, callback=callback)
    assert len(callback.seen) == 512 and len(set(callback.seen)) > 1
    assert len(callback.episodes) == 512 // cmdp.layout.layers
    assert any(not torch.equal(old, new) for old, new in zip(before, model.policy.parameters(), strict=True))
