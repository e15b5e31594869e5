"""Our CMDPs as a vectorised environment of Stable-Baselines3, all runs one batch in place of a process or a loop each."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchcmdp.adapters import require
from torchcmdp.adapters.gymnasium import CMDPVectorEnv
from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.processes import Process

require("stable_baselines3", "sb3")

from stable_baselines3.common.vec_env.base_vec_env import VecEnv  # noqa: E402


class CMDPVecEnv(VecEnv):  # type: ignore[misc]
    """A `VecEnv` over a `CMDPVectorEnv`, whose arguments it takes; each `info` has "cost" and "costs", and the last one their sums.

    It has `action_masks`, so that sb3-contrib's MaskablePPO asks it which actions a state has.

    Attributes:
        env: The `CMDPVectorEnv` inside.
        cost_limit: As in `CMDPEnv`.
    """

    def __init__(
        self, cmdp: LayeredCMDP, num_envs: int, rewards: Process | None = None, costs: Process | None = None, **options: Any
    ) -> None:
        self.env = CMDPVectorEnv(cmdp, num_envs, rewards, costs, autoreset_mode="same-step", **options)
        self.cost_limit, self.render_mode = self.env.cost_limit, None
        self._chosen = np.zeros(num_envs, np.int64)
        super().__init__(num_envs, self.env.single_observation_space, self.env.single_action_space)

    def reset(self) -> np.ndarray:
        """Begin an episode in every run, with the seeds that `seed` has set."""
        given = any(seed is not None for seed in self._seeds)
        observation, _ = self.env.reset(seed=self._seeds if given else None)
        self._reset_seeds()
        self._reset_options()
        self.reset_infos = [{} for _ in range(self.num_envs)]
        return observation

    def step_async(self, actions: np.ndarray) -> None:
        """Remember the actions of the step to come."""
        self._chosen = np.asarray(actions)  # which the environment looks at

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Take them: observations, rewards, which episodes ended, and an `info` a run."""
        observation, reward, ended, _, info = self.env.step(self._chosen)
        infos: list[dict[str, Any]] = [{"cost": c, "costs": g} for c, g in zip(info["cost"], info["costs"], strict=True)]
        for j in ended.nonzero()[0]:
            sums = {name: info[name][j] for name in ("episode_cost", "episode_costs")}
            infos[j] |= {"terminal_observation": info["final_obs"][j], "TimeLimit.truncated": False, **sums}
        return observation, reward.astype(np.float32), ended, infos

    def close(self) -> None:
        """Nothing is held open."""

    def action_masks(self) -> np.ndarray:
        """Which actions the current states have, `(num_envs x A)`."""
        return self.env.action_masks()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The same for every run: they share one environment."""
        return [getattr(self.env, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set it for all runs: they share one environment."""
        setattr(self.env, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """A batched method is called once, and each run gets its row."""
        rows = getattr(self.env, method_name)(*method_args, **method_kwargs)
        return [rows[j] for j in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """There are no wrappers inside."""
        return [False for _ in self._get_indices(indices)]
