"""The batched optimistic linear program against HiGHS on the extended program, and its two backends against each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torchcmdp as tc
from torchcmdp.optimistic import ColumnGeneration, optimistic_optimum
from torchcmdp.safe_set import SafeSet
from torchcmdp.status import INFEASIBLE, MAX_ITERATIONS, SOLVED
from train import extended_lp

Instance = tuple[torch.Tensor, SafeSet]


def random_instance(seed: int) -> Instance:
    """Any size, kernel width, and tilt of the costs; rounded numbers and repeated constraints make degenerate programs."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    layers, actions, m = int(rng.integers(1, 5)), int(rng.integers(1, 5)), seed % 5
    layout = tc.Layout((1, *rng.integers(1, 6, size=layers - 1).tolist(), 1), actions)
    pairs, real = layout.pair_mask(), layout.transition_mask()

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    rewards = uniform(*layout.pair_shape) * pairs
    costs = (2 * uniform(m, *layout.pair_shape) - 1 + rng.choice([-0.3, 0.0, 0.3, 0.8])) * pairs
    if rng.random() < 0.3:
        costs = (2 * costs).round() / 2
    if rng.random() < 0.3:
        rewards = (2 * rewards).round() / 2
    if m > 1 and rng.random() < 0.3:
        costs[1] = costs[0]
    kernel = uniform(*layout.transition_shape) * real
    kernel = torch.where(real, kernel / kernel.sum(-1, keepdim=True), 0.0)
    width = float(rng.choice([0.0, 0.05, 0.3, 1.5]))
    return rewards, SafeSet(layout, (kernel - width).clamp_min(0), (kernel + width).clamp_max(1) * real, costs)


def paper_size_batch(batch: int, constraints: int, seed: int = 0) -> Instance:
    """A batch at the paper's size with random intervals, some of them infeasible."""
    cmdp = tc.random_cmdp((1, 4, 4, 4, 1), 3, constraints, seed)
    generator = torch.Generator().manual_seed(seed)
    layout = cmdp.layout
    shift = torch.rand(batch, 1, 1, 1, 1, generator=generator, dtype=torch.float64) - 0.2
    costs = (cmdp.costs + shift) * layout.pair_mask()
    width = 0.3 * torch.rand(batch, 1, 1, 1, 1, generator=generator, dtype=torch.float64)
    lower, upper = (cmdp.transitions - width).clamp_min(0), (cmdp.transitions + width).clamp_max(1) * layout.transition_mask()
    return cmdp.rewards, SafeSet(layout, lower, upper, costs)


def safety(safe_set: SafeSet, occupancy: torch.Tensor) -> torch.Tensor:
    return (safe_set.costs * occupancy.sum(-1).unsqueeze(-4)).sum(dim=(-1, -2, -3))


def test_agrees_with_highs_on_200_instances() -> None:
    infeasible = 0
    for seed in range(200):
        rewards, safe_set = random_instance(seed)
        found = optimistic_optimum(rewards, safe_set)
        arrays = (tensor.numpy() for tensor in (rewards, safe_set.lower, safe_set.upper, safe_set.costs))
        value, excess = extended_lp.solve(safe_set.layout, *arrays)
        assert abs(float(found.value) - value) < 1e-7, seed
        assert abs(float(found.excess) - excess) < 1e-9, seed
        assert int(found.status) == (INFEASIBLE if excess else SOLVED), seed
        limit = excess + 1e-7 if excess else 0.0
        assert (safety(safe_set, found.occupancy) <= limit + 1e-9).all(), seed
        assert float(tc.flow_residual(found.occupancy)) < 1e-9
        assert float(tc.interval_residual(found.occupancy, safe_set.lower, safe_set.upper)) < 1e-9
        assert abs(float((found.occupancy.sum(-1) * rewards).sum() - found.value)) < 1e-9
        infeasible += int(excess > 0)
    assert 20 < infeasible < 180  # both kinds were seen


@pytest.mark.parametrize("constraints", [0, 1, 2, 4])
def test_backends_agree(constraints: int) -> None:
    rewards, safe_set = paper_size_batch(12, constraints)
    compiled = optimistic_optimum(rewards, safe_set, solver=ColumnGeneration(backend="compiled"))
    torched = optimistic_optimum(rewards, safe_set, solver=ColumnGeneration(backend="torch"))
    assert torch.equal(compiled.status, torched.status)
    for name in ("value", "excess", "multipliers"):
        torch.testing.assert_close(getattr(compiled, name), getattr(torched, name), rtol=1e-12, atol=1e-12)
    fixed = optimistic_optimum(rewards, safe_set, solver=ColumnGeneration(fixed_iterations=int(torched.iterations.max()) + 2))
    assert torch.equal(fixed.status, torched.status) and torch.equal(fixed.value, torched.value)


def test_multipliers_and_residual_are_a_certificate() -> None:
    """By weak duality the unconstrained optimum of rewards - multipliers * costs is no less than the value."""
    rewards, safe_set = paper_size_batch(30, 3)
    found = optimistic_optimum(rewards, safe_set)
    solved = found.status == SOLVED
    assert solved.any() and (~solved).any()
    lagrangian = rewards - (found.multipliers[..., None, None, None] * safe_set.costs).sum(-4)
    free = SafeSet(safe_set.layout, safe_set.lower, safe_set.upper, safe_set.costs[:, :0])
    bound = optimistic_optimum(lagrangian, free).value
    assert (found.multipliers >= 0).all() and (found.multipliers[solved] > 0).any()
    assert torch.allclose(bound[solved], found.value[solved], atol=1e-9)
    assert (found.residual < 1e-9).all()


def test_known_kernel_gives_the_safe_optimum() -> None:
    cmdp = tc.stack_cmdps([tc.random_cmdp((1, 3, 4, 1), 3, 2, seed) for seed in range(10)])
    found = optimistic_optimum(cmdp.rewards, SafeSet(cmdp.layout, cmdp.transitions, cmdp.transitions, cmdp.costs))
    assert torch.allclose(found.value, tc.safe_optimum(cmdp).value, atol=1e-9)


def test_batch_independence_and_padding() -> None:
    rewards, safe_set = paper_size_batch(7, 2)
    layout = safe_set.layout
    together = optimistic_optimum(rewards, safe_set)
    assert (together.occupancy[:, ~layout.transition_mask()] == 0).all()
    for j in range(7):
        alone = optimistic_optimum(rewards, SafeSet(layout, safe_set.lower[j], safe_set.upper[j], safe_set.costs[j]))
        assert alone.value.shape == () and torch.equal(alone.value, together.value[j])
        assert torch.equal(alone.occupancy, together.occupancy[j])


def test_many_constraints_and_no_progress_are_survived() -> None:
    cmdp = tc.random_cmdp((1, 4, 4, 1), 3, 1, 3)
    costs = cmdp.costs.expand(30, -1, -1, -1) + 0.01 * torch.arange(30, dtype=torch.float64)[:, None, None, None]
    costs = (costs * cmdp.layout.pair_mask()).contiguous()
    safe_set = SafeSet(cmdp.layout, cmdp.transitions, cmdp.transitions, costs)
    found = optimistic_optimum(cmdp.rewards, safe_set)
    assert int(found.status) in (SOLVED, INFEASIBLE) and float(safety(safe_set, found.occupancy).max()) <= 1e-6 + found.excess
    given_up = optimistic_optimum(cmdp.rewards, safe_set, solver=ColumnGeneration(max_iterations=2))
    assert int(given_up.status) == MAX_ITERATIONS and float(tc.flow_residual(given_up.occupancy)) < 1e-9


def test_float32_in_float32_out() -> None:
    rewards, safe_set = paper_size_batch(3, 2)
    small = SafeSet(safe_set.layout, *(t.float() for t in (safe_set.lower, safe_set.upper, safe_set.costs)))
    found = optimistic_optimum(rewards.float(), small)
    assert found.value.dtype == found.occupancy.dtype == torch.float32
    assert torch.allclose(found.value.double(), optimistic_optimum(rewards, safe_set).value, atol=1e-4)


def test_runs_on_the_meta_device() -> None:
    rewards, safe_set = paper_size_batch(3, 2)
    tensors = (t.to("meta") for t in (safe_set.lower, safe_set.upper, safe_set.costs))
    found = optimistic_optimum(rewards.to("meta"), SafeSet(safe_set.layout, *tensors), solver=ColumnGeneration(fixed_iterations=4))
    assert found.occupancy.shape == (3, *safe_set.layout.transition_shape)


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_bad_numbers_are_named(backend: str) -> None:
    rewards, safe_set = paper_size_batch(3, 2)
    broken = rewards.clone()
    broken[2, 1, 2] = torch.nan
    with pytest.raises(tc.InvalidInput, match="rewards cannot be used at instance 0, layer 2, state 1, action 2"):
        optimistic_optimum(broken, safe_set, solver=ColumnGeneration(backend=backend))
    low = safe_set.lower.clone()
    low[1, 0, 0, 1] = 0.9
    with pytest.raises(tc.InvalidInput, match="instance 1, layer 0, state 0, action 1"):
        optimistic_optimum(
            rewards, SafeSet(safe_set.layout, low, safe_set.upper, safe_set.costs), solver=ColumnGeneration(backend=backend)
        )


def test_backend_is_checked() -> None:
    rewards, safe_set = paper_size_batch(1, 1)
    with pytest.raises(tc.InvalidInput, match="'gpu'.*'auto', 'compiled', 'torch'"):
        optimistic_optimum(rewards, safe_set, solver=ColumnGeneration(backend="gpu"))


@pytest.mark.parametrize("seed", [7, 14])
def test_what_is_in_the_basis_does_not_enter_again(seed: int) -> None:
    """Costs of a million, two of them the same: rounding of two kinds let a basic occupancy seem to promise more."""
    cmdp = tc.random_cmdp((1, 6, 1, 7, 1), actions=2, constraints=3, seed=seed)
    costs = (4 * cmdp.costs + 1.2).round() * 5e5 * cmdp.layout.pair_mask()
    costs[1] = costs[0]
    real = cmdp.layout.transition_mask()
    lower, upper = (cmdp.transitions - 0.05).clamp_min(0), (cmdp.transitions + 0.05).clamp_max(1) * real
    found, expected = (
        optimistic_optimum(cmdp.rewards, SafeSet(cmdp.layout, lower, upper, costs), solver=ColumnGeneration(backend=backend))
        for backend in ("compiled", "torch")
    )
    assert found.status == expected.status == INFEASIBLE
    torch.testing.assert_close(found.value, expected.value, rtol=1e-7, atol=0)


def test_a_basis_that_rounding_made_singular_ends_the_search() -> None:
    """Costs that overflow; what follows from NaN must not be followed into memory."""
    cmdp = tc.random_cmdp((1, 6, 1, 7, 1), actions=2, constraints=2, seed=1)
    costs = 1e308 * (cmdp.costs.abs() + 0.1 * cmdp.layout.pair_mask()).clamp_max(1)
    lower = upper = cmdp.transitions
    solver = ColumnGeneration(backend="compiled")
    assert optimistic_optimum(cmdp.rewards, SafeSet(cmdp.layout, lower, upper, costs), solver=solver).status == MAX_ITERATIONS
