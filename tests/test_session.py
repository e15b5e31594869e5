"""The sums of a learner's diagnostics, and the numbers of a logging point."""

from __future__ import annotations

import pytest
import torch

from torchcmdp.run.session import Diagnostics


def test_tallies_average_windows_and_runs_and_count_episodes() -> None:
    tally = Diagnostics(runs=2)
    active = torch.tensor([[0.0, 2.0], [3.0, 1.0], [0.0, 0.0], [1.0, -1.0]])
    tally.add({"active": active[0]})
    tally.add({"active": active[1]})
    assert tally.close_window()["active"].tolist() == [1.5, 1.5]
    tally.add({"active": active[2]})
    tally.add({"active": active[3]})
    assert tally.close_window()["active"].tolist() == [0.5, -0.5]
    assert tally.means(4)["active"].tolist() == [1.0, 0.5]
    assert tally.counts()["active"].tolist() == [2, 2]  # two constraints active at once are one episode


def test_a_tag_that_comes_later_or_goes_counts_as_zero_elsewhere() -> None:
    tally = Diagnostics(runs=3)
    tally.add({})
    tally.add({"a": torch.ones(3)})
    tally.add({"b": torch.tensor(True), "a": torch.ones(3)})
    tally.add({"b": torch.tensor(True)})
    assert {tag: value.tolist() for tag, value in tally.close_window().items()} == {"a": [0.5] * 3, "b": [0.5] * 3}
    assert {tag: value.tolist() for tag, value in tally.counts().items()} == {"a": [2, 2, 2], "b": [2, 2, 2]}


def test_a_tally_continues_from_its_state() -> None:
    straight, resumed = Diagnostics(2), Diagnostics(2)
    values = torch.rand(6, 2, generator=torch.Generator().manual_seed(0))
    for value in values[:3]:
        straight.add({"x": value, "y": value - 0.5})
    resumed.load_state_dict(straight.state_dict())
    for value in values[3:]:
        straight.add({"x": value, "y": value - 0.5})
        resumed.add({"x": value, "y": value - 0.5})
    one, two = straight.close_window(), resumed.close_window()
    assert one.keys() == two.keys() and all(torch.equal(one[tag], two[tag]) for tag in one)
    assert all(torch.equal(straight.means(6)[tag], resumed.means(6)[tag]) for tag in "xy")
    assert all(torch.equal(straight.counts()[tag], resumed.counts()[tag]) for tag in "xy")


def test_a_tally_reads_nothing_on_the_host_and_keeps_no_gradient() -> None:
    tally = Diagnostics(2)
    tally.add({"x": torch.ones(2, device="meta")})
    tally.add({"x": torch.ones(2, device="meta")})
    assert tally.counts()["x"].device.type == "meta"
    weight = torch.ones(2, requires_grad=True)
    own = Diagnostics(2)
    own.add({"x": weight * 2})
    assert not own.means(1)["x"].requires_grad and own.means(1)["x"].tolist() == pytest.approx([2, 2])
