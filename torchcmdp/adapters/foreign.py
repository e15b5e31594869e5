"""Gymnasium environments as what `run` plays in: a learner meets transitions that nobody on our side has seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.adapters import require
from torchcmdp.adapters.steps import first_numbers
from torchcmdp.adapters.tabular import Cost, Move
from torchcmdp.comparators import Comparators
from torchcmdp.errors import InvalidInput, brief, check_kind, check_memory, check_place, listed, number, whole_number
from torchcmdp.layout import MOST_LAYERS, Layout, check_layout
from torchcmdp.metrics import Curves, is_unsafe
from torchcmdp.occupancy import checked_policy
from torchcmdp.planning import refuse_unkept
from torchcmdp.processes.base import check_keys
from torchcmdp.protocols import EnvironmentLike
from torchcmdp.sampling import thresholds
from torchcmdp.streams import ACTION, REWARD, RunStreams
from torchcmdp.trajectory import Trajectory
from torchcmdp.units import Ends, Units, each_range, ends_of, normal_form

require("gymnasium", "gym")

import gymnasium as gym  # noqa: E402

ENVIRONMENT_NUMBERS = 128  # about a kilobyte: no environment takes less


class Layered(gym.Wrapper[Any, Any, Any, Any]):
    """Gives an environment with discrete spaces a fixed horizon, layered observations and costs.

    Layer 0 holds the start alone, which must always be the same state; the layers after it hold every state of the environment and
    one more, in which an episode that ended early waits, without rewards and costs, for the horizon. Rewards and costs are shown in
    the environment's own units, as `CMDPEnv` shows them; of a utility the negative, limited by the negative of its budget.

    Attributes:
        layout: Layer widths and actions.
        constraints: m.
        cost_limit: What the expected sum of `info["cost"]` over an episode may be: the budget, or zero where it is the worst of
            several, of which is shown how far it exceeds its share of the budget.
        cost_limits: The same for each of `info["costs"]`, `(m,)`.
        units: What leads from `normal_form` back to what is shown.

    Args:
        env: With `Discrete` observations and actions.
        horizon: L, the steps of an episode.
        cost: The cost of a move, or its utility; one function a constraint. `told_cost` is what the environment's info says.
        budget: How much of it an episode may have in expectation, or must have of a utility; one for all or one each.
        rewards: The smallest and the largest reward of a step, any finite numbers. Waiting earns zero, so that the range of normal
            form reaches to zero where these do not.
        costs: The same of a step's cost or utility, one pair for all or one each.
        sense: "<=" for a cost and ">=" for a utility, one for all or one each.
    """

    def __init__(
        self,
        env: Any,
        horizon: int,
        cost: Cost | Sequence[Cost] = (),
        budget: float | Sequence[float] = 0.0,
        *,
        rewards: Ends = (0.0, 1.0),
        costs: Ends | Sequence[Ends] = (0.0, 1.0),
        sense: str | Sequence[str] = "<=",
    ) -> None:
        check_kind("env", env, gym.Env, "a Gymnasium environment")
        super().__init__(env)
        for name in ("observation_space", "action_space"):
            space = getattr(env, name)
            if not isinstance(space, gym.spaces.Discrete) or space.start != 0:
                raise InvalidInput(f"the {name} is {space}; it must be Discrete, counted from zero.")
        self._costs = [cost] if callable(cost) else listed("cost", cost, "a function of a move, or a list of them")
        for each in self._costs:
            check_kind("cost", each, Callable, "a function of a move, or a list of them")
        self.constraints = len(self._costs)
        self._states = int(env.observation_space.n)
        steps = whole_number("horizon", horizon, least=1)
        if steps >= MOST_LAYERS:
            raise InvalidInput(f"horizon is {brief(horizon)}; an episode has fewer than {MOST_LAYERS:,} steps.")
        self.layout = Layout((1, *[self._states + 1] * (steps - 1), 1), int(env.action_space.n))
        self._told = _interval("rewards", rewards), [_interval("costs", ends) for ends in each_range(costs, self.constraints)]
        waiting = torch.zeros(1, dtype=torch.float64)
        reward_ends, *cost_ends = [(min(low, 0.0), max(high, 0.0)) for low, high in (self._told[0], *self._told[1])]
        *_, make_units = normal_form(waiting, waiting.expand(self.constraints, 1), steps, budget, sense, reward_ends, cost_ends)
        self.units, self._low = make_units(self.layout.pair_mask()), reward_ends[0]
        signs, scales, ends = self.units.sign, self.units.cost_scale, torch.tensor(cost_ends, dtype=torch.float64).reshape(-1, 2)
        least, limits = (signs[:, None] * ends).amin(-1) * steps, signs * self.units.budget
        refuse_unkept(least, limits, scales, signs, steps)  # what policies can reach within the ends is not known here
        self._sign, self._share = signs.numpy(), (limits / steps).numpy()
        self.cost_limits = self._share * steps
        self.cost_limit = float(self.cost_limits[0]) if self.constraints == 1 else 0.0
        self.observation_space = gym.spaces.Discrete(self.layout.total_states)
        self._first: int | None = None
        self._layer, self._state, self._over = 0, 0, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Begin an episode."""
        state, info = self.env.reset(seed=seed, options=options)
        self._first = int(state) if self._first is None else self._first
        if state != self._first:
            raise InvalidInput(f"an episode starts in state {state} and an earlier one in {self._first}; the start must be fixed.")
        self._layer, self._state, self._over = 0, int(state), False
        return 0, info

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Take an action, or wait."""
        reward, costs = 0.0, np.zeros(self.constraints)
        info: dict[str, Any] = {}
        if not self._over:
            state, reward, terminated, truncated, info = self.env.step(action)  # type: ignore[assignment]
            move = Move(self._state, int(action), int(state), float(reward), bool(terminated), info)
            costs = np.array([number(f"the cost of {move}", cost(move)) for cost in self._costs])
            self._check_ends(move, costs)
            self._state, self._over = move.next_state, terminated or truncated
        self._layer += 1
        last = self._layer == self.layout.layers
        place = 0 if last else (self._states if self._over else self._state)
        observation = 1 + (self._layer - 1) * (self._states + 1) + place
        shown = self._sign * costs
        cost = shown[0] if self.constraints == 1 else (shown - self._share).max() if self.constraints else 0.0
        return observation, float(reward), last, False, {**info, "cost": np.float64(cost), "costs": shown}

    def normal_form(self, reward: float, costs: np.ndarray, layer: int) -> tuple[float, np.ndarray]:
        """The reward in [0, 1] and the costs in [-1, 1] with threshold zero, `(m,)`, of a step from a layer that showed these."""
        scaled = (costs - self._share) / self.units.cost_scale.numpy()
        return min(max((reward - self._low) / float(self.units.reward_scale), 0.0), 1.0), np.clip(scaled, -1, 1)  # rounding alone

    def _check_ends(self, move: Move, costs: np.ndarray) -> None:
        """Refuse a reward or a cost beyond the ends that were given."""
        found = [("reward", "rewards", move.reward, self._told[0])]
        found += [(f"cost {i}", "costs", *pair) for i, pair in enumerate(zip(costs.tolist(), self._told[1], strict=True))]
        for what, option, value, (low, high) in found:
            if not low <= value <= high:
                raise InvalidInput(
                    f"the {what} of action {move.action} in state {move.state} is {value:g}; {option}= says that it lies in "
                    f"[{low:g}, {high:g}]."
                )


def _interval(name: str, ends: Any) -> Ends:
    """Two finite numbers in their order."""
    low, high = ends_of(ends)
    if not -np.inf < low <= high < np.inf:
        raise InvalidInput(f"{name} is {brief(ends)}; it must be the smallest and the largest of a step, two finite numbers.")
    return low, high


class GymnasiumSimulator:
    """Plays Gymnasium environments for many runs, in the place of a `Simulator`; of each it sees what any agent sees.

    The environments have `Discrete` spaces, episodes of L steps, and layered observations: state x of layer k is number widths[0] +
    ... + widths[k-1] + x, as in `CMDPEnv` and `Layered`. Rewards lie in [0, 1]; costs, in [-1, 1], are `info["costs"]`, or
    `info["cost"]` if there is one constraint. Of `CMDPEnv` and `Layered`, which show the user's units, the `normal_form` is played,
    where one is around another that of the outer. Every episode is seeded by (seed, run, episode), so that a run can be resumed; an
    environment must not remember earlier episodes.

    Attributes:
        layout, constraints, runs, seed, dtype, device: Of the episodes.
        episode: How many have been played.
        envs: The environments, one a run.
        units: The environment's own, in which results are shown; None where it says none.

    Args:
        make: Called once a run for an environment.
        runs, seed, dtype, device: As above.
        layout, constraints: As above; by default the environment's own attributes of these names.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        runs: int = 1,
        seed: int = 0,
        *,
        layout: Layout | None = None,
        constraints: int | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        self.streams = RunStreams(seed, runs)  # on the host, where the environments are
        check_kind("make", make, Callable, "a function that makes an environment")
        check_memory(f"the environments of {brief(runs)} runs", ENVIRONMENT_NUMBERS * self.streams.runs)
        self.envs = [make() for _ in range(self.streams.runs)]
        self.layout: Layout = _own(self.envs[0], "layout") if layout is None else layout
        check_layout(self.layout)
        m = _own(self.envs[0], "constraints") if constraints is None else constraints
        self.constraints = whole_number("constraints", m, least=0)
        check_place(dtype, device)
        self.runs, self.seed = self.streams.runs, self.streams.seed
        self.dtype, self.device = dtype, torch.device("cpu" if device is None else device)
        self.units: Units | None = _said(self.envs[0], "units")
        self._normal_form = _said(self.envs[0], "normal_form") is not None
        self.episode, self._first = 0, first_numbers(self.layout)
        for name, n in (("observation_space", self.layout.total_states), ("action_space", self.layout.actions)):
            space = getattr(self.envs[0], name)
            if not isinstance(space, gym.spaces.Discrete) or (space.n, space.start) != (n, 0):
                raise InvalidInput(f"the {name} is {space}; widths {self.layout.widths} need Discrete({n}).")

    def rollout(self, policy: Tensor) -> Trajectory:
        """Play one episode of every run, by pi(a|x), `(runs x L x S x A)`, or `(L x S x A)` for all runs."""
        policy = checked_policy(policy, self.layout, self.runs)
        steps = thresholds(policy.detach()).expand(self.runs, *self.layout.pair_shape).numpy(force=True)
        uniforms = self.streams.uniform(self.episode, 0, self.layout.layers).numpy()
        played = [self._play(*each) for each in zip(self.envs, steps, uniforms, strict=True)]
        states, actions, rewards, costs = (np.stack(column) for column in zip(*played, strict=True))
        self.episode += 1
        visited = torch.from_numpy(states).to(self.device)
        real: Any = {"dtype": self.dtype, "device": self.device}
        feedback = (torch.from_numpy(rewards).to(**real), torch.from_numpy(costs).to(**real))
        return Trajectory(visited[:, :-1], torch.from_numpy(actions).to(self.device), visited[:, 1:], *feedback)

    def _play(self, env: Any, thresholds: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, ...]:
        """One episode of one run: states `(L + 1)`, actions and rewards `(L)`, costs `(L x m)`."""
        layers = self.layout.layers
        states, actions = np.zeros(layers + 1, np.int64), np.zeros(layers, np.int64)
        rewards, costs = np.zeros(layers), np.zeros((layers, self.constraints))
        # a purpose that nothing else here uses: the environment draws its own rewards
        observation, _ = env.reset(seed=int(uniforms[0, REWARD] * 2**31))
        for k in range(layers):
            states[k] = self._state(observation, k)
            actions[k] = (thresholds[k, states[k]] <= uniforms[k, ACTION]).sum()
            observation, rewards[k], terminated, truncated, info = env.step(int(actions[k]))
            costs[k] = self._costs(info)
            if self._normal_form:
                rewards[k], costs[k] = env.get_wrapper_attr("normal_form")(rewards[k], costs[k], k)
            if not (0 <= rewards[k] <= 1 and (np.abs(costs[k]) <= 1).all()):
                raise InvalidInput(
                    f"step {k} of an episode gave reward {rewards[k]:g} and costs {costs[k].tolist()}; rewards must lie in [0, 1] "
                    "and costs in [-1, 1]."
                )
            if (terminated or truncated) and k + 1 < layers:
                raise InvalidInput(
                    f"an episode ended after {k + 1} of {layers} steps; Layered(env, horizon) gives it a fixed length."
                )
        return states, actions, rewards, costs

    def _state(self, observation: Any, layer: int) -> int:
        start, width = self._first[layer], self.layout.widths[layer]
        if not start <= int(observation) < start + width:
            raise InvalidInput(f"observation {observation} came in layer {layer}, whose states are {start} to {start + width - 1}.")
        return int(observation) - start

    def _costs(self, info: Mapping[str, Any]) -> Any:
        if self.constraints == 0:
            return []
        name = "costs" if "costs" in info else "cost"
        if np.size(info.get(name, ())) != self.constraints:
            raise InvalidInput(f'info["costs"] must hold {self.constraints} costs, but info has {name} = {info.get(name)}.')
        return info[name]

    def tracker(self) -> RealisedTracker:
        """Measures what was realised, since nothing else is known."""
        return RealisedTracker(self)

    def state_dict(self) -> dict[str, Any]:
        """The number of episodes played: with the same arguments, all that is needed to continue."""
        return {"episode": self.episode}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        check_keys(self, state, "episode")
        self.episode = int(state["episode"])

    def config(self) -> dict[str, Any]:
        """What defines the episodes, ready for JSON."""
        return {
            "environment": str(self.envs[0]),
            **self.layout.config(),
            "constraints": self.constraints,
            "runs": self.runs,
            "seed": self.seed,
            "dtype": str(self.dtype).removeprefix("torch."),
            **({} if self.units is None else {"units": self.units.config()}),
        }


class RealisedTracker(Curves):
    """A tracker for environments of which neither transitions nor means are known: all sums are those of the paths walked.

    The regret, rho and alpha are NaN. The positive violation sums the positive parts of realised costs, whose noise only ever adds,
    and an episode is unsafe where a realised cost is positive.
    """

    def __init__(self, env: EnvironmentLike) -> None:
        super().__init__(env, _Unknown(env))

    def update(self, policy: Tensor, trajectory: Trajectory | None = None) -> None:
        """Add an episode, by its trajectory alone."""
        if trajectory is None:
            raise InvalidInput("the policies' means are unknown in this environment; pass the trajectory.")
        reward, costs = trajectory.rewards.sum(1), trajectory.costs.sum(1)
        unknown = dict.fromkeys(("regret", "comparator_reward"), torch.full_like(reward, torch.nan))
        met = {"reward": reward, "realised_reward": reward, "unsafe": is_unsafe(costs), "violation": costs, "realised_cost": costs}
        self._add({**unknown, **met, "positive_violation": costs.clamp_min(0)})


class _Unknown(Comparators):
    """Comparators of which nothing is known."""

    def __init__(self, env: EnvironmentLike) -> None:
        self.changing, self._kept, self._points = False, [], {}
        self.rho = self.safe = self.best = torch.full((env.runs,), torch.nan, dtype=torch.float64, device=env.device)
        self.feasible = torch.zeros(env.runs, dtype=torch.bool, device=env.device)

    def reward_of(self, occupancy: Tensor, counts: Sequence[int], first: int = 0) -> Tensor:
        return self.rho[:, None].expand(-1, len(counts) - first)


def _said(env: Any, name: str) -> Any:
    """An attribute of the outermost of an environment and its wrappers that has it; None where none does."""
    try:
        return env.get_wrapper_attr(name)
    except AttributeError:
        return None


def _own(env: Any, name: str) -> Any:
    found = _said(env, name)
    if found is None:
        raise InvalidInput(f"the environment {env} does not say its {name}; pass {name}= to GymnasiumSimulator.")
    return found
