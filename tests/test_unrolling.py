"""MDPs unrolled into layers: the same MDP, with or without successor lists, and budgets that somebody can keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp import InvalidInput, Layout, pair_occupancy_of, unroll


def _stationary(states: int = 5, actions: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """A random sparse MDP in which not every state is reachable in one step."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(states, actions, states, generator=generator, dtype=torch.float64)
    keep = torch.rand(states, actions, states, generator=generator) < 0.4
    weights = weights * keep + torch.eye(states).roll(1, 1).unsqueeze(1)  # from x one can always reach x + 1
    rewards = torch.rand(states, actions, generator=generator, dtype=torch.float64)
    costs = 2 * torch.rand(3, states, actions, generator=generator, dtype=torch.float64) - 1
    return weights / weights.sum(-1, keepdim=True), rewards, costs


@pytest.mark.parametrize("horizon", [1, 2, 4, 7])
def test_unrolling_agrees_with_powers_of_the_stationary_chain(horizon: int) -> None:
    transitions, rewards, costs = _stationary()
    policy = torch.rand(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    policy = policy / policy.sum(-1, keepdim=True)
    chain = (policy.unsqueeze(-1) * transitions).sum(1)
    cmdp = unroll(transitions, rewards, costs, horizon=horizon, start=2)

    reachable = [torch.linalg.matrix_power((chain > 0).double(), k)[2].nonzero().squeeze(-1) for k in range(horizon)]
    assert cmdp.layout.widths == (*(len(states) for states in reachable), 1)
    layered = torch.zeros(cmdp.layout.pair_shape, dtype=torch.float64)
    for k, states in enumerate(reachable):
        layered[k, : len(states)] = policy[states]
    q = pair_occupancy_of(layered, cmdp.transitions)

    visits = [torch.linalg.matrix_power(chain, k)[2] for k in range(horizon)]
    for k, states in enumerate(reachable):
        torch.testing.assert_close(q[k, : len(states)].sum(-1), visits[k][states])
    pairs = sum(visits).unsqueeze(-1) * policy  # type: ignore[union-attr]
    torch.testing.assert_close((q * cmdp.rewards).sum(), (pairs * rewards).sum())
    torch.testing.assert_close((q * cmdp.costs).sum(dim=(1, 2, 3)), (pairs * costs).sum(dim=(1, 2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"horizon": 0}, "horizon is 0; it must be a whole number of at least 1"),
        ({"start": 5}, "between 0 and 4"),
        ({"start": -1}, "between 0 and 4"),
        ({"rewards": torch.zeros(5)}, "needs transitions"),
        ({"transitions": torch.zeros(5, 2, 4)}, "transitions has shape"),
        ({"costs": torch.zeros(5, 2)}, "costs has shape"),
        ({"costs": torch.tensor(1.0)}, "costs has shape"),
        (
            {"transitions": torch.zeros(5, 0, 5), "rewards": torch.zeros(5, 0), "costs": torch.zeros(1, 5, 0)},
            "transitions has shape",
        ),
        ({"transitions": -torch.ones(5, 2, 5, dtype=torch.float64)}, r"transitions is -1 at index \[0, 0, 0\]; expected a prob"),
    ],
)
def test_unroll_refuses_with_a_sentence(change: dict[str, object], message: str) -> None:
    transitions, rewards, costs = _stationary()
    arguments = {"transitions": transitions, "rewards": rewards, "costs": costs, "horizon": 3, "start": 0, **change}
    with pytest.raises(InvalidInput, match=message):
        unroll(**arguments)  # type: ignore[arg-type]


def test_padding_is_exactly_zero() -> None:
    cmdp = unroll(*_stationary(), horizon=5)
    assert isinstance(cmdp.layout, Layout) and min(cmdp.layout.widths[1:-1]) < cmdp.layout.width
    assert (cmdp.transitions[~cmdp.layout.transition_mask()] == 0).all()
    assert (cmdp.rewards[~cmdp.layout.pair_mask()] == 0).all()
    assert (cmdp.costs[:, ~cmdp.layout.pair_mask()] == 0).all()


def _walk(states: int, starts: int, actions: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Deterministic moves on a ring of states, and one more that leads to the first of them at random, whatever one does."""
    transitions = torch.zeros(states + 1, actions, states + 1, dtype=torch.float64)
    for x in range(states):
        for a in range(actions):
            transitions[x, a, (x + a + 1) % states] = 1
    chances = torch.arange(1, starts + 1, dtype=torch.float64)
    transitions[states, :, :starts] = chances / chances.sum()
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(states + 1, actions, generator=generator, dtype=torch.float64)
    costs = torch.rand(1, states + 1, actions, generator=generator, dtype=torch.float64) - 0.7
    rewards[states], costs[:, states] = 0.5, 0.25
    return transitions, rewards, costs


def test_unroll_lists_successors_where_that_halves_the_tensors() -> None:
    tables = _walk(6, 3)
    cmdp = unroll(*tables, horizon=5, start=6)
    assert cmdp.layout.transition_shape[-1] == 3 and cmdp.layout.width == 6  # three starts are half of six states
    assert unroll(*_walk(6, 4), horizon=5, start=6).layout.lists is None
    assert unroll(*tables, horizon=5, start=6, sparse=False).layout.lists is None
    assert unroll(*_walk(6, 4), horizon=5, start=6, sparse=True).layout.slots == 4
    assert unroll(*tables, horizon=1, start=6, sparse=True).layout.transition_shape == (1, 1, 2, 1)


def test_lists_of_an_unrolled_mdp_are_the_same_mdp() -> None:
    tables = _walk(6, 3)
    listed, full = (unroll(*tables, horizon=5, start=6, sparse=sparse) for sparse in (True, False))
    assert listed.layout.full == full.layout
    assert torch.equal(listed.layout.dense(listed.transitions), full.transitions)
    assert torch.equal(listed.rewards, full.rewards) and torch.equal(listed.costs, full.costs)
    assert (listed.transitions[listed.layout.transition_mask()] > 0).all()


@pytest.mark.parametrize("starts", [17, 27, 64, 65])
def test_many_starts_are_drawn_in_several_layers(starts: int) -> None:
    tables = _walk(70, starts)
    drawn, full = (unroll(*tables, horizon=4, start=70, sparse=sparse) for sparse in (None, False))
    layout, extra = drawn.layout, drawn.layout.layers - 4
    assert layout.slots <= 8 and extra == (1 if starts <= 64 else 2)
    assert layout.widths[extra + 1 :] == full.layout.widths[1:]
    assert layout.pair_mask()[: extra + 1].sum(-1).max() == 1
    assert (drawn.rewards[1 : extra + 1] == 0).all() and (drawn.costs[:, 1 : extra + 1] == 0).all()
    reached = tc.occupancy_of(tc.uniform_policy(layout), drawn.transitions, layout)
    torch.testing.assert_close(layout.arrivals(reached)[extra, :starts], full.transitions[0, 0, 0, :starts], rtol=0, atol=1e-15)
    torch.testing.assert_close(tc.safe_optimum(drawn).value, tc.safe_optimum(full).value, rtol=0, atol=1e-9)


def test_a_start_in_which_actions_matter_is_left_alone() -> None:
    transitions, rewards, costs = _walk(70, 30)
    rewards[70, 1] = 0.4
    cmdp = unroll(transitions, rewards, costs, horizon=4, start=70, sparse=True)
    assert cmdp.layout.layers == 4 and cmdp.layout.slots == 30


PAY = np.array([[3, 0], [5, 1]])
# to earn is to pay: whoever keeps one of these costs low has a lot of the other
BOTH = np.array([[[4.0, 0.0], [4.0, 0.0]], [[0.0, 4.0], [0.0, 4.0]]])
STAY = np.stack([np.eye(2)] * 2, axis=1)


def test_budgets_that_no_policy_keeps_together_are_refused() -> None:
    assert unroll(STAY, PAY, BOTH, horizon=3, budget=[6.0, 6.0]).units.budget.tolist() == [6, 6]
    for budget in (5.9, [2.0, 9.9], [0.0, 11.9]):  # three steps cost 12 together, and each may cost nothing
        with pytest.raises(InvalidInput, match="no policy keeps all 2 of the constraints at once"):
            unroll(STAY, PAY, BOTH, horizon=3, budget=budget)
    with pytest.raises(InvalidInput, match="no policy keeps all 2 of the constraints at once"):
        unroll(STAY, PAY, BOTH * [[[1.0]], [[-1.0]]], horizon=3, budget=[6.0, -5.9], sense=["<=", ">="])
    with pytest.raises(InvalidInput, match="budget is -1 for constraint 0, which no policy keeps: every one costs at least 0"):
        unroll(STAY, PAY, BOTH, horizon=3, budget=-1.0)


def test_arrays_of_all_types_of_numbers_are_taken() -> None:
    """Whole numbers, single precision and tensors side by side: what is an array becomes a tensor of the others' type."""
    expected = unroll(STAY, PAY, BOTH, horizon=3, budget=8.0)
    for tables in (
        (STAY.astype(int), PAY, BOTH.astype(np.float32)),
        (torch.from_numpy(STAY), PAY, BOTH.astype(np.int8)),
        (STAY, torch.from_numpy(PAY).double(), BOTH.astype(">f8")),
    ):
        found = unroll(*tables, horizon=3, budget=8.0)
        assert torch.equal(found.costs, expected.costs) and torch.equal(found.rewards, expected.rewards)
    assert unroll(*(table.astype(np.float32) for table in (STAY, PAY, BOTH)), horizon=3, budget=8.0).dtype == torch.float32
    layers = tc.LayeredCMDP(expected.layout, *(getattr(expected, name).numpy() for name in ("transitions", "rewards", "costs")))
    assert torch.equal(layers.costs, expected.costs) and torch.equal(tc.Fixed(layers.costs.numpy()).values, expected.costs)
