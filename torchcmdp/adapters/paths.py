"""The episodes under way in an environment: of one run in plain numbers, and of many runs as one batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchcmdp.adapters.steps import Steps
from torchcmdp.errors import InvalidInput
from torchcmdp.sampling import thresholds
from torchcmdp.streams import COST, NEXT_STATE, REWARD, RunStreams, uniform_at

# Random numbers and feedback are made for many episodes at once; a block has about so many entries, and never more episodes.
_BLOCK_ENTRIES = 2**18
_BLOCK_EPISODES = 256


class Path:
    """The episode under way in one run, of steps of one run.

    What every pair would pay is looked up in tables, which the processes themselves fill for a block of episodes at a time: a step
    is a few operations on plain numbers, since loops of other people call it millions of times.

    Attributes:
        over: Whether an episode has to begin before the next step.
        layer, state: Where the run is.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps, cmdp, layout = steps, steps.cmdp, steps.layout
        self.over, self.layer, self.state = True, 0, 0
        self._thresholds = thresholds(cmdp.transitions).reshape(*layout.pair_shape, -1).numpy(force=True)
        self._lists = None if layout.lists is None else layout.lists.array
        fits = _BLOCK_ENTRIES // (layout.layers * layout.width * layout.actions * (1 + cmdp.constraints))
        # feedback that changes with the episodes is known for the next one alone
        self._episodes = max(1, min(_BLOCK_EPISODES, fits)) if self.steps.stationary else 1
        self._seed: int | None = None
        self._episode, self._first = 0, -1
        self._states: list[int] = []
        self._actions: list[int] = []
        self._block: tuple[np.ndarray, ...] = ()

    @property
    def seeded(self) -> bool:
        """Whether a stream has been chosen."""
        return self._seed is not None

    def begin(self, seed: int | None) -> None:
        """Start the next episode, or with a seed the first one of its stream."""
        if seed is not None:
            self._seed = RunStreams(seed, 1).seed  # refuses what is out of range
            self._episode, self._first = 0, -1
            self.steps.restart()
        elif self._actions:  # an episode left early counts as played, so that its random numbers are not used twice
            self._episode += 1
        self._states, self._actions, self.over, self.layer, self.state = [], [], False, 0, 0
        if self._first < 0 or not 0 <= self._episode - self._first < self._episodes or not self.steps.stationary:
            self._fill()

    def step(self, action: int) -> tuple[float, np.float64, np.ndarray]:
        """The reward, the cost and the costs `(m,)` of one step."""
        episode, layer, state = self._episode - self._first, self.layer, self.state
        self._states.append(state)
        self._actions.append(action)
        numbers, rewards, shown, costs = self._block
        slot = int(self._thresholds[layer, state, action].searchsorted(numbers[episode, layer], side="right"))
        self.state = slot if self._lists is None else int(self._lists[layer, state, action, slot])
        self.layer += 1
        if self.layer == self.steps.layout.layers:
            self.over = True
            if not self.steps.stationary:
                self.steps.advance(torch.tensor([self._states]), torch.tensor([self._actions]))
        place = (episode, layer, state, action)
        return float(rewards[place]), shown[place], costs[place].copy()

    def _fill(self) -> None:
        """The numbers and the feedback at every pair of the next episodes."""
        assert self._seed is not None
        steps, layout, m = self.steps, self.steps.layout, self.steps.cmdp.constraints
        self._first = self._episode
        episodes = torch.arange(self._first, self._first + self._episodes, device=steps.cmdp.device).unsqueeze(-1)
        layers = torch.arange(layout.layers, device=steps.cmdp.device)
        numbers = uniform_at(self._seed, torch.zeros_like(layers), episodes, layers, m)
        # to the processes, every pair of a layer is a run that went there
        pairs = layout.width * layout.actions
        luck = numbers.unsqueeze(1).expand(-1, pairs, -1, -1).flatten(0, 1)
        means = steps.rewards.values.reshape(layout.layers, pairs).T.repeat(self._episodes, 1)
        rewards = steps.shown.reward(steps.rewards.observe(means, luck[..., REWARD]), layers)
        means = steps.costs.values.reshape(m, layout.layers, pairs).permute(2, 1, 0).repeat(self._episodes, 1, 1)
        costs = steps.shown.costs(steps.costs.observe(means, luck[..., COST:]), layers)
        by_pair = (self._episodes, layout.width, layout.actions, layout.layers)
        self._block = (
            numbers[..., NEXT_STATE].numpy(force=True),
            array(rewards).reshape(by_pair).transpose(0, 3, 1, 2),
            array(steps.shown.cost(costs, layers)).reshape(by_pair).transpose(0, 3, 1, 2),
            array(costs).reshape(*by_pair, m).transpose(0, 3, 1, 2, 4),
        )


class Paths:
    """The episodes under way in a batch of runs, each of which may be in another episode and another layer.

    Attributes:
        over: Which runs have to begin an episode before the next step, `(runs,)`.
        layer, state: Where the runs are, int64 `(runs,)`.
        sums: Of the episodes under way the "cost", `(runs,)`, and the "costs", `(runs x m)`.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps, cmdp, runs = steps, steps.cmdp, steps.runs
        zeros = torch.zeros(runs, dtype=torch.int64, device=cmdp.device)
        self.over, self.layer, self.state = np.ones(runs, dtype=bool), zeros, zeros
        self.sums = {"cost": np.zeros(runs), "costs": np.zeros((runs, cmdp.constraints))}
        size = runs * cmdp.layout.layers * (COST + cmdp.constraints)
        self._window = max(1, min(_BLOCK_EPISODES, _BLOCK_ENTRIES // size))
        self._seed, self._run, self._episode = zeros - 1, self.steps.run, zeros
        self._first, self._numbers = zeros - self._window, torch.zeros(0)
        self._states: list[Tensor] = []
        self._actions: list[Tensor] = []

    @property
    def seeded(self) -> np.ndarray:
        """Which runs have a stream, `(runs,)`."""
        return (self._seed >= 0).numpy(force=True)

    def seed(self, seeds: np.ndarray, chosen: np.ndarray, run: Tensor | None = None) -> None:
        """Give the chosen runs, `(runs,)`, streams of these seeds, one a run, and return the processes to their beginning.

        Each plays that `run` of its seed's stream; run 0 if not given.
        """
        where = torch.from_numpy(chosen).to(self.layer.device)
        self._seed = torch.where(where, torch.from_numpy(seeds).to(where.device), self._seed)
        self._run = torch.where(where, torch.zeros_like(self._run) if run is None else run, self._run)
        self._episode = self._episode.masked_fill(where, 0)
        self._first = torch.full_like(self._first, -self._window)
        self.steps.restart()

    def begin(self, chosen: np.ndarray, *, fresh: np.ndarray) -> None:
        """Start the next episode of the chosen runs; of those with a fresh stream, the first one."""
        if not self.steps.stationary and not chosen.all():
            raise InvalidInput(
                "rewards or costs change with the episodes, which all runs of this environment share; they must be reset together."
            )
        where = torch.from_numpy(chosen).to(self.layer.device)
        played = torch.from_numpy(chosen & ~fresh).to(where.device) & (self.layer > 0)
        self._episode = self._episode + played.to(torch.int64)
        self.layer, self.state = self.layer.masked_fill(where, 0), self.state.masked_fill(where, 0)
        self.over, self._states, self._actions = self.over & ~chosen, [], []
        self.sums = {name: np.where(chosen if sums.ndim == 1 else chosen[:, None], 0.0, sums) for name, sums in self.sums.items()}

    def step(self, actions: np.ndarray, moving: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Rewards `(runs,)`, and the cost `(runs,)` and costs `(runs x m)`: zero in the runs that do not move."""
        where = torch.from_numpy(moving).to(self.layer.device)
        action = torch.as_tensor(actions, dtype=torch.int64, device=where.device)
        layer = self.layer.clamp_max(self.steps.layout.layers - 1)
        state, reward, costs = self.steps.step(layer, self.state, action, self._uniforms(layer))
        changing = not self.steps.stationary and bool(moving.any())  # then all runs move together, or none, to begin again
        if changing:
            self._states.append(self.state)
            self._actions.append(action)
        self.layer, self.state = self.layer + where.to(torch.int64), torch.where(where, state, self.state)
        self.over = (self.layer == self.steps.layout.layers).numpy(force=True)
        if changing and self.over.all():
            self.steps.advance(torch.stack(self._states, 1), torch.stack(self._actions, 1))
        info = {"cost": array(self.steps.shown.cost(costs, layer)) * moving, "costs": array(costs) * moving[:, None]}
        self.sums = {name: sums + info[name] for name, sums in self.sums.items()}
        return array(reward) * moving, info

    def _uniforms(self, layer: Tensor) -> Tensor:
        """The random numbers of the coming step of every run: `(runs x (3 + m))`."""
        offset = self._episode - self._first
        if bool(((offset < 0) | (offset >= self._window)).any()):
            self._first, offset = self._episode, torch.zeros_like(self._episode)
            window = torch.arange(self._window, device=layer.device).unsqueeze(-1)
            layers = torch.arange(self.steps.layout.layers, device=layer.device)
            seed, run, episode = (x[:, None, None] for x in (self._seed, self._run, self._episode))
            self._numbers = uniform_at(seed, run, episode + window, layers, self.steps.cmdp.constraints)
        return self._numbers[self.steps.run, offset, layer]

    def observation(self, *, one_hot: bool) -> np.ndarray:
        """What is seen of the states: `(runs,)` numbers, or `(runs x states)`."""
        return self.steps.observation(self.layer, self.state, one_hot=one_hot).numpy(force=True)


def array(values: Tensor) -> np.ndarray:
    """As float64 on the host."""
    return values.to(torch.float64).numpy(force=True)
