from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP, stack_cmdps
from torchcmdp.errors import InvalidInput
from torchcmdp.instances import random_cmdp

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
