from __future__ import annotations

from functools import partial

import pytest
import torch

from torchcmdp import instances
from torchcmdp.errors import InvalidInput
from torchcmdp.instances import random_cmdp, single_state_cmdp, two_path_cmdp
from torchcmdp.planning import safe_optimum, slater_gap


def test_same_seed_same_instance_and_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = random_cmdp(seed=5), random_cmdp(seed=5), random_cmdp(seed=6)
    assert torch.equal(state, torch.get_rng_state())
    for name in ("transitions", "rewards", "costs"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))


def test_constraints_do_not_change_the_rest() -> None:
    assert torch.equal(random_cmdp(constraints=1).transitions, random_cmdp(constraints=3).transitions)
    assert torch.equal(random_cmdp(constraints=1).rewards, random_cmdp(constraints=3).rewards)


def test_ranges_are_filled_and_padding_is_exactly_zero() -> None:
    cmdp = random_cmdp((1, 5, 9, 1), actions=6, constraints=3)
    pair = cmdp.layout.pair_mask()
    assert (cmdp.rewards[~pair] == 0).all() and (cmdp.costs[:, ~pair] == 0).all()
    assert (cmdp.transitions[~cmdp.layout.transition_mask()] == 0).all()
    assert cmdp.rewards[pair].min() < 0.1 and cmdp.rewards[pair].max() > 0.9
    assert cmdp.costs[:, pair].min() < -0.9 and cmdp.costs[:, pair].max() > 0.9


def test_transition_rows_are_dirichlet_one() -> None:
    """A component of Dirichlet(1) over n entries has mean 1/n and second moment 2 / (n (n + 1))."""
    rows = torch.cat([random_cmdp((1, 4, 4, 1), actions=50, seed=s, feasibility="any").transitions[1] for s in range(10)])
    count, square = rows.numel(), rows.square().mean().item()
    assert square == pytest.approx(2 / 20, abs=5 * (24 / (4 * 5 * 6 * 7) / count) ** 0.5)
    assert (rows > 0).all()


@pytest.mark.parametrize("seed", range(8))
def test_feasibility_is_as_asked(seed: int) -> None:
    make = partial(random_cmdp, (1, 3, 1), 2, 3, seed)
    assert slater_gap(make()) >= 0
    assert slater_gap(make(feasibility="strict", margin=0.4)) >= 0.4
    binding = make(feasibility="binding", margin=0.2)
    assert 0.1 < slater_gap(binding) <= 0.2 + 1e-12 and binding.costs.abs().max() <= 1
    tight = make(feasibility="tight")
    assert -1e-12 <= slater_gap(tight) <= 1e-9
    assert safe_optimum(tight).feasible
    assert 0.5 < tight.costs.abs().max() <= 1  # scaled down no further than needed


def test_any_does_not_ask() -> None:
    gaps = [slater_gap(random_cmdp((1, 1), 2, 3, seed, feasibility="any")) for seed in range(20)]
    assert min(gaps) < 0


def test_single_precision_is_feasible_in_its_own_rounding() -> None:
    for seed in range(5):
        tight = random_cmdp(seed=seed, feasibility="tight", dtype=torch.float32)
        assert tight.dtype == torch.float32 and safe_optimum(tight).feasible
        assert 0 <= slater_gap(tight) <= 1e-5
    assert torch.equal(random_cmdp(dtype=torch.float32).costs, random_cmdp().costs.float())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"feasibility": "certain"}, "feasibility is 'certain'"),
        ({"constraints": -1}, "constraints is -1"),
        ({"constraints": 0, "feasibility": "tight"}, "at least one constraint"),
        (
            {"widths": (1, 1), "actions": 1, "feasibility": "strict", "margin": 1.5},
            "None of 20 draws .* at least 1.5, the best has",
        ),
    ],
)
def test_refuses_with_a_sentence(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object], message: str) -> None:
    monkeypatch.setattr(instances, "MAX_DRAWS", 20)
    with pytest.raises(InvalidInput, match=message):
        random_cmdp(**arguments)  # type: ignore[arg-type]


def test_without_constraints() -> None:
    assert random_cmdp(constraints=0).costs.shape == (0, 4, 4, 3)


def test_single_state() -> None:
    cmdp = single_state_cmdp([0.1, 0.5, 0.9], [[-0.1, 0.2, 0.3], [0, 0, 1]])
    assert cmdp.layout.widths == (1, 1)
    assert cmdp.rewards.flatten().tolist() == [0.1, 0.5, 0.9]
    assert cmdp.costs.flatten(1).tolist() == [[-0.1, 0.2, 0.3], [0, 0, 1]]
    assert single_state_cmdp([0.5]).costs.shape == (0, 1, 1, 1)
    with pytest.raises(InvalidInput, match="constraint 1 are .* a list of 2 numbers"):
        single_state_cmdp([0.1, 0.2], [[0, 0], [0, 0, 0]])
    with pytest.raises(InvalidInput, match="constraint 0"):
        single_state_cmdp([0.1, 0.2], [0.1, 0.2])  # type: ignore[list-item]


def test_two_paths_needs_a_mixture() -> None:
    q = safe_optimum(two_path_cmdp()).occupancy.sum(-1)
    assert q[0, 0].tolist() == pytest.approx([0.3125, 0.6875], abs=1e-12)
