"""The compiled projection: against independent solvers, against itself in other units and other geometries, and at its worst."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.projection_instances import clarabel_projection, least_largest_violation, one, random_instances
from tests.sparse import supported
from torchcmdp.kernels.cpu import entry
from torchcmdp.kernels.geometry import Geometry, geometry_of
from torchcmdp.kernels.limits import HIGHEST_CAP
from torchcmdp.kernels.projection import ELASTIC, INVALID, SOLVED, Batch, Limits, project_batch
from torchcmdp.kernels.quadratic import quadratic
from torchcmdp.kernels.work import workspace
from torchcmdp.layout import Layout
from torchcmdp.projection import Newton, project
from torchcmdp.projection.problem import LOG_FLOOR
from torchcmdp.projection.torch_multipliers import units
from torchcmdp.safe_set import SafeSet
from train.bench.fuzz import wild_instances

CAP = 200.0
SIZES = [((1, 3, 3, 1), 2, 1), ((1, 2, 4, 3, 1), 3, 2), ((1, 4, 1), 2, 3), ((1, 1), 3, 2), ((1, 3, 2, 1), 2, 0)]


def solve(target: Tensor, safe_set: SafeSet, geometry: Geometry | None = None, cap: float = CAP) -> Batch:
    """The kernel on a batch of padded tensors."""
    layout = safe_set.layout
    batch, pairs, m = target.shape[0], int(np.prod(layout.pair_shape)), safe_set.constraints
    flat = [np.ascontiguousarray(t.numpy()).reshape(batch, -1) for t in (target, safe_set.lower, safe_set.upper)]
    costs = np.ascontiguousarray(safe_set.costs.numpy()).reshape(batch, m, pairs)
    limits = Limits(cap, 1e-11, 500)
    return project_batch(geometry or geometry_of(layout), *flat, costs, states=layout.layers * layout.width, limits=limits)


def log_target(loss: Tensor, reference: Tensor, eta: float = 1.0) -> Tensor:
    return torch.where(reference > 0, reference.log(), LOG_FLOOR) - eta * loss.unsqueeze(-1)


def spent(result: Batch, safe_set: SafeSet) -> np.ndarray:
    """What each instance uses of each constraint, in its unit: `(B x m)`."""
    q = torch.from_numpy(result.occupancy).reshape(-1, *safe_set.layout.transition_shape).sum(-1)
    return ((safe_set.costs * q.unsqueeze(1)).sum(dim=(2, 3, 4)) / units(safe_set.costs)).numpy()


@pytest.mark.parametrize(("widths", "actions", "m"), SIZES)
@pytest.mark.parametrize("severity", [0.2, 0.8])
def test_agrees_with_clarabel_on_full_and_empty_sets(widths: tuple[int, ...], actions: int, m: int, severity: float) -> None:
    loss, reference, safe_set = random_instances(widths, actions, m, batch=4, seed=sum(widths) + m, severity=severity)
    target = log_target(loss, reference)
    result = solve(target, safe_set, cap=20.0)
    assert (result.status <= ELASTIC).all()
    assert m == 0 or severity < 0.5 or (result.status == ELASTIC).any()
    for j in range(4):
        expected = clarabel_projection(loss[j], reference[j], one(safe_set, j), 1.0, 20.0)
        assert np.allclose(result.occupancy[j], expected.flatten(), atol=5e-6), (j, result.status[j])


def test_agrees_with_the_torch_solver() -> None:
    for widths, actions, m in SIZES:
        loss, reference, safe_set = random_instances(widths, actions, m, batch=40, seed=3, severity=0.0)
        result = solve(log_target(loss, reference), safe_set)
        other = project(loss, reference, safe_set, 1.0, solver=Newton(backend="torch"))
        solved = result.status == SOLVED
        assert solved.sum() >= 10 and (other.status.numpy()[solved] == SOLVED).all()
        assert np.allclose(result.occupancy[solved], other.occupancy.flatten(1).numpy()[solved], atol=1e-10, rtol=0)
        assert np.allclose(result.multipliers[solved], other.multipliers.numpy()[solved], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("widths", "actions", "m"), [*SIZES, ((1, 9, 9, 1), 3, 2)])
def test_successors_spelled_out_and_conjugate_gradients_change_nothing(widths: tuple[int, ...], actions: int, m: int) -> None:
    loss, reference, safe_set = random_instances(widths, actions, m, batch=20, seed=4)
    target, dense = log_target(loss, reference), geometry_of(safe_set.layout)
    assert dense.dense.all() and not dense.iterative
    expected = solve(target, safe_set)
    listed = solve(target, safe_set, dense._replace(dense=np.zeros_like(dense.dense)))
    assert (listed.status == expected.status).all()
    assert np.allclose(listed.occupancy, expected.occupancy, atol=1e-12, rtol=0)
    iterated = solve(target, safe_set, dense._replace(iterative=1))
    assert (iterated.status == expected.status).all()
    assert np.allclose(iterated.occupancy, expected.occupancy, atol=1e-9, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_a_sparse_geometry_is_the_dense_one_with_closed_transitions(seed: int) -> None:
    loss, reference, safe_set = random_instances((1, 5, 6, 4, 1), 3, 2, batch=12, seed=seed, severity=0.1)
    layout, rng = safe_set.layout, np.random.default_rng(seed)
    support = (rng.uniform(size=layout.transition_shape) < 0.5) & layout.transition_mask().numpy()
    support[..., 0] |= ~support.any(-1) & layout.pair_mask().numpy()
    support |= ~support.any((1, 2))[:, None, None, :] & layout.transition_mask().numpy()  # every state follows some pair
    geometry = geometry_of(supported(layout, support))
    assert len(geometry.entry_at) == support.sum() and not geometry.dense[1]
    upper = torch.from_numpy(support * 1.0).expand_as(safe_set.upper)
    # intervals around a kernel on the support
    kernel = reference * upper
    kernel = kernel / torch.where(layout.pair_mask()[..., None], kernel.sum(-1, keepdim=True), 1.0)
    closed = SafeSet(layout, (kernel - 0.1).clamp_min(0.0), torch.minimum(kernel + 0.1, upper) * upper, safe_set.costs)
    target = log_target(loss, reference)
    sparse, dense = solve(target, closed, geometry), solve(target, closed)
    assert (sparse.status == dense.status).all() and (sparse.status == SOLVED).any()
    assert np.allclose(sparse.occupancy, dense.occupancy, atol=1e-12, rtol=0)
    assert (sparse.occupancy[:, ~support.flatten()] == 0).all()


@pytest.mark.parametrize("exponent", [-12, -4, 3, 6])
def test_the_unit_of_a_constraint_means_nothing(exponent: int) -> None:
    loss, reference, safe_set = random_instances((1, 3, 3, 1), 3, 3, batch=40, seed=8, severity=0.4)
    target, unit = log_target(loss, reference), 2.0 ** round(exponent * np.log2(10.0))
    costs = safe_set.costs * torch.tensor([unit, 1.0, 1.0 / unit])[:, None, None, None]
    expected, result = solve(target, safe_set), solve(target, SafeSet(safe_set.layout, safe_set.lower, safe_set.upper, costs))
    assert {SOLVED, ELASTIC} == set(expected.status)
    assert (result.status == expected.status).all()
    assert np.array_equal(result.occupancy, expected.occupancy)
    assert np.allclose(result.multipliers * [unit, 1.0, 1.0 / unit], expected.multipliers, rtol=1e-12)


def arms(costs: list[list[float]], reference: list[float]) -> tuple[Tensor, SafeSet]:
    """One state with an action a cost: the simplest safe set."""
    layout = Layout((1, 1), len(reference))
    table = torch.tensor(costs, dtype=torch.float64).reshape(1, len(costs), 1, 1, -1)
    certain = torch.ones(1, *layout.transition_shape, dtype=torch.float64)
    return torch.tensor(reference, dtype=torch.float64).log().reshape(certain.shape), SafeSet(layout, certain, certain, table)


@pytest.mark.parametrize("tiny", [1e-10, 1e-100, 1e-300])
@pytest.mark.parametrize("cost", [1.0, 1e-3, 1e-9])
def test_a_multiplier_at_the_cap_is_no_proof_of_an_empty_set(tiny: float, cost: float) -> None:
    for costs in ([[-cost, 1.0]], [[-cost, 1.0], [-1.0, 1.0]], [[0.0, 1.0], [-cost, 0.5]]):
        target, safe_set = arms(costs, [tiny, 1.0])
        result = solve(target, safe_set)
        assert result.status[0] == SOLVED
        assert spent(result, safe_set).max() <= 1e-9


def test_elastic_if_and_only_if_the_set_is_empty_and_then_at_the_caps_price() -> None:
    both = 0
    for seed in range(30):
        m = 1 + seed % 4
        loss, reference, safe_set = random_instances((1, 3, 2, 1), 2, m, batch=6, seed=seed, severity=0.1 * (seed % 7))
        result = solve(log_target(loss, reference, 3.0), safe_set)
        used = spent(result, safe_set).max(1)
        scale = units(safe_set.costs).numpy()
        for j in range(6):
            least = least_largest_violation(one(safe_set, j))
            both |= 1 << int(least > 1e-8)
            assert result.status[j] == (ELASTIC if least > 1e-8 else SOLVED), (seed, j, least)
            assert used[j] <= 1e-9 or least > 1e-8
            assert max(used[j], 0.0) >= least - 1e-9
            if result.status[j] == ELASTIC:
                assert np.isclose((result.multipliers[j] * scale[j]).sum(), CAP)
    assert both == 3


def test_the_largest_violation_is_shared_by_the_constraints_with_a_price() -> None:
    loss, reference, safe_set = random_instances((1, 3, 3, 1), 3, 3, batch=60, seed=5, severity=0.8)
    result = solve(log_target(loss, reference), safe_set)
    elastic = result.status == ELASTIC
    used = spent(result, safe_set)
    priced = result.multipliers > 1e-9
    assert (priced[elastic].sum(1) > 1).any()
    assert np.allclose(np.where(priced, used, used.max(1, keepdims=True))[elastic], used.max(1, keepdims=True)[elastic], atol=1e-9)


def assert_sound(result: Batch, safe_set: SafeSet) -> None:
    """Nothing is NaN, nothing is wrongly called solved, and every instance is one or the other."""
    assert np.isfinite(result.occupancy).all() and not np.isnan(result.log_occupancy).any()
    violation = np.maximum(spent(result, safe_set).max(1, initial=0.0), 0.0)
    solved, elastic = result.status == SOLVED, result.status == ELASTIC
    assert (solved | elastic).all()
    assert (violation[solved] <= 1e-9).all() and (violation[elastic] > 1e-9).all()
    assert (np.abs(result.gap[solved]) <= 1e-8).all()
    assert (np.abs(result.gap) <= 1e-8 * (1 + np.abs(result.potentials[:, 0]))).all()
    positive = result.occupancy > 1e-200
    assert np.allclose(np.exp(result.log_occupancy[positive]), result.occupancy[positive], rtol=1e-9, atol=0)


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_wild_instances_are_solved_or_rightly_named(first: int) -> None:
    for seed in range(first, first + 100):
        log_reference, safe_set = wild_instances(seed, 5)
        assert_sound(solve(log_reference.clamp_min(LOG_FLOOR), safe_set), safe_set)


def test_wild_costs_of_any_size() -> None:
    for seed in range(100):
        rng = np.random.default_rng(seed)
        log_reference, safe_set = wild_instances(seed, 5)
        unit = torch.from_numpy(10.0 ** rng.uniform(-12, 6, size=(5, safe_set.constraints, 1, 1, 1)))
        scaled = SafeSet(safe_set.layout, safe_set.lower, safe_set.upper, safe_set.costs * unit)
        assert_sound(solve(log_reference.clamp_min(LOG_FLOOR), scaled), scaled)


def test_what_cannot_be_solved_is_named_and_harms_nobody() -> None:
    loss, reference, safe_set = random_instances((1, 3, 3, 1), 2, 2, batch=6, seed=2)
    target = log_target(loss, reference)
    expected = solve(target, safe_set)
    lower, costs, spoilt = safe_set.lower.clone(), safe_set.costs.clone(), target.clone()
    spoilt[0, 1, 2, 1, 0], lower[2, 0, 0, 0, 0], costs[3, 1, 1, 0, 0] = torch.nan, 1.5, torch.inf
    result = solve(spoilt, SafeSet(safe_set.layout, lower, safe_set.upper, costs))
    assert (result.status[[0, 2, 3]] == INVALID).all()
    for j in (1, 4, 5):
        assert np.array_equal(result.occupancy[j], expected.occupancy[j])


@pytest.mark.parametrize(("seed", "instance"), [(5459, 9), (4181, 10), (17489, 11)])
@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_multipliers_of_a_million_and_states_without_mass(seed: int, instance: int, backend: str) -> None:
    # fuzzed instances that gave up: steps of at most 100, caps of at most 1e8, and steps cut for states that nothing passes
    log_reference, safe_set = wild_instances(seed, 20)
    parts = (safe_set.lower, safe_set.upper, safe_set.costs)
    one_set = SafeSet(safe_set.layout, *(tensor[instance : instance + 1] for tensor in parts))
    zero = torch.zeros(safe_set.layout.pair_shape, dtype=torch.float64)
    result = project(zero, None, one_set, 1.0, log_reference=log_reference[instance : instance + 1], solver=Newton(backend=backend))
    assert int(result.status) in (SOLVED, ELASTIC)


def test_no_instance_is_worked_on_for_ever() -> None:
    # the only safe arm has no mass at all, or next to none of a target of any size: no stage of cooling is ever mild enough
    for worst in (-np.inf, -1e300, -1e18):
        target, safe_set = arms([[-1.0, 1.0], [-1e-9, 1.0]], [1.0, 1.0])
        target[..., 0, :] = worst
        result = solve(target, safe_set)
        raised = 1 + int(np.ceil(np.log10(HIGHEST_CAP / CAP)))
        assert result.status[0] != INVALID and result.iterations[0] <= (1 + raised) * 500


@entry
def small_quadratic(matrix, linear, low, room, small, d):  # type: ignore[no-untyped-def]
    """`quadratic` for Python."""
    for i in range(d.shape[0]):
        small.linear[i] = linear[i]
        small.low[i] = low[i]
    quadratic(matrix, room, small, d)


def test_the_quadratic_of_the_multipliers_is_solved_exactly() -> None:
    rng = np.random.default_rng(0)
    for trial in range(2000):
        m = int(rng.integers(1, 9))
        root = rng.normal(size=(m, int(rng.integers(1, m + 2))))
        if trial % 4 == 0 and m > 1:  # duplicates and opposites
            root[m // 2 :] = rng.choice([-1.0, 1.0]) * root[: m - m // 2]
        matrix = root @ root.T
        matrix[np.diag_indices(m)] += 1e-13 * np.trace(matrix)
        lam = rng.uniform(size=m) * (rng.uniform(size=m) < 0.5)
        room = float(rng.choice([0.0, 1e-3, 1.0, 100.0]))
        linear, d = rng.normal(size=m), np.zeros(m)
        small_quadratic(matrix, linear, -lam, room, workspace(geometry_of(Layout((1, 1), 1)), m).small, d)
        slope = matrix @ d + linear
        assert (d >= -lam - 1e-12).all() and d.sum() <= room + 1e-9 * (1 + room)
        # optimal over {d >= -lam, sum d <= room}: no vertex of the set lies downhill
        size = 1e-9 * (np.abs(linear).max() + np.abs(matrix @ np.abs(d)).max()) * (room + lam.sum() + 1e-12)
        corners = np.vstack([np.zeros(m), np.eye(m) * (room + lam.sum())]) - lam
        assert ((corners - d) @ slope >= -size).all(), trial
