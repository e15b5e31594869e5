"""Counts, confidence sets, and the optimistic expectations over them, against linear programmes that share no code with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from torchcmdp.confidence import (
    CONFIDENCE_KINDS,
    Intervals,
    KernelSet,
    L1Ball,
    confidence_set,
    empirical_kernel,
    lower_occupancy,
    transition_radius,
    upper_occupancy,
    upper_occupancy_visited,
    visited_transitions,
)
from torchcmdp.errors import InvalidInput
from torchcmdp.layout import Layout
from torchcmdp.occupancy import pair_occupancy_of
from torchcmdp.trajectory import Trajectory

LAYOUT = Layout((1, 2, 4, 3, 1), 3)
LAYOUTS = (LAYOUT, Layout((1, 4, 1), 2), Layout((1, 1), 3), Layout((1, 3, 1, 2, 1), 2))


def kernel(layout: Layout, generator: torch.Generator, *batch: int) -> torch.Tensor:
    raw = torch.rand(*batch, *layout.transition_shape, generator=generator, dtype=torch.float64) ** 2 * layout.transition_mask()
    return raw / raw.sum(-1, keepdim=True).where(raw.sum(-1, keepdim=True) > 0, torch.ones(()))


def random_policy(layout: Layout, generator: torch.Generator, *batch: int) -> torch.Tensor:
    raw = (torch.rand(*batch, *layout.pair_shape, generator=generator, dtype=torch.float64) + 0.05) * layout.pair_mask()
    return raw / raw.sum(-1, keepdim=True).where(raw.sum(-1, keepdim=True) > 0, torch.ones(()))


def random_box(layout: Layout, generator: torch.Generator, *batch: int) -> tuple[torch.Tensor, Intervals]:
    """A kernel and a random box around it, with some rows pinned to it and some free."""
    P = kernel(layout, generator, *batch)
    half = 0.4 * torch.rand(*batch, *layout.transition_shape, generator=generator, dtype=torch.float64)
    kind = torch.rand(*batch, *layout.pair_shape, 1, generator=generator)
    half = torch.where(kind < 0.2, 0.0, torch.where(kind > 0.8, 1.0, half))
    return P, Intervals((P - half).clamp_min(0), (P + half).clamp_max(1) * layout.transition_mask())


def random_ball(layout: Layout, generator: torch.Generator, *batch: int) -> tuple[torch.Tensor, L1Ball]:
    center = kernel(layout, generator, *batch)
    radius = 2.2 * torch.rand(*batch, *layout.pair_shape, generator=generator, dtype=torch.float64) * layout.pair_mask()
    return center, L1Ball(center, radius, layout)


def random_trajectory(layout: Layout, runs: int, seed: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    states = torch.tensor(np.stack([rng.integers(0, n, runs) for n in layout.widths], axis=1))
    actions = torch.tensor(rng.integers(0, layout.actions, (runs, layout.layers)))
    nothing = torch.zeros(runs, layout.layers, dtype=torch.float64)
    return Trajectory(states[:, :-1], actions, states[:, 1:], nothing, nothing.unsqueeze(-1)[..., :0])


def random_counts(layout: Layout, episodes: int, seed: int, runs: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    M = torch.stack(
        [visited_transitions(random_trajectory(layout, runs, seed + t), layout, torch.float64) for t in range(episodes)]
    )
    return M.sum(0).sum(-1), M.sum(0)


def occupancy_program(layout: Layout, kernels: KernelSet, policy: torch.Tensor, target: tuple[int, int, int], sign: int) -> float:
    """The largest (sign 1) or smallest (-1) q(x,a) of a fixed policy over the set, as an extended linear programme by HiGHS.

    Variables q(x,a,y) and, for an L1 ball, d(x,a,y) >= |q(x,a,y) - center q(x,a)|.
    """
    index = {tuple(e): i for i, e in enumerate(layout.transition_mask().nonzero().tolist())}
    n, ball = len(index), isinstance(kernels, L1Ball)
    size = 2 * n if ball else n
    rows_eq: list[np.ndarray] = []
    rhs_eq: list[float] = []
    rows_ub: list[np.ndarray] = []

    def unit(entries: dict[int, float]) -> np.ndarray:
        row = np.zeros(size)
        for i, v in entries.items():
            row[i] += v
        return row

    def successors(k: int, x: int, a: int) -> list[int]:
        return [index[k, x, a, y] for y in range(layout.widths[k + 1])]

    for k in range(layout.layers):
        for x in range(layout.widths[k]):
            outflow = unit({i: 1.0 for a in range(layout.actions) for i in successors(k, x, a)})
            inflow = (
                unit({index[k - 1, w, a, x]: 1.0 for w in range(layout.widths[k - 1]) for a in range(layout.actions)})
                if k
                else np.zeros(size)
            )
            rows_eq.append(outflow - inflow)
            rhs_eq.append(0.0 if k else 1.0)
            for a in range(layout.actions):
                pair = unit({i: 1.0 for i in successors(k, x, a)})
                rows_eq.append(pair - float(policy[k, x, a]) * outflow)
                rhs_eq.append(0.0)
                for y, i in enumerate(successors(k, x, a)):
                    one = unit({i: 1.0})
                    if ball:
                        deviation = one - float(kernels.center[k, x, a, y]) * pair
                        rows_ub += [deviation - unit({n + i: 1.0}), -deviation - unit({n + i: 1.0})]
                    else:
                        rows_ub += [one - float(kernels.upper[k, x, a, y]) * pair, float(kernels.lower[k, x, a, y]) * pair - one]
                if ball:
                    rows_ub.append(unit({n + i: 1.0 for i in successors(k, x, a)}) - float(kernels.radius[k, x, a]) * pair)
    objective = -sign * unit({i: 1.0 for i in successors(*target)})
    answer = linprog(objective, np.array(rows_ub), np.zeros(len(rows_ub)), np.array(rows_eq), np.array(rhs_eq), method="highs")
    assert answer.status == 0
    return -sign * answer.fun


def test_counts_are_one_at_the_visited_entries_and_zero_elsewhere() -> None:
    trajectory = random_trajectory(LAYOUT, 5, 0)
    M = visited_transitions(trajectory, LAYOUT, torch.float32)
    N = M.sum(-1)
    assert N.dtype == M.dtype == torch.float32
    expected = torch.zeros(5, *LAYOUT.transition_shape)
    for j in range(5):
        for k in range(LAYOUT.layers):
            expected[j, k, trajectory.states[j, k], trajectory.actions[j, k], trajectory.next_states[j, k]] = 1
    assert torch.equal(M, expected)
    assert torch.equal(N, expected.sum(-1))


def test_empirical_kernel_is_the_frequency_and_uniform_where_unvisited() -> None:
    N, M = random_counts(LAYOUT, 6, 3)
    P = empirical_kernel(N, M, LAYOUT)
    mask = LAYOUT.pair_mask()
    assert ((P.sum(-1) - mask.to(P.dtype)).abs() < 1e-12).all()
    assert torch.equal((P * N.unsqueeze(-1))[N > 0].round(decimals=9), M[N > 0])
    assert (P[0, 1, 0, (N[0, 1, 0] == 0)] == 0.25).all() or (N[0, 1, 0] > 0).all()
    empty = empirical_kernel(torch.zeros_like(N), torch.zeros_like(M), LAYOUT)
    assert torch.equal(empty[0, 1, 0, 0], torch.full((4,), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("build", [random_box, random_ball])
def test_occupancy_bounds_equal_the_linear_programmes(layout: Layout, build) -> None:
    generator = torch.Generator().manual_seed(7)
    _, kernels = build(layout, generator)
    policy = random_policy(layout, generator)
    for bound, sign in ((upper_occupancy(kernels, policy, layout), 1), (lower_occupancy(kernels, policy, layout), -1)):
        assert (bound[~layout.pair_mask()] == 0).all()
        for k, x, a in layout.pair_mask().nonzero().tolist():
            exact = occupancy_program(layout, kernels, policy, (k, x, a), sign)
            assert abs(float(bound[k, x, a]) - exact) < 1e-9


def row_program(lower: np.ndarray, upper: np.ndarray, f: np.ndarray, sign: int) -> float:
    answer = linprog(-sign * f, A_eq=np.ones((1, len(f))), b_eq=[1.0], bounds=list(zip(lower, upper, strict=True)), method="highs")
    return -sign * answer.fun


def test_optimistic_expectation_equals_the_row_programme_for_values_of_either_sign() -> None:
    generator = torch.Generator().manual_seed(1)
    _, box = random_box(LAYOUT, generator)
    values = (
        torch.randn(LAYOUT.layers, LAYOUT.width, 3, generator=generator, dtype=torch.float64) - 2
    )  # padded entries are the largest
    values[:, :, 2] = values[:, :, 2].round()  # ties
    values[~LAYOUT.transition_mask()[:, 0, 0, :]] = 0
    for maximise, sign in ((True, 1), (False, -1)):
        answer = box.optimistic(values, maximise=maximise)
        assert (answer[~LAYOUT.pair_mask()] == 0).all()
        for k, x, a in LAYOUT.pair_mask().nonzero().tolist():
            n = LAYOUT.widths[k + 1]
            for z in range(3):
                lo, up, f = (t.numpy() for t in (box.lower[k, x, a, :n], box.upper[k, x, a, :n], values[k, :n, z]))
                assert abs(float(answer[k, x, a, z]) - row_program(lo, up, f, sign)) < 1e-9
        for k in range(LAYOUT.layers):
            assert torch.allclose(box.optimistic(values[k], maximise=maximise, layer=k), answer[k], atol=1e-12)


def test_ball_ignores_padding_when_values_are_negative() -> None:
    generator = torch.Generator().manual_seed(2)
    center, ball = random_ball(LAYOUT, generator)
    everything = L1Ball(center, 2.0 * LAYOUT.pair_mask().to(torch.float64), LAYOUT)
    values = -1 - torch.rand(LAYOUT.layers, LAYOUT.width, 1, generator=generator, dtype=torch.float64)
    values[~LAYOUT.transition_mask()[:, 0, 0, :]] = 0
    answer = everything.optimistic(values)
    for k, x, a in LAYOUT.pair_mask().nonzero().tolist():
        assert math.isclose(float(answer[k, x, a, 0]), float(values[k, : LAYOUT.widths[k + 1], 0].max()), abs_tol=1e-12)
    assert (ball.optimistic(values)[~LAYOUT.pair_mask()] == 0).all()


def test_degenerate_sets() -> None:
    generator = torch.Generator().manual_seed(3)
    P, box = random_box(LAYOUT, generator, 4)
    policy = random_policy(LAYOUT, generator, 4)
    q = pair_occupancy_of(policy, P)
    assert torch.allclose(upper_occupancy(Intervals(P, P), policy, LAYOUT), q, atol=1e-12)
    assert torch.allclose(lower_occupancy(Intervals(P, P), policy, LAYOUT), q, atol=1e-12)
    assert (upper_occupancy(box, policy, LAYOUT) >= q - 1e-12).all()
    assert (lower_occupancy(box, policy, LAYOUT) <= q + 1e-12).all()
    mask = LAYOUT.transition_mask().to(torch.float64)
    assert torch.allclose(upper_occupancy(Intervals(0 * mask, mask), policy, LAYOUT), policy, atol=1e-12)
    assert torch.equal(upper_occupancy(box, policy, LAYOUT)[:, 0], policy[:, 0])


@pytest.mark.parametrize("build", [random_box, random_ball])
def test_visited_bound_is_the_full_bound_at_the_visited_pairs(build) -> None:
    generator = torch.Generator().manual_seed(4)
    for layout in LAYOUTS:
        _, kernels = build(layout, generator, 6)
        policy, trajectory = random_policy(layout, generator, 6), random_trajectory(layout, 6, 9)
        visited = visited_transitions(trajectory, layout, torch.float64).sum(-1)
        u = upper_occupancy_visited(kernels, policy, layout, trajectory.states, trajectory.actions)
        assert torch.allclose(u, (upper_occupancy(kernels, policy, layout) * visited).sum((-1, -2)), atol=1e-12)


def test_box_around_a_ball_is_tight() -> None:
    generator = torch.Generator().manual_seed(5)
    center, ball = random_ball(LAYOUT, generator)
    indicators = torch.eye(LAYOUT.width, dtype=torch.float64).expand(LAYOUT.layers, -1, -1)
    mask = LAYOUT.transition_mask()
    assert torch.allclose((ball.optimistic(indicators) * mask), ball.upper, atol=1e-12)
    # every entry can reach its lower face as soon as another successor can take the mass
    wide = torch.tensor([n > 1 for n in LAYOUT.widths[1:]])
    assert torch.allclose((ball.optimistic(indicators, maximise=False) * mask)[wide], ball.lower[wide], atol=1e-12)


def test_widths_are_the_formulas() -> None:
    N, M = random_counts(LAYOUT, 40, 11)
    horizon, delta, scale = 1000, 0.01, torch.tensor([1.0, 0.05], dtype=torch.float64)
    iota = math.log(horizon * 11 * 3 / delta)
    sets = {kind: confidence_set(kind, N, M, LAYOUT, horizon=horizon, delta=delta, radius_scale=scale) for kind in CONFIDENCE_KINDS}
    for j, k, x, a in (N > 0).nonzero().tolist():
        n, count = LAYOUT.widths[k + 1], float(N[j, k, x, a])
        radius = float(scale[j]) * math.sqrt(2 * n * iota / count)
        assert math.isclose(float(sets["l1"].radius[j, k, x, a]), radius, rel_tol=1e-12)
        for y in range(n):
            mean = float(M[j, k, x, a, y]) / count
            bern = float(scale[j]) * (2 * math.sqrt(mean * iota / max(1, count - 1)) + 14 * iota / (3 * max(1, count - 1)))
            wide = iota + math.log(6)
            efroni = float(scale[j]) * (2 * math.sqrt(mean * (1 - mean) * wide / count) + 14 * wide / (3 * count))
            luo = float(scale[j]) * (4 * math.sqrt(mean * iota / count) + 28 * iota / (3 * count))
            halves = {"entrywise": radius, "l1": radius / 2, "bernstein": bern, "efroni": efroni, "luo": luo}
            assert set(halves) == set(CONFIDENCE_KINDS)
            for kind, half in halves.items():
                assert math.isclose(float(sets[kind].lower[j, k, x, a, y]), max(0, mean - half), abs_tol=1e-12)
                assert math.isclose(float(sets[kind].upper[j, k, x, a, y]), min(1, mean + half), abs_tol=1e-12)


def test_a_set_is_the_kernel_plus_minus_its_width() -> None:
    N, M = random_counts(LAYOUT, 40, 13)
    like = {"horizon": 1000, "delta": 0.01, "radius_scale": 0.02}
    center, mask = empirical_kernel(N, M, LAYOUT), LAYOUT.transition_mask()
    for kind in CONFIDENCE_KINDS:
        if kind == "l1":
            continue
        width, box = transition_radius(kind, N, M, LAYOUT, **like), confidence_set(kind, N, M, LAYOUT, **like)
        assert (width[:, ~mask] == 0).all() and (width[:, mask] > 0).any()
        assert torch.equal(box.upper, (center + width).clamp_max(1) * mask)
        assert torch.equal(box.lower, (center - width).clamp_min(0))


@pytest.mark.parametrize("kind", CONFIDENCE_KINDS)
def test_unvisited_pairs_admit_everything_and_padding_nothing(kind: str) -> None:
    N, M = random_counts(LAYOUT, 3, 12)
    assert (N[:, LAYOUT.pair_mask()] == 0).any()
    kernels = confidence_set(kind, N, M, LAYOUT, horizon=10, delta=0.1, radius_scale=0.0)
    free = (N == 0).unsqueeze(-1) & LAYOUT.transition_mask()
    assert (kernels.lower[free] == 0).all() and (kernels.upper[free] == 1).all()
    pad = ~LAYOUT.transition_mask()
    assert (kernels.lower[:, pad] == 0).all() and (kernels.upper[:, pad] == 0).all()
    known = (N > 0).unsqueeze(-1) & LAYOUT.transition_mask()
    assert torch.equal(kernels.lower[known], empirical_kernel(N, M, LAYOUT)[known])


def test_unknown_kind_is_refused() -> None:
    N, M = random_counts(LAYOUT, 1, 0)
    with pytest.raises(InvalidInput, match="'entrywize'.*'entrywise', 'l1', 'bernstein'"):
        confidence_set("entrywize", N, M, LAYOUT, horizon=10, delta=0.1)


@pytest.mark.parametrize("build", [random_box, random_ball])
def test_gradients_match_finite_differences(build) -> None:
    layout = Layout((1, 2, 3, 1), 2)
    generator = torch.Generator().manual_seed(6)
    _, kernels = build(layout, generator, 2)
    policy, trajectory = random_policy(layout, generator, 2), random_trajectory(layout, 2, 1)

    def bound(first: torch.Tensor, second: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        rebuilt: KernelSet = L1Ball(first, second, layout) if isinstance(kernels, L1Ball) else Intervals(first, second)
        return upper_occupancy_visited(rebuilt, pi * layout.pair_mask(), layout, trajectory.states, trajectory.actions)

    first, second = (kernels.center, kernels.radius) if isinstance(kernels, L1Ball) else (kernels.lower, kernels.upper)
    # off the kinks: rows pinned or free on purpose are moved inside, and every padded entry is left alone by the masks
    mask = layout.transition_mask()
    if isinstance(kernels, Intervals):
        first, second = (0.8 * first + 0.01) * mask, (0.9 * second + 0.2).clamp_max(0.97) * mask
    inputs = [t.clone().requires_grad_() for t in (first, second, policy)]

    def masked(first: torch.Tensor, second: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        return bound(first * mask, second * (mask if second.dim() == first.dim() else layout.pair_mask()), pi)

    assert torch.autograd.gradcheck(masked, inputs, check_forward_ad=True, atol=1e-6)


@pytest.mark.parametrize("kind", CONFIDENCE_KINDS)
def test_everything_runs_on_meta_and_keeps_float32(kind: str) -> None:
    for device, dtype in (("meta", torch.float64), ("cpu", torch.float32)):
        N = torch.zeros(3, *LAYOUT.pair_shape, device=device, dtype=dtype)
        M = torch.zeros(3, *LAYOUT.transition_shape, device=device, dtype=dtype)
        scale = torch.ones(3, device=device, dtype=dtype)
        kernels = confidence_set(kind, N, M, LAYOUT, horizon=10, delta=0.1, radius_scale=scale)
        index = torch.zeros(3, LAYOUT.layers, dtype=torch.int64, device=device)
        policy = (LAYOUT.pair_mask(device).to(dtype) / 3).expand(3, -1, -1, -1)
        u = upper_occupancy_visited(kernels, policy, LAYOUT, index, index)
        assert u.shape == (3, LAYOUT.layers) and u.dtype == dtype and u.device.type == device
        assert lower_occupancy(kernels, policy, LAYOUT).dtype == kernels.upper.dtype == dtype
