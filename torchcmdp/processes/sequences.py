"""Processes that do not look at the learner: means that never change, blocks that take turns, sequences recorded earlier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from torchcmdp.errors import InvalidInput, brief, choice, listed, whole_number
from torchcmdp.processes.base import Counted, Noisy, Process, check_keys, check_low, check_mean
from torchcmdp.protocols import Axes, ProcessLike

NOISES = ("bernoulli",)


class _Stationary(Process):
    """One mean for all episodes."""

    stationary = True
    _mean: Tensor
    _settings: ClassVar[tuple[str, ...]] = ("_mean",)

    @property
    @override
    def values(self) -> Tensor:
        return self._mean


class Fixed(_Stationary):
    """The feedback of a pair is its mean, `([runs x] L x S x A)` for rewards and `([runs x] m x L x S x A)` for costs."""

    def __init__(self, mean: Tensor) -> None:
        self._mean = check_mean(type(self).__name__, mean, -1.0)


class Bernoulli(Noisy, _Stationary):
    """The feedback of a pair is 1 with probability (mean - low) / (1 - low) and `low` otherwise, independently in every episode.

    Args:
        mean: In [low, 1]; `([runs x] L x S x A)` for rewards or `([runs x] m x L x S x A)` for costs.
        low: 0 for rewards, -1 for costs.
    """

    _settings = ("low", "_mean")

    def __init__(self, mean: Tensor, low: float = 0.0) -> None:
        self.low = check_low(low)
        self._mean = check_mean(type(self).__name__, mean, self.low)


class _Blocks(Noisy, Counted):
    """Means of which one is in force at a time, with or without Bernoulli noise; a subclass says which."""

    _settings: ClassVar[tuple[str, ...]] = ("noise", "low", "_blocks")

    def __init__(self, blocks: Sequence[Tensor], noise: str | None, low: float) -> None:
        if noise is not None:
            choice("noise", noise, NOISES)
        name = type(self).__name__
        self.noise, self.low = noise, check_low(low)
        self._blocks = [
            check_mean(name, block, self.low if noise else -1.0) for block in listed("blocks", blocks, "a list of tensors")
        ]
        if not self._blocks:
            raise InvalidInput(f"{name} has no blocks; it needs at least one tensor of means.")
        first = self._blocks[0]
        for j, block in enumerate(self._blocks):
            if (block.shape, block.dtype) != (first.shape, first.dtype):
                raise InvalidInput(
                    f"Block {j} of {name} is {block.dtype} of shape {tuple(block.shape)}, but block 0 is {first.dtype} of shape "
                    f"{tuple(first.shape)}; all must be alike."
                )

    def _block(self) -> int:
        """Which block is in force after `episode` episodes."""
        raise NotImplementedError

    @property
    def values(self) -> Tensor:
        return self._blocks[self._block()]


class Switching(_Blocks):
    """One mean after the other, at fixed episodes.

    Args:
        blocks: The means, each `([runs x] L x S x A)` for rewards or `([runs x] m x L x S x A)` for costs.
        at: After how many episodes, counted from the first, each block but block 0 begins; increasing.
        noise: None, where the feedback of a pair is its mean, or "bernoulli", where it is 1 or `low` with that mean.
        low: For "bernoulli": 0 for rewards, -1 for costs.
    """

    _settings = (*_Blocks._settings, "at")

    def __init__(self, blocks: Sequence[Tensor], at: Sequence[int], *, noise: str | None = None, low: float = 0.0) -> None:
        super().__init__(blocks, noise, low)
        episodes = listed("at", at, "a list of numbers of episodes")
        self.at, switches = [whole_number("a number in at", t, least=0) for t in episodes], len(self._blocks) - 1
        if len(self.at) != switches or any(t >= u for t, u in pairwise([0, *self.at])):
            raise InvalidInput(
                f"at is {self.at} with {len(self._blocks)} blocks; expected {switches} increasing numbers of episodes, one for "
                "each block but the first."
            )

    def _block(self) -> int:
        return sum(t <= self.episode for t in self.at)


class Cyclic(_Blocks):
    """Means that take turns, each for `length` episodes, and then begin again.

    Args:
        blocks, noise, low: As for `Switching`.
        length: Episodes of a block.
    """

    _settings = (*_Blocks._settings, "length")

    def __init__(self, blocks: Sequence[Tensor], length: int, *, noise: str | None = None, low: float = 0.0) -> None:
        super().__init__(blocks, noise, low)
        self.length = whole_number("length", length, least=1)

    def _block(self) -> int:
        return self.episode // self.length % len(self._blocks)


class Recorder(Process):
    """Another process, whose values are kept: memory grows with every episode recorded.

    Attributes:
        process: The process that is recorded.
        episode: How many episodes have been played.

    Args:
        process: As above.
        episodes: How many episodes to record, from the first; later ones are played and not kept.
    """

    _settings = ("process", "episodes")

    def __init__(self, process: ProcessLike, episodes: int) -> None:
        if not all(hasattr(process, name) for name in ("values", "observe", "advance", "stationary")):
            raise InvalidInput(f"process is {brief(process)}; it must be a process, such as Bernoulli(cmdp.rewards).")
        self.process, self.episodes, self.stationary = process, whole_number("episodes", episodes, least=1), process.stationary
        self._kept: list[Tensor] = []
        self.episode = 0

    @property
    def sequence(self) -> Tensor:
        """What was recorded, ready for `Replay`: `(T x [runs x] L x S x A)` or `(T x [runs x] m x L x S x A)`."""
        if not self._kept:
            return self.values.new_zeros(0, *self.values.shape)
        # an adaptive process has one value for all runs at first, and one for each later
        return torch.stack(torch.broadcast_tensors(*self._kept))

    @property
    @override
    def values(self) -> Tensor:
        return self.process.values

    @override
    def observe(self, values: Tensor, uniforms: Tensor) -> Tensor:
        return self.process.observe(values, uniforms)

    @override
    def largest(self, values: Tensor) -> Tensor:
        return self.process.largest(values)

    @override
    def advance(self, policy: Tensor) -> None:
        if len(self._kept) < self.episodes:
            self._kept.append(self.process.values)
        self.process.advance(policy)
        self.episode += 1

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"episode": self.episode, "process": self.process.state_dict(), "sequence": self.sequence}

    @override
    def state_axes(self, mean_axes: int) -> Axes:
        own = any(values.dim() > mean_axes for values in self._kept or [self.values])
        # the first axis of the sequence is that of the episodes
        return {"episode": None, "process": self.process.state_axes(mean_axes), "sequence": 1 if own else None}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(self, state, "episode", "process", "sequence")
        self.process.load_state_dict(state["process"])
        self.episode, sequence, now = int(state["episode"]), state["sequence"], tuple(self.values.shape)
        kept = min(self.episode, self.episodes)
        if tuple(sequence.shape) not in ((kept, *now), (kept, *now[1:])):  # the first values may be one for all runs
            raise InvalidInput(f"The state of Recorder has a sequence of shape {tuple(sequence.shape)}; expected {(kept, *now)}.")
        self._kept = list(sequence.to(self.values).unbind(0))


class Replay(Counted):
    """A sequence of values, one an episode, whatever is played; the feedback of a pair is its value.

    Args:
        sequence: In [-1, 1], such as `Recorder.sequence`: `(T x [runs x] L x S x A)` for rewards or
            `(T x [runs x] m x L x S x A)` for costs.
    """

    _settings = ("_sequence",)

    def __init__(self, sequence: Tensor) -> None:
        self._sequence = check_mean(type(self).__name__, sequence, -1.0, axes=4)
        if len(sequence) == 0:
            raise InvalidInput(f"The sequence of Replay has shape {tuple(sequence.shape)}; it needs at least one episode.")

    @property
    def values(self) -> Tensor:
        """Of this episode; when all were played, of the last."""
        return self._sequence[min(self.episode, len(self._sequence) - 1)]

    @override
    def observe(self, values: Tensor, uniforms: Tensor) -> Tensor:
        if self.episode >= len(self._sequence):
            raise InvalidInput(
                f"Replay has played all of its {len(self._sequence)} episodes; record a longer sequence or play fewer episodes."
            )
        return values
