"""A batch of episodes: a policy goes in, a `Trajectory` comes out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, check_kind, check_memory, kind_of, whole_number
from torchcmdp.identity import config_of, fingerprint
from torchcmdp.kernels.engine import engine
from torchcmdp.kernels.memory import compact, room
from torchcmdp.learners.compiled import check_failures
from torchcmdp.occupancy import checked_policy, shaped_policy
from torchcmdp.processes import Fixed
from torchcmdp.processes.base import check_keys
from torchcmdp.processes.compiled import episodes_left, is_ours, is_packable, pack, unpack
from torchcmdp.protocols import Axes, ProcessLike
from torchcmdp.sampling import costs_at, draw, thresholds, values_at
from torchcmdp.streams import ACTION, COST, NEXT_STATE, REWARD, RunStreams
from torchcmdp.trajectory import Trajectory

if TYPE_CHECKING:
    from torchcmdp.kernels.block import World
# What a process must have to be played with, and to be continued.
MEMBERS = ("stationary", "values", "observe", "largest", "advance", "state_dict", "load_state_dict", "state_axes")


class Simulator:
    """Plays episodes of a CMDP for many runs at once, each with random numbers of its own.

    A run's episodes depend on (seed, run index) and on its policies alone. No episode reads a tensor's value on the host.

    Attributes:
        cmdp: Shared by all runs, or a batch of shape `(runs,)`, one a run.
        layout, constraints, device, dtype: Those of the CMDP.
        rewards, costs: The processes that feedback comes from.
        runs, seed, first_run: Which random streams are used: those of runs `first_run` to `first_run + runs - 1`.
        distinct_runs: If given, run i has the random numbers of run i % distinct_runs: blocks of that many runs differ in their
            settings alone, and comparing them is comparing the settings (common random numbers).
        episode: How many episodes have been played.
        reward_values, cost_values: The processes' `values` in the episode played last (before the first, in that one).

    Args:
        cmdp, rewards, costs, runs, seed, first_run, distinct_runs: As above; `costs` may be left out if there are no constraints,
            and a tensor stands for `Fixed` of it.
    """

    def __init__(
        self,
        cmdp: LayeredCMDP,
        rewards: ProcessLike | Tensor,
        costs: ProcessLike | Tensor | None = None,
        runs: int = 1,
        seed: int = 0,
        first_run: int = 0,
        distinct_runs: int | None = None,
    ) -> None:
        check_kind("cmdp", cmdp, LayeredCMDP, "a LayeredCMDP, such as random_cmdp() gives")
        runs = whole_number("runs", runs, least=1)
        if costs is None:
            if cmdp.constraints:
                raise InvalidInput(
                    f"costs is missing, but the CMDP has {cmdp.constraints} constraints; pass a process such as "
                    "Bernoulli(cmdp.costs, low=-1)."
                )
            costs = cmdp.costs
        if tuple(cmdp.batch_shape) not in ((), (runs,)):
            raise InvalidInput(
                f"The CMDP has batch shape {tuple(cmdp.batch_shape)}; it must be a single one or one for each of the {runs} runs."
            )
        self.cmdp, self.rewards, self.costs = cmdp, _process("rewards", rewards), _process("costs", costs)
        self.layout, self.constraints, self.device, self.dtype = cmdp.layout, cmdp.constraints, cmdp.device, cmdp.dtype
        layers, states, actions = cmdp.layout.pair_shape
        check_memory(f"{runs:,} runs", runs * layers * (states * actions + 3 + cmdp.constraints))
        self.streams = RunStreams(seed, runs, first_run, cmdp.device, distinct_runs)
        self.runs, self.seed, self.first_run = self.streams.runs, self.streams.seed, self.streams.first_run
        self.distinct_runs = self.streams.distinct
        self.episode = 0
        self._check_values()
        self._successors = thresholds(cmdp.transitions).reshape(-1, cmdp.layout.slots)
        # where each state lies in a flat (L x S) table, and in a flat (runs x L x S) one
        place = torch.arange(layers * states, device=self.device).view(layers, states)
        own_place = place + torch.arange(self.runs, device=self.device)[:, None, None] * place.numel()
        self._first_place = place[:, 0]
        self._first_own_place = own_place[:, :, 0].unbind(1)
        self._first_row = (own_place if cmdp.batch_shape else place) * actions  # of `_successors`
        self._compact: tuple[Any, Any] | None = None  # transitions and thresholds without padding

    def _check_values(self) -> None:
        """The values of the next episode, refused if they do not fit the CMDP."""
        pair, constraint = self.layout.pair_shape, (self.constraints, *self.layout.pair_shape)
        self.reward_values = _checked("rewards", self.rewards, pair, self.runs, self.device, self.episode)
        self.cost_values = _checked("costs", self.costs, constraint, self.runs, self.device, self.episode)

    def read_values(self) -> None:
        """The values of the episode to be played; only a process of somebody else's can have left its range since the last one."""
        if is_ours(self.rewards) and is_ours(self.costs):
            self.reward_values, self.cost_values = self.rewards.values, self.costs.values
        else:
            self._check_values()

    def rollout(self, policy: Tensor) -> Trajectory:
        """Play one episode of every run, by pi(a|x), `(runs x L x S x A)`, or `(L x S x A)` for all runs; an array will do.

        An action or successor of probability zero is never drawn. A row of the policy may miss a sum of one by rounding: it is
        normalised. On the CPU what is further off is refused, and so are negative and non-finite entries, except in the padding,
        which is not looked at; elsewhere nothing looks at the values, because that would wait for the device, and a policy with NaN
        shows in the metrics.
        """
        shape = self.cmdp.layout.pair_shape
        policy = shaped_policy(policy, self.cmdp.layout, self.runs)
        self.watch(policy)
        here = policy.device == self.device and self.device.type == "cpu"
        if engine() != "torch" and here and policy.dtype == torch.float64 and self.is_packable:
            return self._rollout_compiled(policy.detach().expand(self.runs, *shape))
        policy = checked_policy(policy, self.cmdp.layout, self.runs).detach().expand(self.runs, *shape)
        uniforms = self.streams.uniform(self.episode, self.cmdp.constraints, self.cmdp.layout.layers)
        states, actions, next_states = self._play(policy, uniforms)
        pairs = (self._first_place + states) * shape[2] + actions
        self.read_values()
        rewards = self.rewards.observe(values_at(self.reward_values, pairs), uniforms[..., REWARD])
        costs = self.costs.observe(costs_at(self.cost_values, pairs), uniforms[..., COST:])
        for name, process, seen in (("rewards", self.rewards, rewards), ("costs", self.costs, costs)):
            if not is_ours(process):
                _check_range(name, "feedback", process, seen, self.episode)
        self.rewards.advance(policy)
        self.costs.advance(policy)
        self.episode += 1
        return Trajectory(states, actions, next_states, rewards, costs)

    def share_streams(self, distinct_runs: int) -> None:
        """From the next episode on give run i the random numbers of run i % distinct_runs, as the argument of that name does."""
        self.streams = RunStreams(self.seed, self.runs, self.first_run, self.device, distinct_runs)
        self.distinct_runs = self.streams.distinct

    def watch(self, policy: Tensor) -> None:
        """Called with the policy before every episode, and before a block of them: for a subclass that keeps something.

        A subclass that changes nothing else says `plays_in_blocks = True`, and is then played in compiled blocks.
        """

    def _play(self, policy: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States, actions and successors, `(runs x L)` each."""
        # the action that would be taken in every state, all layers at once: then each layer only has to look it up
        choices = draw(thresholds(policy), uniforms[..., ACTION, None, None])
        rows = (self._first_row + choices).flatten()
        state = torch.zeros(self.runs, dtype=torch.int64, device=self.device)
        states = [state]
        for place, uniform in zip(self._first_own_place, uniforms[..., NEXT_STATE, None].unbind(1), strict=True):
            row = rows.index_select(0, place + state)
            state = self.layout.state_at(row, draw(self._successors.index_select(0, row), uniform))
            states.append(state)
        visited = torch.stack(states, dim=1)
        states_played = visited[:, :-1]
        actions = choices.gather(2, states_played.unsqueeze(-1)).squeeze(-1)
        return states_played, actions, visited[:, 1:]

    @property
    def is_packable(self) -> bool:
        """Whether kernels can play its next episode: float64, and processes of ours on its device."""
        ours = is_packable(self.rewards, self.device) and is_packable(self.costs, self.device)
        return self.dtype == torch.float64 and ours and self.episodes_left >= 1

    @property
    def episodes_left(self) -> float:
        """How many episodes the processes have values for."""
        return min(episodes_left(self.rewards), episodes_left(self.costs))

    def pack(self, episodes: int) -> World:
        """The simulator as kernels see it that will play so many episodes; `unpack` puts back what they did."""
        from torchcmdp.kernels.block import World
        from torchcmdp.kernels.geometry import geometry_of

        if self._compact is None:
            geometry, transitions = geometry_of(self.layout), self.cmdp.transitions
            self._compact = compact(geometry, transitions, 4), compact(geometry, thresholds(transitions), 4)
        return World(
            self.seed, self.first_run, self.distinct_runs or 0, self.episode, *self._compact,
            pack(self.rewards, self.runs, 3, episodes), pack(self.costs, self.runs, 4, episodes),
        )  # fmt: skip

    def unpack(self, world: World, episodes: int) -> None:
        """Move on by the episodes that kernels played."""
        self.reward_values = unpack(self.rewards, world.rewards, episodes, 3)
        self.cost_values = unpack(self.costs, world.costs, episodes, 4)
        self.episode += episodes

    def _rollout_compiled(self, policy: Tensor) -> Trajectory:
        """`rollout` in one compiled call."""
        from torchcmdp.kernels.block import empty_stage
        from torchcmdp.kernels.geometry import geometry_of
        from torchcmdp.kernels.single import Walk, rollout_range
        from torchcmdp.kernels.threads import over_batch

        world, geometry, layout, m = self.pack(1), geometry_of(self.layout), self.layout, self.constraints
        steps = (self.runs, layout.layers)
        numbers = [torch.empty(steps, dtype=torch.int64) for _ in range(3)]
        feedback = [torch.empty(steps, dtype=torch.float64), torch.empty(*steps, m, dtype=torch.float64)]
        walk = Walk(*(tensor.numpy() for tensor in (*numbers, *feedback)))
        flat, failed = policy.flatten(1).contiguous().numpy(), torch.zeros(self.runs, dtype=torch.int64)

        def piece(start: int, stop: int) -> None:
            stage = room((layout, m), lambda: empty_stage(geometry, m))
            rollout_range(start, stop, geometry, world, flat, walk, failed.numpy(), stage)

        over_batch(piece, self.runs, len(geometry.successor))
        if failed.any():
            checked_policy(policy, layout)  # which has better words for it
            check_failures(failed.numpy())
        self.unpack(world, 1)
        return Trajectory(*numbers, *feedback)

    def state_dict(self) -> dict[str, Any]:
        """The number of episodes played and the state of the processes: with the same arguments, all that is needed to continue."""
        return {"episode": self.episode, "rewards": self.rewards.state_dict(), "costs": self.costs.state_dict()}

    def state_axes(self) -> Axes:
        """Where the runs are in each entry of `state_dict`."""
        return {"episode": None, "rewards": self.rewards.state_axes(3), "costs": self.costs.state_axes(4)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        check_keys(self, state, "episode", "rewards", "costs")
        self.rewards.load_state_dict(state["rewards"])
        self.costs.load_state_dict(state["costs"])
        self.episode = int(state["episode"])
        self._check_values()

    def config(self) -> dict[str, Any]:
        """What defines the episodes, ready for JSON."""
        return {
            **self.cmdp.layout.config(),
            "constraints": self.cmdp.constraints,
            "cmdp": [fingerprint(tensor) for tensor in (self.cmdp.transitions, self.cmdp.rewards, self.cmdp.costs)],
            "rewards": config_of(self.rewards),
            "costs": config_of(self.costs),
            "runs": self.runs,
            "seed": self.seed,
            "first_run": self.first_run,
            "distinct_runs": self.distinct_runs,
            "dtype": str(self.dtype).removeprefix("torch."),
            **({} if self.cmdp.units is None else {"units": self.cmdp.units.config()}),
        }


def _process(name: str, process: Any) -> ProcessLike:
    """The process itself, or the fixed one that a tensor stands for."""
    if isinstance(process, Tensor) or (isinstance(process, np.ndarray) and process.dtype.kind in "iuf"):
        return Fixed(torch.as_tensor(process))
    lacks = [member for member in MEMBERS if not hasattr(type(process), member) and member not in getattr(process, "__dict__", ())]
    if lacks or isinstance(process, type):
        raise InvalidInput(
            f"{name} is {kind_of(process)}; expected a process such as Bernoulli(cmdp.{name}), or a tensor of means"
            + (f": it has no {', '.join(lacks)}." if lacks and process is not None else ".")
        )
    return process  # type: ignore[no-any-return]


def _checked(name: str, process: ProcessLike, shape: tuple[int, ...], runs: int, device: torch.device, episode: int) -> Tensor:
    """The values of a process in an episode, refused if they do not fit the CMDP."""
    values = process.values
    if tuple(values.shape) not in (shape, (runs, *shape)):
        raise InvalidInput(
            f"{name} has values of shape {tuple(values.shape)}; expected {shape} or, for each run its own, {(runs, *shape)}."
        )
    if values.device != device:
        raise InvalidInput(f"{name} has values on {values.device}, but the CMDP is on {device}; both must be on one device.")
    _check_range(name, "values", process, values, episode)
    return values


def _check_range(name: str, what: str, process: ProcessLike, found: Tensor, episode: int) -> None:
    """Refuse rewards out of [0, 1] and costs out of [-1, 1]; not on devices that would have to be waited for."""
    if found.device.type != "cpu" or not found.numel():
        return
    least = 0 if name == "rewards" else -1
    low, high = (float(end) for end in torch.aminmax(found.detach()))
    slack = 1e-6  # rounding of float32
    if not (low >= least - slack and high <= 1 + slack):  # true of NaN as well
        kind, wrong = type(getattr(process, "process", process)).__name__, low if low < least else high
        raise InvalidInput(
            f"{name} has {what} outside of [{least}, 1], or a NaN: {kind} gives {wrong:g} in episode {episode}; "
            "a process must keep within that range."
        )
