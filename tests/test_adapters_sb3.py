"""Our CMDPs as a vectorised environment of Stable-Baselines3: the episodes are Gymnasium's, and its algorithms train."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import matching_game
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from torchcmdp import Bernoulli, InvalidInput, LayeredCMDP, evaluate
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


def probabilities(model, cmdp: LayeredCMDP):
    """What an algorithm would play in every state, as `evaluate` asks for it."""

    def asked(states: torch.Tensor) -> torch.Tensor:
        seen = states.float()
        if isinstance(model, DQN):
            # as its own `predict`, which knows of no masks
            return torch.nn.functional.one_hot(model.q_net(seen).argmax(-1), cmdp.layout.actions).double()
        if isinstance(model, MaskablePPO):
            allowed = torch.ones(len(seen), cmdp.layout.actions, dtype=torch.bool)
            allowed[: cmdp.layout.total_states - 1] = cmdp.layout.pair_mask()[cmdp.layout.state_mask()]
            return model.policy.get_distribution(seen, action_masks=allowed.numpy()).distribution.probs.double()
        return model.policy.get_distribution(seen).distribution.probs.double()

    return asked


PPO_OPTIONS = {"n_steps": 64, "batch_size": 128, "n_epochs": 4, "learning_rate": 0.005, "ent_coef": 0.02, "gamma": 0.9}
OPTIONS = {
    PPO: PPO_OPTIONS,
    MaskablePPO: PPO_OPTIONS,
    A2C: {"n_steps": 8, "learning_rate": 0.004, "gamma": 0.9},
    DQN: {"learning_starts": 100, "train_freq": 1, "learning_rate": 0.005, "exploration_fraction": 0.5},
}


@pytest.mark.parametrize("algorithm", OPTIONS)
def test_algorithms_learn_what_pays_and_are_told_the_cost(algorithm):
    """Of the 4 that there are to earn, at first as much as chance gives and in the end almost all: exactly, by the known CMDP."""
    masked = algorithm is MaskablePPO  # the only one that asks which actions there are; to take another is an error
    cmdp = matching_game() if masked else matching_game(mask=None)
    env, callback, steps = CMDPVecEnv(cmdp, 8, observation="one-hot"), Costs(), 6144
    model = algorithm("MlpPolicy", env if masked else VecMonitor(env), seed=0, device="cpu", **OPTIONS[algorithm])

    def earned() -> float:
        return float(cmdp.units.episode_return(evaluate(probabilities(model, cmdp), cmdp).value))

    before = earned()
    model.learn(steps, callback=callback)
    assert before < 2 and earned() > 3.3
    assert len(callback.seen) == steps and set(callback.seen) == {0.0, 2.0}
    assert len(callback.episodes) == steps // cmdp.layout.layers and sum(callback.episodes) == sum(callback.seen)


def test_actions_that_are_no_whole_numbers_get_a_sentence(cmdp):
    env = CMDPVecEnv(cmdp, 2)
    env.reset()
    with pytest.raises(InvalidInput, match="actions must be 2 whole numbers"):
        env.step(np.array([0.7, 0.7]))
