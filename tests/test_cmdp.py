from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchcmdp as tc
from torchcmdp.cmdp import LayeredCMDP, stack_cmdps, unroll
from torchcmdp.errors import InvalidInput
from torchcmdp.instances import random_cmdp
from torchcmdp.layout import Layout
from torchcmdp.occupancy import pair_occupancy_of

Parts = dict[str, Tensor]


def _set(name: str, index: tuple[int, ...], value: float) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        parts[name][index] = value

    return change


def _replace(name: str, change: Callable[[Tensor], object]) -> Callable[[Parts], None]:
    def replace(parts: Parts) -> None:
        parts[name] = change(parts[name])  # type: ignore[assignment]

    return replace


REFUSALS: dict[str, tuple[Callable[[Parts], None], str]] = {
    "not a tensor": (_replace("rewards", lambda r: r.tolist()), "rewards must be a floating-point torch tensor, not a list"),
    "integers": (_replace("costs", lambda g: g.long()), "costs must be a floating-point torch tensor, not a tensor of torch.int64"),
    "other dtype": (_replace("rewards", lambda r: r.float()), "rewards is torch.float32"),
    "other device": (_replace("costs", lambda g: g.to("meta")), "costs is torch.float64 on meta"),
    "transitions shape": (_replace("transitions", lambda p: p[:-1]), r"transitions has shape .*L x S x A x S"),
    "rewards shape": (_replace("rewards", lambda r: r[:, :-1]), r"rewards has shape .*L x S x A"),
    "costs shape": (_replace("costs", lambda g: g[..., :-1]), r"costs has shape .*L x S x A"),
    "no constraint axis": (_replace("costs", lambda g: g[0]), "needs a constraint axis"),
    "batch shapes": (_replace("rewards", lambda r: r.expand(5, *r.shape)), r"batch shapes \(\), \(5,\), \(\)"),
    "nan reward": (_set("rewards", (1, 2, 0), torch.nan), "rewards is nan at layer 1, state 2, action 0; expected a number"),
    "nan transition": (
        _set("transitions", (0, 0, 1, 1), torch.nan),
        "transitions is nan at layer 0, state 0, action 1, next state 1",
    ),
    "reward above one": (
        _set("rewards", (1, 2, 0), 1.5),
        r"rewards is 1.5 at layer 1, state 2, action 0; expected a value in \[0, 1\]",
    ),
    "negative reward": (_set("rewards", (0, 0, 0), -0.5), r"rewards is -0.5 at layer 0"),
    "infinite reward": (_set("rewards", (0, 0, 0), torch.inf), r"rewards is inf at layer 0"),
    "cost below -1": (_set("costs", (1, 0, 0, 2), -2.0), r"costs is -2 at constraint 1, layer 0, state 0, action 2; .* \[-1, 1\]"),
    "negative transition": (_set("transitions", (0, 0, 1, 1), -0.1), r"transitions is -0.1 at layer 0"),
    "reward in padding": (_set("rewards", (0, 1, 0), 0.5), "rewards is 0.5 at layer 0, state 1, action 0; expected exactly zero"),
    "cost in padding": (_set("costs", (0, 2, 2, 0), 0.5), "costs is 0.5 at constraint 0, layer 2, state 2, .* exactly zero"),
    "transition in padding": (
        _set("transitions", (3, 0, 0, 1), 0.5),
        "transitions is 0.5 at layer 3, .* next state 1; .* exactly zero",
    ),
    "row sum": (
        _set("transitions", (3, 2, 1, 0), 0.5),
        "transitions sum to 0.5 at layer 3, state 2, action 1; every row must sum to one",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses_with_a_sentence(cmdp: LayeredCMDP, case: str) -> None:
    change, message = REFUSALS[case]
    parts = {"transitions": cmdp.transitions.clone(), "rewards": cmdp.rewards.clone(), "costs": cmdp.costs.clone()}
    LayeredCMDP(cmdp.layout, **parts)
    change(parts)
    with pytest.raises(InvalidInput, match=message):
        LayeredCMDP(cmdp.layout, **parts)


def test_refusal_names_the_batch_entry(cmdp: LayeredCMDP) -> None:
    rewards = torch.stack([cmdp.rewards, cmdp.rewards])
    rewards[1, 0, 0, 2] = 3
    with pytest.raises(InvalidInput, match="batch entry 1, layer 0, state 0, action 2"):
        LayeredCMDP(cmdp.layout, cmdp.transitions.expand(2, -1, -1, -1, -1), rewards, cmdp.costs.expand(2, -1, -1, -1, -1))


def test_a_batch_gives_back_its_members() -> None:
    members = [random_cmdp(seed=s) for s in range(3)]
    batch = stack_cmdps(members)
    assert batch.batch_shape == (3,) and batch.constraints == 2
    for j, member in enumerate(members):
        assert torch.equal(batch[j].transitions, member.transitions)
        assert torch.equal(batch[j].rewards, member.rewards)
        assert torch.equal(batch[j].costs, member.costs)


def test_batches_refuse_with_a_sentence(cmdp: LayeredCMDP) -> None:
    with pytest.raises(InvalidInput, match="empty list"):
        stack_cmdps([])
    with pytest.raises(InvalidInput, match="CMDP 1 has .* a batch shares one layout"):
        stack_cmdps([cmdp, random_cmdp(cmdp.layout.widths, 3, constraints=1)])
    with pytest.raises(InvalidInput, match="not a batch"):
        cmdp[0]


def test_to_changes_type_and_device(cmdp: LayeredCMDP) -> None:
    assert cmdp.to(dtype=torch.float32).dtype == torch.float32
    assert cmdp.to("meta").device.type == "meta"


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
