from __future__ import annotations

import json

import pytest
import torch

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput
from torchcmdp.processes import Bernoulli, Fixed, Process, fingerprint


@pytest.mark.parametrize("low", [0.0, -1.0, -0.5])
def test_bernoulli_takes_two_values_with_the_right_mean(low: float) -> None:
    means = torch.linspace(low, 1, 7, dtype=torch.float64)
    process = Bernoulli(means.view(7, 1, 1), low=low)
    n = 20_000
    uniforms = torch.rand(n, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = process.observe(means.expand(n, 7), uniforms)
    assert set(seen.unique().tolist()) == {low, 1.0}
    p = (means - low) / (1 - low)
    sigma = (1 - low) * (p * (1 - p) / n).sqrt()
    assert ((seen.mean(0) - means).abs() <= 5 * sigma).all()  # with equality at the ends, where nothing is random


def test_certain_outcomes_are_certain_at_both_ends_of_the_unit_interval() -> None:
    edge = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    for low in (0.0, -1.0, -0.3):
        process = Bernoulli(torch.zeros(1, 1, 1), low=low)
        assert (process.observe(torch.full((2,), 1.0, dtype=torch.float64), edge) == 1).all()
        assert (process.observe(torch.full((2,), low, dtype=torch.float64), edge) == low).all()


def test_fixed_shows_its_mean(cmdp: LayeredCMDP) -> None:
    process = Fixed(cmdp.costs)
    seen = torch.rand(4, 4, 2, dtype=torch.float64)
    assert torch.equal(process.observe(seen, torch.rand(4, 4, 2)), seen)
    assert torch.equal(process.values, cmdp.costs)


@pytest.mark.parametrize("process", [Bernoulli, Fixed])
def test_values_are_the_mean_and_advancing_changes_nothing(cmdp: LayeredCMDP, process: type[Bernoulli] | type[Fixed]) -> None:
    rewards = process(cmdp.rewards)
    rewards.advance(torch.zeros(2, *cmdp.layout.pair_shape))
    assert torch.equal(rewards.values, cmdp.rewards)
    assert (rewards.values[~cmdp.layout.pair_mask()] == 0).all()
    assert rewards.state_dict() == {}
    rewards.load_state_dict({})


def test_type_follows_the_mean() -> None:
    mean = torch.full((1, 1, 2), 0.5, dtype=torch.float32)
    seen = Bernoulli(mean, low=-1).observe(mean.view(1, 2), torch.rand(1, 2, dtype=torch.float64))
    assert seen.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bernoulli(torch.full((1, 1, 1), -0.5)), r"-0.5 at index \[0, 0, 0\]; expected a value in \[0, 1\]"),
        (lambda: Bernoulli(torch.full((1, 1, 1), 1.5), low=-1), r"expected a value in \[-1, 1\]"),
        (lambda: Bernoulli(torch.full((1, 1, 1), torch.nan)), "mean of Bernoulli is nan"),
        (lambda: Fixed(torch.full((1, 1, 1), 2.0)), "mean of Fixed is 2"),
        (lambda: Fixed(torch.zeros(1, 1, 1, dtype=torch.int64)), "floating-point tensor"),
        (lambda: Fixed([0.5]), "not a list"),  # type: ignore[arg-type]
        (lambda: Fixed(torch.zeros(3, 2)), r"ends in \(L x S x A\)"),
        (lambda: Bernoulli(torch.zeros(1, 1, 1), low=0.5), "low is 0.5"),
        (lambda: Bernoulli(torch.zeros(1, 1, 1), low=-2), "low is -2"),
        (lambda: Fixed(torch.zeros(1, 1, 1)).load_state_dict({"values": 1}), "Fixed keeps no state, but was given values"),
    ],
)
def test_refuses_with_a_sentence(make: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()  # type: ignore[operator]


def test_config_is_json_and_tells_processes_apart(cmdp: LayeredCMDP) -> None:
    configs = [
        p.config() for p in (Bernoulli(cmdp.rewards), Bernoulli(cmdp.rewards, -1), Bernoulli(cmdp.rewards / 2), Fixed(cmdp.rewards))
    ]
    assert len({json.dumps(config) for config in configs}) == 4
    assert configs[0] == Bernoulli(cmdp.rewards.clone()).config()
    assert Process().config() == {"name": "Process"}


def test_fingerprints_see_shape_type_and_contents() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert fingerprint(x) == fingerprint(x.clone()) == fingerprint(x.T.contiguous().T)
    assert len({fingerprint(t) for t in (x, x.view(3, 2), x.double(), x + 1, x.to("meta"))}) == 5
