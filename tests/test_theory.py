from __future__ import annotations

import math

import pytest
import torch

from torchcmdp.errors import InvalidInput
from torchcmdp.layout import Layout
from torchcmdp.theory import positive_violation_bound, regret_bound, trivial_bound, violation_bound

LAYOUT = Layout((1, 3, 3, 2, 1), 3)  # L = 4, |X| = 10, |A| = 3


def test_formulas_on_numbers() -> None:
    T, delta = 10_000, 0.01
    assert regret_bound(LAYOUT, T, delta).item() == pytest.approx(14 * 4 * 100 * math.sqrt(6 * T * math.log(T * 300 / 0.01)))
    bound = violation_bound(LAYOUT, 2, T, delta, 49).item()
    assert bound == pytest.approx(61 * 4 * 10 * math.sqrt(6 * 49 * math.log(4 * T**2 * 30 / 0.01)))
    bound = positive_violation_bound(LAYOUT, 2, T, delta, 49).item()
    assert bound == pytest.approx(18 * 4 * 10 * math.sqrt(6 * 49 * math.log(4 * T * 30 / 0.01)))
    assert trivial_bound(LAYOUT, 49).item() == 196


@pytest.mark.parametrize(("which", "crossing"), [("regret", 3.5e8), ("violation", 1.0e8), ("positive", 4.7e6)])
def test_bounds_become_better_than_trivial_where_they_should(which: str, crossing: float) -> None:
    """Horizons at which each theorem first says more than L T, computed apart from this code, to two digits."""

    def ratio(horizon: int) -> float:
        bounds = {
            "regret": regret_bound(LAYOUT, horizon, 0.01),
            "violation": violation_bound(LAYOUT, 1, horizon, 0.01, horizon),
            "positive": positive_violation_bound(LAYOUT, 1, horizon, 0.01, horizon),
        }
        return (bounds[which] / trivial_bound(LAYOUT, horizon)).item()

    assert ratio(int(0.95 * crossing)) > 1 > ratio(int(1.05 * crossing))


def test_curves_grow_like_the_root_of_t_and_keep_its_shape() -> None:
    t = torch.tensor([[1.0, 4.0], [9.0, 16.0]])
    root = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for curve in (
        regret_bound(LAYOUT, 100, 0.1, t),
        violation_bound(LAYOUT, 1, 100, 0.1, t),
        positive_violation_bound(LAYOUT, 1, 100, 0.1, t),
    ):
        torch.testing.assert_close(curve / curve[0, 0], root)
    assert regret_bound(LAYOUT, 100, 0.1, torch.arange(3)).dtype == torch.float64
    assert regret_bound(LAYOUT, 100, 0.1, 100).item() == regret_bound(LAYOUT, 100, 0.1).item()
    assert torch.equal(trivial_bound(LAYOUT, t), 4 * t)


def test_without_constraints_nothing_is_violated() -> None:
    t = torch.arange(1, 4)
    assert violation_bound(LAYOUT, 0, 100, 0.1, t).tolist() == [0, 0, 0]
    assert positive_violation_bound(LAYOUT, 0, 100, 0.1, t).tolist() == [0, 0, 0]


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1])
def test_refuses_with_a_sentence(delta: float) -> None:
    for call in (
        lambda: regret_bound(LAYOUT, 10, delta),
        lambda: violation_bound(LAYOUT, 1, 10, delta, 1),
        lambda: positive_violation_bound(LAYOUT, 1, 10, delta, 1),
    ):
        with pytest.raises(InvalidInput, match="delta is"):
            call()
    with pytest.raises(InvalidInput, match="horizon is 0"):
        regret_bound(LAYOUT, 0, 0.1)
