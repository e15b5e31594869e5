from __future__ import annotations

import pytest
import torch

from torchcmdp.errors import InvalidInput
from torchcmdp.layout import Layout


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
