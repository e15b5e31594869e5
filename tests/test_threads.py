"""Batches shared among threads: every instance once, errors heard, and nobody in anybody's way."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest

from torchcmdp.kernels import threads


@pytest.fixture(autouse=True)
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "available", lambda: 3)


def gathered(batch: int, meet: threading.Barrier | None = None) -> tuple[list[int], set[int]]:
    """The instances that a batch was cut into, and the threads that took them; with `meet`, no thread goes on alone."""
    taken, who = [], set()

    def kernel(start: int, stop: int) -> None:
        if meet is not None and threading.get_ident() not in who:
            who.add(threading.get_ident())
            meet.wait(10)
        taken.extend(range(start, stop))

    threads.over_batch(kernel, batch, threads.WORTH_A_THREAD)
    return sorted(taken), who


@pytest.mark.parametrize("batch", [1, 2, 7, 100])
def test_every_instance_is_taken_once(batch: int) -> None:
    for _ in range(50):
        assert gathered(batch)[0] == list(range(batch))


def test_all_threads_take_part() -> None:
    taken, who = gathered(9, threading.Barrier(3))
    assert taken == list(range(9)) and len(who) == 3


def test_an_error_in_a_helper_is_raised_and_the_next_call_works() -> None:
    here, together = threading.get_ident(), threading.Barrier(3)

    def kernel(start: int, stop: int) -> None:
        together.wait(10)
        if threading.get_ident() != here:
            raise FloatingPointError("in a helper")

    with pytest.raises(FloatingPointError, match="in a helper"):
        threads.over_batch(kernel, 3, threads.WORTH_A_THREAD)
    assert gathered(9, threading.Barrier(3))[0] == list(range(9))


def test_a_second_caller_works_alone() -> None:
    seen = []

    def kernel(start: int, stop: int) -> None:
        if not seen:
            seen.append(gathered(9))

    threads.over_batch(kernel, 9, threads.WORTH_A_THREAD)
    assert seen[0][0] == list(range(9))
    assert gathered(9, threading.Barrier(3))[0] == list(range(9))


def test_nothing_is_kept_alive() -> None:
    def call() -> weakref.ref[np.ndarray]:
        array = np.zeros(9)
        threads.over_batch(lambda start, stop: array[start:stop].fill(1), 9, threads.WORTH_A_THREAD)
        assert array.all()
        return weakref.ref(array)

    assert call()() is None
