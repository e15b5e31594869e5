"""Episodes one step at a time, for environments whose actions are chosen by somebody else."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcmdp.adapters.shown import Shown
from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.layout import Layout
from torchcmdp.occupancy import uniform_policy
from torchcmdp.planning import check_cmdp
from torchcmdp.processes import Fixed, Process
from torchcmdp.sampling import costs_at, draw, thresholds, values_at
from torchcmdp.simulator import Simulator
from torchcmdp.streams import COST, NEXT_STATE, REWARD, uniform_at

OBSERVATIONS = ("index", "one-hot")


class Steps:
    """The simulator's transitions and feedback, one step at a time and with actions from outside.

    A step draws from the numbers that `Simulator` would use for the same seed, run, episode and layer, so that the same actions
    lead through the same states.

    Attributes:
        cmdp, rewards, costs, runs: As in `Simulator`, with the CMDP's mean rewards and costs as fixed feedback by default.
        layout: Of the CMDP.
        shown: What of rewards and costs is shown.
        stationary: Whether neither rewards nor costs change with the episodes.

    Args:
        cmdp, rewards, costs, runs: As above.
        budget, constraint: As in `Shown`.
    """

    def __init__(
        self,
        cmdp: LayeredCMDP,
        rewards: Process | None = None,
        costs: Process | None = None,
        runs: int = 1,
        budget: object = None,
        constraint: int | None = None,
    ) -> None:
        check_cmdp(cmdp)
        rewards, costs = (Fixed(mean) if given is None else given for mean, given in ((cmdp.rewards, rewards), (cmdp.costs, costs)))
        whole = Simulator(cmdp, rewards, costs, runs)  # refuses what does not fit together
        self.shown = Shown(cmdp, budget, constraint)
        self.cmdp, self.rewards, self.costs, self.runs, self.layout = cmdp, whole.rewards, whole.costs, runs, cmdp.layout
        self._successors = thresholds(cmdp.transitions).reshape(-1, cmdp.layout.slots)
        pairs = len(self._successors) // max(1, cmdp.batch_shape.numel())
        self.run = torch.arange(runs, device=cmdp.device)
        self._first_row = self.run * pairs if cmdp.batch_shape else torch.zeros_like(self.run)
        self._fresh = (self.rewards.state_dict(), self.costs.state_dict())
        self.stationary = self.rewards.stationary and self.costs.stationary

    def uniforms(self, seed: int | Tensor, episode: Tensor, layer: Tensor) -> Tensor:
        """The random numbers of one step of every run: `(runs x (3 + m))`, by purpose as in `RunStreams.uniform`."""
        return uniform_at(seed, self.run, episode, layer, self.cmdp.constraints)

    def step(self, layer: Tensor, state: Tensor, action: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next state `(runs,)`, the reward `(runs,)` and the costs `(runs x m)`, as they are shown.

        Args:
            layer, state, action: int64, `(runs,)`.
            uniforms: From `uniforms`.
        """
        pair = (layer * self.layout.width + state) * self.layout.actions + action
        slot = draw(self._successors.index_select(0, self._first_row + pair), uniforms[:, NEXT_STATE, None])
        next_state = self.layout.state_at(pair, slot)
        visit = pair.unsqueeze(1)  # episodes of one step, as far as the processes can tell
        reward = self.rewards.observe(values_at(self.rewards.values, visit), uniforms[:, None, REWARD])
        costs = self.costs.observe(costs_at(self.costs.values, visit), uniforms[:, None, COST:])
        return next_state, self.shown.reward(reward.squeeze(1), layer), self.shown.costs(costs.squeeze(1), layer)

    def restart(self) -> None:
        """Bring the processes back to where they were when this object was made."""
        self.rewards.load_state_dict(self._fresh[0])
        self.costs.load_state_dict(self._fresh[1])

    def advance(self, states: Tensor, actions: Tensor) -> None:
        """Move the processes on to the next episode.

        A process that looks at the policy is shown what was seen of it: the actions that were taken where the runs went, and the
        uniform policy elsewhere.

        Args:
            states, actions: Of the episode just played, `(runs x L)`.
        """
        policy = uniform_policy(self.layout, dtype=self.cmdp.dtype, device=self.cmdp.device).repeat(self.runs, 1, 1, 1)
        taken = torch.nn.functional.one_hot(actions, self.layout.actions).to(policy)
        index = states[..., None, None].expand(-1, -1, 1, self.layout.actions)
        policy.scatter_(2, index, taken.unsqueeze(2))
        self.rewards.advance(policy)
        self.costs.advance(policy)


class LayeredIndex:
    """The states of all layers numbered through: state x of layer k is number widths[0] + ... + widths[k-1] + x.

    Attributes:
        states: How many there are, the terminal one included.
        first: The number of each layer's state 0, `(L + 1)` int64.
    """

    def __init__(self, layout: Layout, device: torch.device | str | None = None) -> None:
        self.states = layout.total_states
        self.first = torch.tensor([sum(layout.widths[:k]) for k in range(layout.layers + 1)], device=device)

    def of(self, layer: Tensor, state: Tensor, *, one_hot: bool) -> Tensor:
        """The number of a state, `(...)` int64, or `(... x states)` float32 with a one at that place."""
        index = self.first[layer] + state
        return torch.nn.functional.one_hot(index, self.states).to(torch.float32) if one_hot else index
