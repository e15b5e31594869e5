from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchcmdp import occupancy as occ
from torchcmdp.cmdp import LayeredCMDP, stack_cmdps
from torchcmdp.instances import random_cmdp
from torchcmdp.layout import Layout

MakePolicy = Callable[..., Tensor]


def test_occupancy_of_is_the_sum_over_paths(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    pi, P = random_policy(cmdp.layout), cmdp.transitions
    q = torch.zeros_like(P)
    layers, _, actions, _ = P.shape

    def walk(k: int, x: int, probability: Tensor) -> None:
        for a in range(actions):
            for y in range(cmdp.layout.widths[k + 1]):
                step = probability * pi[k, x, a] * P[k, x, a, y]
                q[k, x, a, y] += step
                if k + 1 < layers:
                    walk(k + 1, y, step)

    walk(0, 0, torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(occ.occupancy_of(pi, P), q, rtol=0, atol=1e-13)
    torch.testing.assert_close(occ.pair_occupancy_of(pi, P), q.sum(-1), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_every_layer_has_unit_mass_and_conserves_flow(
    cmdp: LayeredCMDP, random_policy: MakePolicy, dtype: torch.dtype, tolerance: float
) -> None:
    q = occ.occupancy_of(random_policy(cmdp.layout, 4, dtype=dtype), cmdp.transitions.to(dtype))
    assert q.dtype == dtype
    torch.testing.assert_close(q.sum(dim=(-1, -2, -3)), torch.ones(4, 4, dtype=dtype), rtol=0, atol=tolerance)
    assert (occ.flow_residual(q) <= tolerance).all()


def test_round_trip(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    pi = random_policy(cmdp.layout, 2, 3)
    q = occ.occupancy_of(pi, cmdp.transitions)
    torch.testing.assert_close(occ.policy_of(q, cmdp.layout), pi, rtol=1e-12, atol=0)
    torch.testing.assert_close(occ.transitions_of(q, cmdp.layout), cmdp.transitions.expand_as(q), rtol=1e-12, atol=0)


def test_batches_broadcast_and_equal_their_members(random_policy: MakePolicy) -> None:
    for widths in ((1, 3, 2, 1), (1, 1)):
        members = [random_cmdp(widths, seed=s) for s in range(3)]
        batch = stack_cmdps(members)
        policy = random_policy(batch.layout)
        pairs = occ.pair_occupancy_of(policy, batch.transitions)
        assert pairs.shape == (3, *batch.layout.pair_shape)
        for j, member in enumerate(members):
            torch.testing.assert_close(pairs[j], occ.pair_occupancy_of(policy, member.transitions), rtol=0, atol=1e-15)


def test_unreached_states_and_pairs_get_uniform_rows(layout: Layout) -> None:
    zero = torch.zeros(layout.transition_shape, dtype=torch.float64)
    assert torch.equal(occ.policy_of(zero, layout), occ.uniform_policy(layout))
    rows = occ.transitions_of(zero, layout)
    for k, n in enumerate(layout.widths[1:]):
        assert (rows[k, : layout.widths[k], :, :n] == 1 / n).all()


def test_gradient_through_an_unreached_state_is_finite(layout: Layout) -> None:
    q = occ.uniform_occupancy(layout)
    q[1, 0] = 0
    q.requires_grad_()
    (occ.policy_of(q, layout).square().sum() + occ.transitions_of(q, layout).square().sum()).backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_nan_shows(layout: Layout) -> None:
    q = occ.uniform_occupancy(layout)
    q[1, 1, 2, 0] = torch.nan
    assert occ.policy_of(q, layout)[1, 1].isnan().all()
    assert occ.transitions_of(q, layout)[1, 1, 2, :2].isnan().all()
    assert not occ.policy_of(q, layout)[1, 0].isnan().any()


def test_first_occupancy_is_that_of_uniform_policy_and_transitions(layout: Layout) -> None:
    q = occ.uniform_occupancy(layout)
    for k in range(layout.layers):
        expected = 1 / (layout.widths[k] * layout.actions * layout.widths[k + 1])
        torch.testing.assert_close(q[k].max(), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    uniform_kernel = occ.transitions_of(torch.zeros_like(q), layout)
    torch.testing.assert_close(q, occ.occupancy_of(occ.uniform_policy(layout), uniform_kernel), rtol=1e-13, atol=0)
    assert occ.flow_residual(q) < 1e-15


def test_flow_residual_is_the_size_of_the_leak(layout: Layout) -> None:
    q = occ.uniform_occupancy(layout)
    for k, tolerance in ((0, 1e-12), (2, 1e-12)):
        leaky = q.clone()
        leaky[k, 0, 0, 1] += 0.25
        torch.testing.assert_close(occ.flow_residual(leaky), torch.tensor(0.25, dtype=torch.float64), rtol=0, atol=tolerance)
    assert abs(occ.flow_residual(0.75 * q) - 0.25) < 1e-12  # conserved, but too little of it
    assert occ.flow_residual(torch.full((1, 1, 2, 1), 0.25)) == 0.5


def test_interval_residual(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    P = cmdp.transitions
    q = occ.occupancy_of(random_policy(cmdp.layout), P)
    assert occ.interval_residual(q, P, P) < 1e-15
    mass = q.sum(-1)[0, 0, 0]
    low, high = P.clone(), P.clone()
    low[0, 0, 0, 1] += 0.1
    high[0, 0, 0, 2] -= 0.2
    torch.testing.assert_close(occ.interval_residual(q, low, P), 0.1 * mass)
    torch.testing.assert_close(occ.interval_residual(q, P, high), 0.2 * mass)
    negative = torch.zeros_like(q)
    negative[1, 0, 0, :2] = torch.tensor([-0.3, 0.5])
    torch.testing.assert_close(
        occ.interval_residual(negative, torch.full_like(q, -9), torch.full_like(q, 9)), torch.tensor(0.3, dtype=q.dtype)
    )


def test_padding_is_exactly_zero(cmdp: LayeredCMDP, random_policy: MakePolicy) -> None:
    layout = cmdp.layout
    q = occ.occupancy_of(random_policy(layout), cmdp.transitions)
    pair, transition = ~layout.pair_mask(), ~layout.transition_mask()
    for tensor in (q, occ.transitions_of(q, layout), occ.transitions_of(0 * q, layout), occ.uniform_occupancy(layout)):
        assert (tensor[transition] == 0).all()
    pairs = (occ.pair_occupancy_of(random_policy(layout), cmdp.transitions), occ.policy_of(q, layout), occ.policy_of(0 * q, layout))
    for tensor in (*pairs, occ.uniform_policy(layout)):
        assert (tensor[pair] == 0).all()
