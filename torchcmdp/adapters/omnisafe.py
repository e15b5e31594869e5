"""Our CMDPs as environments of OmniSafe, whose policies choose continuous actions and whose environments speak in tensors."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchcmdp.adapters import require
from torchcmdp.adapters.gymnasium import CMDPVectorEnv
from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput
from torchcmdp.processes import Process

require("omnisafe", None)

from gymnasium.spaces import Box  # noqa: E402
from omnisafe.envs.core import CMDP, env_register, support_envs  # noqa: E402


class OmniSafeEnv(CMDP):  # type: ignore[misc]
    """A batch of runs of one CMDP; `register` makes the classes that OmniSafe finds by their ids.

    Observations are one hot. An action is a point of [-1, 1]^A and means the action of its largest entry, among those that the
    state has. The step that ends an episode returns the next one's observation, and the last one's as `info["final_observation"]`.

    Attributes:
        cost_limit: What a run's cost may be in expectation: what to give an algorithm as its `cost_limit`.
    """

    need_auto_reset_wrapper = False
    need_time_limit_wrapper = False
    _support_envs: ClassVar[list[str]] = []
    _arguments: ClassVar[dict[str, Any]] = {}

    def __init__(self, env_id: str, num_envs: int = 1, device: torch.device | str = "cpu", **kwargs: Any) -> None:
        super().__init__(env_id)
        self._env = CMDPVectorEnv(num_envs=num_envs, observation="one-hot", autoreset_mode="same-step", **self._arguments, **kwargs)
        self._num_envs, self._device = num_envs, torch.device(device)
        self._metadata: dict[str, Any] = {}
        self.cost_limit = self._env.cost_limit
        self._observation_space = self._env.single_observation_space
        self._action_space = Box(-1.0, 1.0, (self._env.cmdp.layout.actions,), np.float32)

    @property
    def max_episode_steps(self) -> int:
        """L."""
        return self._env.cmdp.layout.layers

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Begin an episode in every run."""
        observation, _ = self._env.reset(seed=seed)
        return self._shown(observation), {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Observations, rewards, costs, which episodes ended, which were cut short (none), and `info`."""
        wanted = action.detach().cpu().reshape(self._num_envs, -1).numpy()
        chosen = np.where(self._env.action_masks(), wanted, -np.inf).argmax(-1)
        observation, reward, ended, cut, info = self._env.step(chosen)
        final = {}
        if ended.any():
            last = [seen if over else current for seen, over, current in zip(info["final_obs"], ended, observation, strict=True)]
            final = {"final_observation": self._shown(np.stack(last))}
        values = (self._shown(x) for x in (observation, reward, info["cost"], ended, cut))
        return (*values, final)  # type: ignore[return-value]

    def set_seed(self, seed: int) -> None:
        """Begin the streams of a seed."""
        self.reset(seed=seed)

    def render(self) -> None:
        """There is nothing to see."""

    def close(self) -> None:
        """Nothing is held open."""

    def _shown(self, values: np.ndarray) -> Tensor:
        """As a tensor, floats in single precision as OmniSafe has them; without an axis of runs where there is one run."""
        tensor = torch.as_tensor(values, device=self._device)
        tensor = tensor if tensor.dtype == torch.bool else tensor.to(torch.float32)
        return tensor[0] if self._num_envs == 1 else tensor


def register(
    env_id: str,
    cmdp: LayeredCMDP,
    rewards: Process | None = None,
    costs: Process | None = None,
    *,
    constraint: int | None = None,
    budget: object = None,
) -> None:
    """Let OmniSafe find a CMDP by a new id: `omnisafe.Agent("PPOLag", env_id)` trains on it.

    The further arguments are those of `CMDPVectorEnv`.
    """
    if env_id in support_envs():
        raise InvalidInput(f"OmniSafe already has an environment {env_id!r}; choose another id.")
    arguments = {"cmdp": cmdp, "rewards": rewards, "costs": costs, "constraint": constraint, "budget": budget}
    env_register(type(f"OmniSafeEnv[{env_id}]", (OmniSafeEnv,), {"_support_envs": [env_id], "_arguments": arguments}))
