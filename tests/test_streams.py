from __future__ import annotations

import pytest
import torch

from torchcmdp import streams
from torchcmdp.errors import InvalidInput
from torchcmdp.streams import RunStreams, threefry2x32

ONES = 2**32 - 1


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers_of_random123(key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]) -> None:
    def words(pair: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(pair[0]), torch.tensor(pair[1])

    assert tuple(word.item() for word in threefry2x32(words(key), words(counter))) == expected


def test_numbers_are_the_generator_at_their_own_key_and_counter() -> None:
    """Key (seed, run), counter (episode, purpose * 2^16 + layer), 53 bits of the two words."""
    u = RunStreams(seed=11, runs=3, first_run=5).uniform(700, constraints=2, layers=4)
    for j, k, purpose in ((0, 0, 0), (2, 3, 1), (1, 2, 2), (2, 1, 4)):
        key = torch.tensor(11), torch.tensor(5 + j)
        high, low = threefry2x32(key, (torch.tensor(700), torch.tensor(purpose * 2**16 + k)))
        assert u[j, k, purpose].item() == ((int(high) >> 5) * 2**26 + (int(low) >> 6)) / 2**53


def test_numbers_do_not_depend_on_the_batch_the_constraints_or_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = [0, 1, 511, 512, 513, 10_000]
    together = RunStreams(7, runs=16)
    whole = [together.uniform(t, 3, 4) for t in episodes]
    part = RunStreams(7, runs=5, first_run=8)
    for t, u in zip(episodes, whole, strict=True):
        assert torch.equal(part.uniform(t, 3, 4), u[8:13])
        assert torch.equal(together.uniform(t, 0, 4), u[..., :3])
        assert torch.equal(together.uniform(t, 3, 2), u[:, :2])
    monkeypatch.setattr(streams, "_BLOCK_BYTES", 1)
    assert torch.equal(RunStreams(7, runs=16).uniform(513, 3, 4), whole[4])


def test_blocks_of_runs_may_share_their_numbers() -> None:
    own = RunStreams(7, runs=3).uniform(5, 2, 4)
    assert torch.equal(RunStreams(7, runs=9, distinct=3).uniform(5, 2, 4), own.repeat(3, 1, 1))
    assert torch.equal(RunStreams(7, runs=4, first_run=5, distinct=3).uniform(5, 2, 4), own[[2, 0, 1, 2]])
    with pytest.raises(InvalidInput, match="distinct is 0"):
        RunStreams(7, runs=3, distinct=0)


def test_a_block_of_episodes_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = RunStreams._make

    def counting(self: RunStreams, start: int, *sizes: int) -> torch.Tensor:
        made.append(start)
        return make(self, start, *sizes)

    monkeypatch.setattr(RunStreams, "_make", counting)
    stream = RunStreams(0, runs=1)
    for t in range(600):
        stream.uniform(t, 2, 4)
    assert made == [0, 512]


def test_streams_are_uniform_and_independent() -> None:
    """Mean, variance, and correlation between purposes, layers, runs, episodes and seeds, each within 5 standard errors."""
    n, stream = 512, RunStreams(3, runs=8)
    u = torch.stack([stream.uniform(t, 1, 4) for t in range(n)])
    assert u.min() >= 0 and u.max() < 1
    count = u.numel()
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / count) ** 0.5
    assert abs(u.var() - 1 / 12) < 5 * (1 / 180 / count) ** 0.5
    columns = u.reshape(n, -1)
    correlation = torch.corrcoef(columns.T) - torch.eye(columns.shape[1])
    assert correlation.abs().max() < 6 / n**0.5  # the largest of some 8000, so a little above 5
    other = RunStreams(4, runs=8).uniform(0, 1, 4)
    assert not torch.isin(other, u).any()


def test_all_numbers_differ() -> None:
    stream = RunStreams(0, runs=4)
    u = torch.stack([stream.uniform(t, 2, 5) for t in range(100)])
    assert u.unique().numel() == u.numel()


def test_runs_on_the_meta_device() -> None:
    u = RunStreams(0, runs=4, device="meta").uniform(3, 2, 5)
    assert u.shape == (4, 5, 5) and u.dtype == torch.float64 and u.device.type == "meta"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "0 <= seed < 2\\*\\*32"),
        ({"runs": 0}, "runs is 0; it must be a whole number of at least 1"),
        ({"first_run": -1}, "first_run is -1"),
        ({"first_run": 2**32 - 1, "runs": 2}, "run indices"),
    ],
)
def test_refuses_with_a_sentence(arguments: dict[str, int], message: str) -> None:
    RunStreams(seed=2**32 - 1, runs=1, first_run=2**32 - 1)
    with pytest.raises(InvalidInput, match=message):
        RunStreams(arguments.get("seed", 0), arguments.get("runs", 1), arguments.get("first_run", 0))


def test_refuses_impossible_episodes_and_sizes() -> None:
    stream = RunStreams(0, 1)
    assert stream.uniform(2**32 - 1, 0, 1).shape == (1, 1, 3)
    for episode in (-1, 2**32):
        with pytest.raises(InvalidInput, match="episode"):
            stream.uniform(episode, 0, 1)
    with pytest.raises(InvalidInput, match="too many"):
        stream.uniform(0, 2**16, 1)
    with pytest.raises(InvalidInput, match="too many"):
        stream.uniform(0, 0, 2**16 + 1)
