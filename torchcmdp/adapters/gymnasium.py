"""Our CMDPs as Gymnasium environments, one at a time or a batch, and Gymnasium environments as what `run` plays in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.adapters import require
from torchcmdp.adapters.foreign import GymnasiumSimulator, Layered, RealisedTracker
from torchcmdp.adapters.steps import OBSERVATIONS, LayeredIndex, Steps, check_constraint, cost_of
from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, choice
from torchcmdp.instances import random_cmdp, two_path_cmdp
from torchcmdp.processes import Bernoulli, Process
from torchcmdp.streams import RunStreams

require("gymnasium", "gym")

import gymnasium as gym  # noqa: E402

__all__ = ["CMDPEnv", "CMDPVectorEnv", "GymnasiumSimulator", "Layered", "RealisedTracker"]


class _Episodes:
    """The episode under way in every run of a batch: all runs begin and end together, since all episodes have L steps."""

    def __init__(
        self,
        cmdp: LayeredCMDP,
        rewards: Process | None,
        costs: Process | None,
        runs: int,
        observation: str,
        constraint: int | None,
    ) -> None:
        check_constraint(cmdp, constraint)
        self.steps = Steps(cmdp, rewards, costs, runs)
        self.constraint = constraint
        self.one_hot = choice("observation", observation, OBSERVATIONS) == "one-hot"
        self.index = LayeredIndex(cmdp.layout, cmdp.device)
        self.streams: RunStreams | None = None
        self.episode, self.over = 0, True
        self._states: list[Tensor] = []
        self._actions: list[Tensor] = []

    @property
    def layers(self) -> int:
        return self.steps.layout.layers

    @property
    def observation_space(self) -> Any:
        """Of one run."""
        if self.one_hot:
            return gym.spaces.Box(0.0, 1.0, (self.index.states,), np.float32)
        return gym.spaces.Discrete(self.index.states)

    def begin(self, seed: int | None) -> np.ndarray:
        """Start the next episode, or with a seed the first one of its stream; returns the observations."""
        if seed is not None:
            self.streams = RunStreams(seed, self.steps.runs, device=self.steps.cmdp.device)
            self.episode = 0
            self.steps.restart()
        elif self._actions:  # an episode left early counts as played, so that its random numbers are not used twice
            self.episode += 1
        self._states = [torch.zeros(self.steps.runs, dtype=torch.int64, device=self.steps.cmdp.device)]
        self._actions, self.over = [], False
        return self._observation()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Observations, rewards `(runs,)` and the cost `(runs,)` and costs `(runs x m)` of one step."""
        assert self.streams is not None
        action = torch.as_tensor(actions, dtype=torch.int64, device=self.steps.cmdp.device)
        uniforms = self.streams.uniform(self.episode, self.steps.cmdp.constraints, self.layers)[:, len(self._actions)]
        layer = torch.full_like(action, len(self._actions))
        state, reward, costs = self.steps.step(layer, self._states[-1], action, uniforms)
        self._states.append(state)
        self._actions.append(action)
        self.over = len(self._actions) == self.layers
        if self.over:
            self.steps.advance(torch.stack(self._states[:-1], 1), torch.stack(self._actions, 1))
        info = {"cost": cost_of(costs, self.constraint), "costs": costs}
        return self._observation(), _array(reward), {name: _array(value) for name, value in info.items()}

    def _observation(self) -> np.ndarray:
        layer = torch.full_like(self._states[-1], len(self._actions))
        return self.index.of(layer, self._states[-1], one_hot=self.one_hot).numpy(force=True)


class CMDPEnv(gym.Env[Any, Any]):
    """A `gymnasium.Env` over a layered CMDP: every episode terminates after L steps.

    The observation is the state's number over all layers (the initial state is 0, the terminal one the last), or that number one
    hot. `info` has "costs", one a constraint, and "cost", their sum or a chosen one of them. A policy is safe when the expected sum
    of every cost over an episode is at most zero: costs are signed, and the limit is always zero.

    `reset(seed=s)` begins the episodes that `Simulator(..., seed=s)` plays with the same actions, and returns the processes to
    their beginning; `reset()` goes on to the next episode. A process that looks at the policy is shown the actions taken in its
    place, since an environment sees no policy.

    Args:
        cmdp: A single CMDP.
        rewards, costs: Where feedback comes from; by default the CMDP's mean rewards and costs, without noise.
        observation: "index" or "one-hot".
        constraint: Which constraint `info["cost"]` shows; None for the sum of all.
        six_tuple: Return Safety-Gymnasium's (observation, reward, cost, terminated, truncated, info) from `step`. Gymnasium's own
            checker, which `gymnasium.make` adds, refuses that: pass it `disable_env_checker=True`.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self,
        cmdp: LayeredCMDP,
        rewards: Process | None = None,
        costs: Process | None = None,
        *,
        observation: str = "index",
        constraint: int | None = None,
        six_tuple: bool = False,
    ) -> None:
        self._episodes = _Episodes(cmdp, rewards, costs, 1, observation, constraint)
        self.cmdp, self.six_tuple = cmdp, six_tuple
        self.layout, self.constraints = cmdp.layout, cmdp.constraints
        self.observation_space = self._episodes.observation_space
        self.action_space = gym.spaces.Discrete(cmdp.layout.actions)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        observation = self._episodes.begin(_seed(self, self._episodes, seed))
        return self._plain(observation), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        """Take an action."""
        if self._episodes.over:
            raise InvalidInput("the episode is over; call reset() before the next step.")
        if not self.action_space.contains(action):
            raise InvalidInput(f"action is {action!r}; it must be a whole number from 0 to {self.cmdp.layout.actions - 1}.")
        observation, reward, info = self._episodes.step(np.asarray([action]))
        costs = {"cost": float(info["cost"][0]), "costs": info["costs"][0]}
        extra = (costs["cost"],) if self.six_tuple else ()
        return self._plain(observation), float(reward[0]), *extra, self._episodes.over, False, costs

    def _plain(self, observation: np.ndarray) -> Any:
        return observation[0] if self._episodes.one_hot else int(observation[0])


class CMDPVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """Many runs of a CMDP as one `gymnasium.vector.VectorEnv`, every step one batched operation.

    All episodes begin and end together. The step after the last one of an episode is a reset: its actions are ignored and its
    rewards and costs are zero (Gymnasium's `AutoresetMode.NEXT_STEP`). Run j plays the episodes of `Simulator`'s run j.

    Args:
        cmdp: A single CMDP, or a batch of one a run.
        num_envs: How many runs.
        rewards, costs, observation, constraint, six_tuple: As in `CMDPEnv`.
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(
        self,
        cmdp: LayeredCMDP,
        num_envs: int,
        rewards: Process | None = None,
        costs: Process | None = None,
        *,
        observation: str = "index",
        constraint: int | None = None,
        six_tuple: bool = False,
    ) -> None:
        self._episodes = _Episodes(cmdp, rewards, costs, num_envs, observation, constraint)
        self.cmdp, self.num_envs, self.six_tuple = cmdp, num_envs, six_tuple
        self.single_observation_space = self._episodes.observation_space
        self.single_action_space = gym.spaces.Discrete(cmdp.layout.actions)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode in every run."""
        super().reset(seed=seed)
        return self._episodes.begin(_seed(self, self._episodes, seed)), {}

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Take one action in every run, or begin the next episodes."""
        actions = np.asarray(actions)
        if not self.action_space.contains(actions):
            raise InvalidInput(
                f"actions must be {self.num_envs} whole numbers from 0 to {self.cmdp.layout.actions - 1}, not {actions.tolist()}."
            )
        if self._episodes.over:
            observation, _ = self.reset()
            reward = np.zeros(self.num_envs)
            info = {"cost": np.zeros(self.num_envs), "costs": np.zeros((self.num_envs, self.cmdp.constraints))}
        else:
            observation, reward, info = self._episodes.step(actions)
        ends, extra = np.full(self.num_envs, self._episodes.over), (info["cost"],) if self.six_tuple else ()
        everywhere = {f"_{name}": np.ones(self.num_envs, dtype=bool) for name in info}
        return observation, reward, *extra, ends, np.zeros(self.num_envs, dtype=bool), {**info, **everywhere}


def _seed(env: Any, episodes: _Episodes, seed: int | None) -> int | None:
    """The seed of the streams: that given to `reset`, else one drawn on the first call alone."""
    if seed is None and episodes.streams is None:
        return int(env.np_random.integers(2**32))
    return seed


def _array(values: Tensor) -> np.ndarray:
    return values.to(torch.float64).numpy(force=True)


def _env(cmdp: LayeredCMDP, num_envs: int | None, options: dict[str, Any]) -> CMDPEnv | CMDPVectorEnv:
    """With Bernoulli feedback; `gymnasium.make` gives no number of environments and `gymnasium.make_vec` does."""
    feedback: dict[str, Any] = {"rewards": Bernoulli(cmdp.rewards), "costs": Bernoulli(cmdp.costs, low=-1)}
    return CMDPEnv(cmdp, **feedback, **options) if num_envs is None else CMDPVectorEnv(cmdp, num_envs, **feedback, **options)


def two_path(num_envs: int | None = None, **options: Any) -> CMDPEnv | CMDPVectorEnv:
    """torchcmdp/TwoPath-v0: `two_path_cmdp` with Bernoulli feedback; the options are those of `CMDPEnv`."""
    return _env(two_path_cmdp(), num_envs, options)


def random(
    num_envs: int | None = None,
    widths: Sequence[int] = (1, 4, 4, 4, 1),
    actions: int = 3,
    constraints: int = 2,
    instance: int = 0,
    **options: Any,
) -> CMDPEnv | CMDPVectorEnv:
    """torchcmdp/Random-v0: `random_cmdp` with seed `instance` and Bernoulli feedback; further options are those of `CMDPEnv`."""
    return _env(random_cmdp(widths, actions, constraints, instance), num_envs, options)


for _name, _function in (("TwoPath", "two_path"), ("Random", "random")):
    _entry = f"{__name__}:{_function}"
    gym.register(f"torchcmdp/{_name}-v0", entry_point=_entry, vector_entry_point=_entry)
