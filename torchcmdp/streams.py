"""Random numbers that belong to a run: a counter-based generator keyed by (seed, run index).

Every number is a pure function of (seed, run, episode, purpose, layer), so it depends neither on which runs share a batch, nor on
the number of constraints, nor on how a batch was split over processes, and the whole state is the seed and the episode number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, whole_number

_WORD = 2**32
_MASK = _WORD - 1
_SLOTS_PER_PURPOSE = 2**16

ACTION, NEXT_STATE, REWARD, COST = 0, 1, 2, 3  # the purpose of a number; constraint i uses COST + i
COIN = _SLOTS_PER_PURPOSE - 1  # the last purpose, which no constraint has
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA

# One block of cached numbers: long enough to spread the cost of some 140 small operations, short enough to stay in a core's cache.
_BLOCK_BYTES = 2**21
_BLOCK_EPISODES = 512


def threefry2x32(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, Random123), on words in [0, 2^32) held in int64; all four broadcast."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x0, x1 = torch.broadcast_tensors(counter[0] + key[0], (counter[1] + key[1]) & _MASK)
    x0, x1 = x0.clone(), x1.clone()
    high = torch.empty_like(x1)  # in-place work throughout: fresh memory would cost more than the arithmetic
    for i in range(20):
        # x0 is masked only at the end: twenty sums of 32-bit words fit in int64, and only its low word reaches x1
        x0 += x1
        shift = _ROTATIONS[i % 8]
        torch.bitwise_left_shift(x1, shift, out=high)
        x1 >>= 32 - shift
        x1 |= high
        x1 ^= x0
        if i % 4 == 3:
            injection = i // 4 + 1
            x0 += schedule[injection % 3]
            x1 += schedule[(injection + 1) % 3] + injection
        x1 &= _MASK
    x0 &= _MASK
    return x0, x1


class RunStreams:
    """The random streams of `runs` consecutive runs, beginning at run `first_run`.

    Args:
        seed: In [0, 2^32), shared by all runs.
        runs: How many runs.
        first_run: Index of the first one, so that a batch can be split over processes.
        device: Where the numbers are made.
        distinct: If given, run i has the numbers of run i % distinct, so that every block of that many runs meets the same luck.
    """

    def __init__(
        self, seed: int, runs: int, first_run: int = 0, device: torch.device | str | None = None, distinct: int | None = None
    ) -> None:
        self.seed, self.runs = whole_number("seed", seed, least=0), whole_number("runs", runs, least=1)
        self.first_run = whole_number("first_run", first_run, least=0)
        self.distinct = None if distinct is None else whole_number("distinct", distinct, least=1)
        if self.seed >= _WORD:
            raise InvalidInput(f"seed is {seed}; it must be an integer with 0 <= seed < 2**32.")
        if self.first_run + self.runs > _WORD:
            raise InvalidInput(f"first_run is {first_run} with {runs} runs; run indices must lie in [0, 2**32).")
        self.device = torch.device(device or "cpu")
        self._block: Tensor | None = None
        self._block_key: tuple[int, int, int] | None = None

    def uniform(self, episode: int, constraints: int, layers: int) -> Tensor:
        """The numbers of one episode, in [0, 1) with 53 random bits: `(runs x L x (3 + m))` float64.

        The last axis is the purpose: 0 the action, 1 the next state, 2 the reward, 3 + i the cost of constraint i.
        """
        if not 0 <= episode < _WORD:
            raise InvalidInput(f"episode is {episode}; it must be an integer with 0 <= episode < 2**32.")
        size = 8 * self.runs * layers * (COST + constraints)
        length = max(1, min(_BLOCK_EPISODES, _BLOCK_BYTES // size))
        start = episode - episode % length
        if self._block is None or self._block_key != (start, constraints, layers):
            self._block = self._make(start, length, constraints, layers)
            self._block_key = (start, constraints, layers)
        return self._block[episode - start]

    def _make(self, start: int, episodes: int, constraints: int, layers: int) -> Tensor:
        """Numbers of `episodes` consecutive episodes: `(episodes x runs x L x (3 + m))`."""
        purposes = COST + constraints
        if layers > _SLOTS_PER_PURPOSE or purposes > COIN:
            raise InvalidInput(f"{layers} layers and {constraints} constraints are too many; each must be below 2**16.")
        run = self._indices(self.device).view(-1, 1)
        episode = torch.arange(start, start + episodes, device=self.device).view(-1, 1, 1)
        return uniform_at(self.seed, run, episode, torch.arange(layers, device=self.device), constraints)

    def coin(self, episode: Tensor) -> Tensor:
        """One more number of an episode, for whom who has to choose before it begins: `(runs,)` float64 in [0, 1).

        The episode is an int64 scalar tensor, which is not read on the host; the numbers are made where it is.
        """
        return _uniform(self.seed, self._indices(episode.device), episode, torch.full_like(episode, COIN * _SLOTS_PER_PURPOSE))

    def _indices(self, device: torch.device) -> Tensor:
        """The runs by the numbers that they have, `(runs,)`."""
        run = torch.arange(self.first_run, self.first_run + self.runs, device=device)
        return run if self.distinct is None else run % self.distinct


def uniform_at(seed: int | Tensor, run: Tensor, episode: Tensor, layer: Tensor, constraints: int) -> Tensor:
    """The numbers of single steps, each of any run, episode and layer: `(... x (3 + m))`, as `RunStreams.uniform` has them.

    The seed is one for all, in [0, 2^32), or like the others int64 `(...)`; they all broadcast.
    """
    purposes = torch.arange(COST + constraints, device=layer.device) * _SLOTS_PER_PURPOSE
    seed = seed.unsqueeze(-1) if isinstance(seed, Tensor) else seed
    return _uniform(seed, run.unsqueeze(-1), episode.unsqueeze(-1), layer.unsqueeze(-1) + purposes)


def _uniform(seed: int | Tensor, run: Tensor, episode: Tensor, slot: Tensor) -> Tensor:
    """Numbers in [0, 1) with 53 random bits, of the shape that the arguments broadcast to."""
    key = seed if isinstance(seed, Tensor) else torch.full((1,), seed, dtype=torch.int64, device=slot.device)
    high, low = threefry2x32((key, run), (episode, slot))
    bits = high.bitwise_right_shift_(5).mul_(2**26).add_(low.bitwise_right_shift_(6))
    return bits.to(torch.float64).mul_(2.0**-53)
