"""Our CMDPs as Gymnasium environments, one at a time or a batch, and Gymnasium environments as what `run` plays in."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from torchcmdp.adapters import require
from torchcmdp.adapters.foreign import GymnasiumSimulator, Layered, RealisedTracker
from torchcmdp.adapters.paths import Path, Paths
from torchcmdp.adapters.steps import OBSERVATIONS, Steps, first_numbers
from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, brief, choice, switch
from torchcmdp.instances import random_cmdp, two_path_cmdp
from torchcmdp.processes import Bernoulli, Process

require("gymnasium", "gym")

import gymnasium as gym  # noqa: E402
from gymnasium.vector import AutoresetMode  # noqa: E402

__all__ = ["CMDPEnv", "CMDPVectorEnv", "GymnasiumSimulator", "Layered", "RealisedTracker"]


class _Played:
    """What one environment and a batch have in common."""

    def _prepare(self, steps: Steps, observation: str, six_tuple: bool) -> tuple[Any, gym.spaces.Discrete]:
        """Set it, and return the spaces of one run."""
        shown, layout = steps.shown, steps.layout
        self.cmdp, self.six_tuple = steps.cmdp, switch("six_tuple", six_tuple)
        self.cost_limit, self.cost_limits = shown.limit, shown.limits.numpy(force=True)
        self._one_hot, self._allowed = choice("observation", observation, OBSERVATIONS) == "one-hot", layout.pair_mask().numpy()
        n, actions = layout.total_states, gym.spaces.Discrete(layout.actions)
        return gym.spaces.Box(0.0, 1.0, (n,), np.float32) if self._one_hot else gym.spaces.Discrete(n), actions


class CMDPEnv(_Played, gym.Env[Any, Any]):
    """A `gymnasium.Env` over a layered CMDP: every episode terminates after L steps.

    The observation is the state's number over all layers (the initial state is 0, the terminal one the last), or that number one
    hot. `info` has "costs", one a constraint, and "cost", a chosen one of them or the worst; the last one of an episode also has
    their sums, "episode_costs" and "episode_cost". A policy is safe when the expected sum of every cost over an episode is at most
    its limit. Rewards, costs and limits are in the user's units; those of a CMDP that has none are signed, with limit zero. Of a
    utility the negative is shown, and its limit is the negative of what it must sum to.

    `reset(seed=s)` begins the episodes that `Simulator(..., seed=s)` plays with the same actions, and returns the processes to
    their beginning; `reset()` goes on to the next episode. A process that looks at the policy is shown the actions taken in its
    place, since an environment sees no policy.

    Attributes:
        cmdp, layout, constraints: What is played.
        cost_limit: What the expected sum of `info["cost"]` over an episode may be: the budget, or zero where it is the worst.
        cost_limits: The same for each of `info["costs"]`, `(m,)`.
        units: What leads from `normal_form` back to what is shown; None where that is already shown.

    Args:
        cmdp: A single CMDP.
        rewards, costs: Where feedback comes from; by default the CMDP's mean rewards and costs, without noise.
        observation: "index" or "one-hot".
        constraint: Which constraint `info["cost"]` shows; None for the only one, or of several how far the worst of each step
            exceeds its share of the budget: if its sum is at most zero, all constraints are kept.
        budget: What each cost may sum to over an episode in expectation, in place of the CMDP's own budget; one for all or one
            each. One that no policy keeps is refused.
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
        budget: object = None,
        six_tuple: bool = False,
    ) -> None:
        steps = Steps(cmdp, rewards, costs, 1, budget, constraint)
        self._path, self._first = Path(steps), first_numbers(cmdp.layout)
        self.observation_space, self.action_space = self._prepare(steps, observation, six_tuple)
        self.layout, self.constraints = cmdp.layout, cmdp.constraints
        self.units = None if cmdp.units is None and budget is None else steps.shown.normal_units()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; without a seed the next one, of a stream that is drawn the first time."""
        super().reset(seed=seed)
        self._path.begin(int(self.np_random.integers(2**32)) if seed is None and not self._path.seeded else seed)
        self._cost, self._costs = np.float64(0), np.zeros(self.constraints)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        """Take an action."""
        if self._path.over:
            raise InvalidInput("the episode is over; call reset() before the next step.")
        try:  # the space's own check takes longer
            action = index(action)
        except TypeError:
            action = brief(action)
        if isinstance(action, str) or not 0 <= action < self.layout.actions:
            raise InvalidInput(f"action is {action}; it must be a whole number from 0 to {self.layout.actions - 1}.")
        if not self._allowed[self._path.layer, self._path.state, action]:
            raise InvalidInput(f"action {action} does not exist in state {self._observation()}; action_masks() says which do.")
        reward, cost, costs = self._path.step(action)
        self._cost, self._costs = self._cost + cost, self._costs + costs
        info: dict[str, Any] = {"cost": cost, "costs": costs}
        if self._path.over:
            info |= {"episode_cost": self._cost, "episode_costs": self._costs}
        extra = (cost,) if self.six_tuple else ()
        return self._observation(), reward, *extra, self._path.over, False, info

    def normal_form(self, reward: float, costs: np.ndarray, layer: int) -> tuple[float, np.ndarray]:
        """The reward in [0, 1] and the costs in [-1, 1] with threshold zero, `(m,)`, of a step from a layer that showed these."""
        return (reward, costs) if self.units is None else self._path.steps.shown.normal(reward, costs, layer)

    def action_masks(self) -> np.ndarray:
        """Which actions the current state has, `(A,)`, as `MaskablePPO` asks for them; all of them once an episode is over."""
        return np.ones(self.layout.actions, bool) if self._path.over else self._allowed[self._path.layer, self._path.state].copy()

    def _observation(self) -> Any:
        number = self._first[self._path.layer] + self._path.state
        if not self._one_hot:
            return number
        seen = np.zeros(self.layout.total_states, np.float32)
        seen[number] = 1
        return seen


class CMDPVectorEnv(_Played, gym.vector.VectorEnv[Any, Any, Any]):
    """Many runs of a CMDP as one `gymnasium.vector.VectorEnv`, every step one batched operation.

    `reset(seed=s)` lets run j play the episodes of `Simulator`'s run j; with a list of seeds it plays those of `CMDPEnv` with seed
    s_j, and a None in the list leaves a run's stream as it is. `reset(options={"reset_mask": mask})` begins episodes in some of the
    runs. All episodes have L steps, so that after a full reset they end together.

    Attributes:
        cost_limit, cost_limits: As in `CMDPEnv`; one a run where the budgets of a batch differ.

    Args:
        cmdp: A single CMDP, or a batch of one a run.
        num_envs: How many runs.
        rewards, costs, observation, constraint, budget, six_tuple: As in `CMDPEnv`.
        autoreset_mode: What follows the last step of an episode. Next step: one whose actions are ignored and whose rewards and
            costs are zero. Same step: the observation is already the next episode's, and the last one's is `info["final_obs"]`.
            Disabled: the caller's `reset`.
    """

    def __init__(
        self,
        cmdp: LayeredCMDP,
        num_envs: int,
        rewards: Process | None = None,
        costs: Process | None = None,
        *,
        observation: str = "index",
        constraint: int | None = None,
        budget: object = None,
        six_tuple: bool = False,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        steps = Steps(cmdp, rewards, costs, num_envs, budget, constraint)
        self._paths, self.num_envs = Paths(steps), num_envs
        self.single_observation_space, self.single_action_space = self._prepare(steps, observation, six_tuple)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        names = {mode.value: mode for mode in AutoresetMode} | {mode.name.lower().replace("_", "-"): mode for mode in AutoresetMode}
        if not isinstance(autoreset_mode, AutoresetMode):
            autoreset_mode = names[choice("autoreset_mode", autoreset_mode, tuple(names))]
        self.autoreset_mode = autoreset_mode
        self.metadata = {"render_modes": [], "autoreset_mode": autoreset_mode}

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode in every run, or in those of `options["reset_mask"]`."""
        chosen = self._mask((options or {}).get("reset_mask"))
        super().reset(seed=seed if isinstance(seed, int) else None)
        self._paths.begin(chosen, fresh=self._seed(seed, chosen))
        return self._paths.observation(one_hot=self._one_hot), {}

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Take one action in every run that is under way."""
        actions = np.asarray(actions)
        moving = ~self._paths.over
        if not self._paths.seeded.all() or (self.autoreset_mode == AutoresetMode.DISABLED and not moving.all()):
            raise InvalidInput("an episode is over; call reset() before the next step.")
        self._check(actions, moving)
        reward, info = self._paths.step(actions, moving)
        if not moving.all():  # only the next step resets by itself
            self._paths.begin(~moving, fresh=np.zeros_like(moving))
        ended, sums = self._paths.over, {f"episode_{name}": value for name, value in self._paths.sums.items()}
        shown: dict[str, Any] = {**info, **{f"_{name}": moving.copy() for name in info}}
        if ended.any():
            shown |= _where(ended, sums)
        observation = self._paths.observation(one_hot=self._one_hot)
        if ended.any() and self.autoreset_mode == AutoresetMode.SAME_STEP:
            finals = np.full(self.num_envs, None, dtype=object)
            for j in ended.nonzero()[0]:
                finals[j] = observation[j]
            final_info = _where(ended, {**info, **sums})
            shown |= {"final_obs": finals, "_final_obs": ended, "final_info": final_info, "_final_info": ended}
            self._paths.begin(ended, fresh=np.zeros_like(ended))
            observation = self._paths.observation(one_hot=self._one_hot)
        extra = (info["cost"],) if self.six_tuple else ()
        return observation, reward, *extra, ended, np.zeros(self.num_envs, dtype=bool), shown

    def action_masks(self) -> np.ndarray:
        """Which actions the current states have, `(num_envs x A)`; all of them in runs whose episode is over."""
        layer, state = self._paths.layer.numpy(force=True), self._paths.state.numpy(force=True)
        allowed: np.ndarray = self._allowed[np.minimum(layer, self.cmdp.layout.layers - 1), state]
        allowed |= self._paths.over[:, None]  # fancy indexing has made a copy
        return allowed

    def _mask(self, mask: Any) -> np.ndarray:
        """Which runs a reset means."""
        if mask is None:
            return np.ones(self.num_envs, dtype=bool)
        found = np.asarray(mask)
        if found.dtype != np.bool_ or found.shape != (self.num_envs,) or not found.any():
            raise InvalidInput(f"reset_mask is {brief(mask)}; it must be {self.num_envs} booleans with one True among them.")
        return found

    def _seed(self, seed: int | Sequence[int | None] | None, chosen: np.ndarray) -> np.ndarray:
        """Give the chosen runs the streams that a reset asks for, and one to those without; returns which got one."""
        each = isinstance(seed, Sequence | np.ndarray)
        if each and len(seed) != self.num_envs:  # type: ignore[arg-type]
            raise InvalidInput(f"seed has {len(seed)} entries; it must be a number, or one for each of {self.num_envs} runs.")  # type: ignore[arg-type]
        given: list[int | None] = list(seed) if each else [seed] * self.num_envs  # type: ignore[arg-type, list-item]
        for value in given:
            if value is not None and not (isinstance(value, int | np.integer) and 0 <= value < 2**32):
                raise InvalidInput(f"seed is {brief(value)}; it must be an integer with 0 <= seed < 2**32.")
        asked = chosen & np.array([value is not None for value in given])
        if asked.any():
            self._paths.seed(np.array([value or 0 for value in given], np.int64), asked, None if each else self._paths.steps.run)
        unseeded = chosen & ~self._paths.seeded
        if unseeded.any():
            drawn = np.full(self.num_envs, self.np_random.integers(2**32), np.int64)
            self._paths.seed(drawn, unseeded, self._paths.steps.run)
        fresh: np.ndarray = asked | unseeded
        return fresh

    def _check(self, actions: np.ndarray, moving: np.ndarray) -> None:
        if not self.action_space.contains(actions):
            raise InvalidInput(
                f"actions must be {self.num_envs} whole numbers from 0 to {self.cmdp.layout.actions - 1}, not {actions.tolist()}."
            )
        exist = np.take_along_axis(self.action_masks(), actions[:, None], 1)[:, 0] | ~moving
        if not exist.all():
            j = int((~exist).argmax())
            raise InvalidInput(f"action {actions[j]} of run {j} does not exist in its state; action_masks() says which do.")


def _where(mask: np.ndarray, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values of some runs, zero elsewhere, each with the mask beside it that Gymnasium puts there."""
    shown = {name: value * mask.reshape(-1, *[1] * (value.ndim - 1)) for name, value in values.items()}
    return {**shown, **{f"_{name}": mask.copy() for name in values}}


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
    constraints: int = 1,
    instance: int = 0,
    **options: Any,
) -> CMDPEnv | CMDPVectorEnv:
    """torchcmdp/Random-v0: `random_cmdp` with seed `instance` and Bernoulli feedback; further options are those of `CMDPEnv`."""
    return _env(random_cmdp(widths, actions, constraints, instance), num_envs, options)
