from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from tests.sparse import sparse_layout, spelled_out
from torchcmdp.errors import InvalidInput
from torchcmdp.layout import Layout, broadcast_shapes


def test_sizes() -> None:
    layout = Layout([1, 3, 2, 1], 2)
    assert layout.widths == (1, 3, 2, 1)
    assert (layout.layers, layout.width, layout.total_states) == (3, 3, 7)
    assert layout.pair_shape == (3, 3, 2)
    assert layout.transition_shape == (3, 3, 2, 3)


def test_masks_are_true_exactly_at_real_entries() -> None:
    layout = Layout((1, 3, 2, 1), 2)
    for k in range(3):
        for x in range(3):
            assert bool(layout.state_mask()[k, x]) == (x < layout.widths[k])
            for a in range(2):
                assert bool(layout.pair_mask()[k, x, a]) == (x < layout.widths[k])
                for y in range(3):
                    assert bool(layout.transition_mask()[k, x, a, y]) == (x < layout.widths[k] and y < layout.widths[k + 1])
    assert layout.next_widths().flatten().tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    ("widths", "actions", "message"),
    [
        ((1,), 2, "at least two"),
        ((1, 0, 1), 2, "empty layer 1"),
        ((2, 3, 1), 2, "start and end with 1"),
        ((1, 3, 2), 2, "start and end with 1"),
        ((1, 3, 1), 0, "at least one action"),
        ((1, 2.5, 1), 2, "whole numbers"),
        ((1, 2, 1), 1.5, "whole numbers"),
    ],
)
def test_refuses_with_a_sentence(widths: tuple[int, ...], actions: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Layout(widths, actions)


def test_check_shape_names_the_tensor_and_the_axes() -> None:
    layout = Layout((1, 3, 1), 2)
    layout.check_shape("policy", torch.zeros(7, *layout.pair_shape), kind="pair")
    with pytest.raises(InvalidInput, match=r"policy has shape \(3, 2\).*L x S x A"):
        layout.check_shape("policy", torch.zeros(3, 2), kind="pair")
    with pytest.raises(InvalidInput, match="L x S x A x S"):
        layout.check_shape("occupancy", torch.zeros(layout.pair_shape), kind="transition")


def test_masks_first_made_in_inference_mode_serve_autograd_later() -> None:
    layout = Layout((1, 5, 1), 7)
    with torch.inference_mode():
        layout.pair_mask()
    x = torch.ones(layout.pair_shape, requires_grad=True)
    (x * layout.pair_mask()).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, layout.pair_mask().to(x.dtype))


def test_masks_do_not_depend_on_the_default_device() -> None:
    with torch.device("meta"):
        mask = Layout((1, 6, 1), 5).state_mask()
    assert mask.device.type == "cpu"


def test_layouts_are_compared_by_what_they_list() -> None:
    layout = sparse_layout(seed=2)
    same = Layout(layout.widths, layout.actions, layout.successors(), layout.action_mask())
    assert same == layout and hash(same) == hash(layout) and same.config() == layout.config()
    others = [
        Layout(layout.widths, layout.actions, torch.nn.functional.pad(layout.successors(), (0, 1), value=-1), layout.action_mask()),
        sparse_layout(seed=3),
        layout.full,
        Layout(layout.widths, layout.actions),
        spelled_out(layout.full),
    ]
    assert len({layout, *others}) == 6
    assert len({str(other.config()) for other in (layout, *others)}) == 6
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert Layout((1, 2, 1), 2).config() == {"widths": [1, 2, 1], "actions": 2}  # as in folders written before there were lists


def test_a_mask_of_everything_is_no_mask() -> None:
    layout = Layout((1, 3, 2, 1), 2)
    assert Layout((1, 3, 2, 1), 2, None, layout.pair_mask()) == layout
    assert Layout((1, 3, 2, 1), 2, None, torch.ones(layout.pair_shape, dtype=torch.bool)) == layout


@pytest.mark.parametrize("layout", [sparse_layout(), sparse_layout(masked=False), sparse_layout().full, Layout((1, 3, 2, 1), 2)])
def test_masks_of_lists_agree_with_one_another(layout: Layout) -> None:
    lists, real = layout.successors(), layout.transition_mask()
    assert torch.equal(lists >= 0, real)
    assert torch.equal(real.any(-1), layout.pair_mask())
    assert torch.equal(layout.pair_mask().any(-1), layout.state_mask())
    assert (lists < torch.tensor(layout.widths[1:])[:, None, None, None]).all()
    assert torch.equal(
        layout.next_widths().expand(layout.pair_shape)[layout.pair_mask()], real.sum(-1)[layout.pair_mask()].double()
    )
    counts = layout.action_counts().expand(layout.pair_shape)[layout.pair_mask()]
    assert torch.equal(counts, layout.pair_mask().sum(-1, keepdim=True).expand(layout.pair_shape)[layout.pair_mask()].double())
    torch.testing.assert_close(layout.uniform_transitions().sum(-1), layout.pair_mask().double())


def test_dense_and_compact_are_inverse_and_nothing_is_lost() -> None:
    layout = sparse_layout()
    slots = torch.rand(3, *layout.transition_shape) * layout.transition_mask()
    spread = layout.dense(slots)
    assert spread.shape == (3, *layout.full.transition_shape)
    assert torch.equal(layout.compact(spread), slots)
    for k, x, a, j in layout.transition_mask().nonzero().tolist():
        assert torch.equal(spread[:, k, x, a, layout.successors()[k, x, a, j]], slots[:, k, x, a, j])
    k, x, a, y = ((spread[0] == 0) & layout.full.transition_mask()).nonzero()[0].tolist()
    spread[:, k, x, a, y] = 1
    with pytest.raises(InvalidInput, match=f"layer {k}, state {x}, action {a}, next state {y}"):
        layout.compact(spread)


@pytest.mark.parametrize("layout", [sparse_layout(), sparse_layout().full])
def test_arrivals_are_the_transpose_of_ahead(layout: Layout) -> None:
    generator = torch.Generator().manual_seed(0)
    flow = torch.rand(2, *layout.transition_shape, generator=generator, dtype=torch.float64) * layout.transition_mask()
    values = torch.rand(2, layout.layers, layout.width, generator=generator, dtype=torch.float64)
    torch.testing.assert_close((flow * layout.ahead(values)).sum(), (layout.arrivals(flow) * values).sum())
    for k in range(layout.layers):
        torch.testing.assert_close(layout.arrivals(flow[:, k], k), layout.arrivals(flow)[:, k], rtol=0, atol=0)
        here = layout.ahead(values)[:, k].expand_as(flow[:, k])
        torch.testing.assert_close(layout.ahead(values[:, k], k).expand_as(here), here, rtol=0, atol=0)


def _lists(k: int, x: int, a: int, row: list[int]) -> torch.Tensor:
    lists = Layout((1, 3, 2, 1), 2).successors()
    lists[k, x, a] = torch.tensor(row)
    return lists


@pytest.mark.parametrize(
    ("successors", "mask", "message"),
    [
        (_lists(1, 2, 1, [0, 2, -1]), None, "layer 1, state 2, action 1; expected states of the next layer"),
        (_lists(1, 2, 1, [0, -2, -1]), None, "layer 1, state 2, action 1; expected states of the next layer"),
        (_lists(0, 0, 1, [2, 0, 1]), None, "layer 0, state 0, action 1; expected every successor once, in increasing"),
        (_lists(0, 0, 1, [1, -1, 1]), None, "layer 0, state 0, action 1; expected every successor once"),
        (_lists(0, 0, 1, [-1, -1, -1]), None, "layer 0, state 0, action 1; expected one successor at least"),
        (Layout((1, 3, 2, 1), 2).successors()[..., :1], None, "state 1 of layer 1 follows no pair"),
        (torch.zeros(3, 3, 2), None, "whole numbers of shape"),
        (torch.zeros(3, 3, 2, 1), None, "whole numbers of shape"),
        (torch.zeros(3, 3, 2, 0, dtype=torch.int64), None, "whole numbers of shape"),
        (None, torch.zeros(3, 3, 2, dtype=torch.bool), "no action at layer 0, state 0"),
        (None, torch.ones(3, 3, 2), "expected bool"),
        (None, torch.ones(3, 3, dtype=torch.bool), "expected bool"),
    ],
)
def test_refuses_lists_and_masks_with_a_sentence(successors: torch.Tensor | None, mask: torch.Tensor | None, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Layout((1, 3, 2, 1), 2, successors, mask)


def test_shapes_broadcast_as_in_torch() -> None:
    for shapes in ([(3, 1), (4,)], [(), (2,)], [(2, 0), (1, 1)], [(5, 1, 2), (3, 1), ()], [()]):
        assert broadcast_shapes(*shapes) == torch.broadcast_shapes(*shapes)
    for shapes in ([(3,), (4,)], [(0,), (2,)]):
        with pytest.raises(RuntimeError, match="do not broadcast"):
            broadcast_shapes(*shapes)


def test_a_cmdp_and_a_safe_set_import_no_computer_algebra() -> None:
    made = "cmdp = tc.two_path_cmdp(); P = cmdp.transitions; tc.SafeSet(cmdp.layout, P, P, cmdp.costs)"
    code = f"import sys, torchcmdp as tc; {made}; sys.exit('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
