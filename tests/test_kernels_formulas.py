"""Every kernel of an episode against the torch formula of the same name, on random inputs and padded layouts."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.sparse import supported
from torchcmdp import estimation
from torchcmdp.confidence import (
    CONFIDENCE_KINDS,
    Intervals,
    L1Ball,
    confidence_set,
    lower_occupancy,
    transition_log_term,
    upper_occupancy,
    upper_occupancy_visited,
)
from torchcmdp.kernels import confidence, exponentials, occupancy, opt_cmdp, pdbps, streams
from torchcmdp.kernels import estimation as kernels
from torchcmdp.kernels.cpu import _KernelFiles, exposed
from torchcmdp.kernels.geometry import geometry_of
from torchcmdp.kernels.padding import LOAD
from torchcmdp.layout import Layout
from torchcmdp.learners import Greedy, OptCMDP
from torchcmdp.learners.compiled import Packed
from torchcmdp.learners.empirical import RADIUS_MODES
from torchcmdp.learners.pdbps import dilated_bonus
from torchcmdp.occupancy import pair_occupancy_of, policy_of
from torchcmdp.streams import RunStreams

LAYOUTS = [Layout((1, 4, 4, 1), 3), Layout((1, 2, 5, 1, 3, 1), 2), Layout((1, 1), 2)]
HORIZON, DELTA = 500, 0.05


@cache
def callable_from_python(kernel):
    """Kernels have no way in from Python, which would take long to compile: this gives them one."""
    return exposed(lambda *arguments: kernel(*arguments))


def number(value: float) -> torch.Tensor:
    """A value at the only pair of a layout of one."""
    return torch.full((1, 1, 1), value, dtype=torch.float64)


def close(found, expected) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-12, atol=1e-12)


def random_rows(layout: Layout, seed: int) -> torch.Tensor:
    """Random transitions, `(L x S x A x S)`."""
    weights = torch.rand(layout.transition_shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights = weights * layout.transition_mask()
    return torch.nan_to_num(weights / weights.sum(-1, keepdim=True))


def random_policy(layout: Layout, seed: int) -> torch.Tensor:
    weights = torch.rand(layout.pair_shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    return torch.nan_to_num(weights / weights.sum(-1, keepdim=True)) * layout.pair_mask()


def random_counts(layout: Layout, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Visits of pairs, some of them zero, and of transitions."""
    generator = torch.Generator().manual_seed(seed)
    many = torch.randint(0, 40, layout.transition_shape, generator=generator).to(torch.float64)
    seen = torch.rand(layout.pair_shape, generator=generator) < 0.7
    moves = many * layout.transition_mask() * seen.unsqueeze(-1)
    return moves.sum(-1), moves


def pairs_of(layout: Layout, padded: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(padded.reshape(-1).numpy()[geometry_of(layout).pair_at])


def entries_of(layout: Layout, padded: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(padded.reshape(-1).numpy()[geometry_of(layout).entry_at])


@exposed
def fill(geometry, visits, moves, iota, scale, kernels):
    for p in range(visits.shape[0]):
        confidence.confidence_row(geometry, p, visits, moves, iota, scale, kernels)
        confidence.find_extremes(geometry, p, kernels)


@exposed
def line_all_up(geometry, kernels):
    for p in range(geometry.pair_at.shape[0]):
        confidence.line_up(geometry, p, kernels)
        confidence.find_extremes(geometry, p, kernels)


def both_sets(kind: str, layout: Layout, seed: int):
    """The same confidence set in torch and as kernels see it."""
    visits, moves = random_counts(layout, seed)
    torch_set = confidence_set(kind, visits, moves, layout, horizon=HORIZON, delta=DELTA, radius_scale=0.3)
    geometry = geometry_of(layout)
    own = confidence.kernel_set(CONFIDENCE_KINDS.index(kind), geometry)
    iota = transition_log_term(layout, HORIZON, DELTA)
    fill(geometry, pairs_of(layout, visits), entries_of(layout, moves), iota, 0.3, own)
    return torch_set, own


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", CONFIDENCE_KINDS)
def test_confidence_rows(kind: str, layout: Layout) -> None:
    torch_set, own = both_sets(kind, layout, seed=0)
    close(own.lower, entries_of(layout, torch_set.lower))
    close(own.upper, entries_of(layout, torch_set.upper))
    if isinstance(torch_set, L1Ball):
        close(own.center, entries_of(layout, torch_set.center))
        close(own.radius, pairs_of(layout, torch_set.radius))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", CONFIDENCE_KINDS)
def test_upper_and_lower_occupancies(kind: str, layout: Layout) -> None:
    torch_set, own = both_sets(kind, layout, seed=1)
    policy, geometry = random_policy(layout, seed=2), geometry_of(layout)
    compact, room, found = pairs_of(layout, policy), confidence.empty_room(geometry), np.zeros(len(geometry.pair_at))
    all_pairs = callable_from_python(confidence.all_pairs)
    for sign, formula in ((1.0, upper_occupancy), (-1.0, lower_occupancy)):
        all_pairs(geometry, own, compact, sign, room, found)
        close(found, pairs_of(layout, formula(torch_set, policy, layout)))
    generator = torch.Generator().manual_seed(3)
    states = torch.stack([torch.randint(0, width, (), generator=generator) for width in layout.widths[:-1]])[None]
    actions = torch.randint(0, layout.actions, states.shape, generator=generator)
    numbers = (torch.as_tensor(geometry.first[:-1]) + states[0]) * layout.actions + actions[0]
    upper = np.zeros(layout.layers)
    callable_from_python(confidence.upper_occupancy_visited)(geometry, own, compact, numbers.numpy(), room, upper)
    close(upper, upper_occupancy_visited(torch_set, policy[None], layout, states, actions)[0])


def test_occupancies_over_successor_lists_are_those_over_intervals_that_are_zero_elsewhere() -> None:
    layout = LAYOUTS[1]
    support = (torch.rand(layout.transition_shape, generator=torch.Generator().manual_seed(4)) < 0.6) & layout.transition_mask()
    support[..., 0] |= layout.pair_mask()
    support[:, 0] = layout.transition_mask()[:, 0]  # every state can be reached
    center = random_rows(layout, seed=5) * support
    center = torch.nan_to_num(center / center.sum(-1, keepdim=True))
    lower, upper = (center - 0.2).clamp_min(0), (center + 0.2).clamp_max(1) * support
    geometry, policy = geometry_of(supported(layout, support.numpy())), random_policy(layout, seed=6)
    own = confidence.kernel_set(confidence.ENTRYWISE, geometry)
    own.lower[:], own.upper[:] = (tensor.reshape(-1).numpy()[geometry.entry_at] for tensor in (lower, upper))
    line_all_up(geometry, own)
    found = np.zeros(len(geometry.pair_at))
    for sign, formula in ((1.0, upper_occupancy), (-1.0, lower_occupancy)):
        callable_from_python(confidence.all_pairs)(
            geometry, own, pairs_of(layout, policy), sign, confidence.empty_room(geometry), found
        )
        close(found, pairs_of(layout, formula(Intervals(lower, upper), policy, layout)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_dilated_bonus(layout: Layout) -> None:
    torch_set, own = both_sets("luo", layout, seed=7)
    policy, geometry = random_policy(layout, seed=8), geometry_of(layout)
    upper, lower = (random_policy(layout, seed) for seed in (9, 10))
    gamma, loss_range = 0.1, 3.0
    reached = upper + gamma
    bonus = layout.layers * loss_range * (policy * (3 * gamma + upper - lower) / reached).sum(-1)
    found = np.zeros(len(geometry.pair_at))
    callable_from_python(pdbps.dilated_bonus)(
        geometry, own, *(pairs_of(layout, policy), gamma, loss_range, pairs_of(layout, upper), pairs_of(layout, lower)),
        confidence.empty_room(geometry), found,
    )  # fmt: skip
    close(found, pairs_of(layout, dilated_bonus(bonus, policy, torch_set)))


@pytest.mark.parametrize("count", range(10))
def test_exponentials_are_those_of_the_library_to_a_rounding_or_two(count: int) -> None:
    own = callable_from_python(exponentials.exponentials)
    inputs = np.random.default_rng(count).uniform(-700, 700, (200, count + 2))
    inputs[::3] /= 100
    inputs[::5] = -(inputs[::5] ** 2) / 1e6
    for row in inputs:
        row = np.sort(row)  # as it adds up to less than twice the largest then
        found = np.full(count + 2, 7.0)
        total = own(row, 1, count + 1, 0.5, found)
        expected = np.exp(row - 0.5)
        assert found[0] == found[-1] == 7.0
        np.testing.assert_allclose(found[1:-1], expected[1:-1], rtol=5e-16)
        np.testing.assert_allclose(total, expected[1:-1].sum(), rtol=2e-15)
        in_place = row.copy()
        own(in_place, 1, count + 1, 0.5, in_place)
        np.testing.assert_array_equal(in_place[1:-1], found[1:-1])


def test_exponentials_of_extremes() -> None:
    extremes = np.array([-np.inf, -1e300, -800.0, 0.0, -0.0, 1e-300, 710.0, 1e300, np.inf, np.nan])
    found = np.zeros_like(extremes)
    callable_from_python(exponentials.exponentials)(extremes, 0, len(extremes), 0.0, found)
    np.testing.assert_array_equal(found, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, np.inf, np.inf, np.inf, np.nan])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_policies_and_occupancies(layout: Layout) -> None:
    geometry, policy, transitions = geometry_of(layout), random_policy(layout, seed=11), random_rows(layout, seed=12)
    pairs = len(geometry.pair_at)
    found, mass = np.zeros(pairs), np.zeros(len(geometry.state_at) + 1)
    of_policy = callable_from_python(occupancy.pair_occupancy_of)
    of_policy(geometry, pairs_of(layout, policy), entries_of(layout, transitions), mass, found)
    close(found, pairs_of(layout, pair_occupancy_of(policy, transitions)))
    log = torch.where(layout.transition_mask(), 30 * random_rows(layout, seed=13).log().clamp_min(-20), -700.0)
    entries = entries_of(layout, log)
    callable_from_python(occupancy.policy_of_log)(geometry, entries, np.zeros_like(entries), found)
    close(found, pairs_of(layout, log.flatten(-2).softmax(-1).view_as(log).sum(-1)))
    reached = random_rows(layout, seed=16) * (random_rows(layout, seed=17).amax(-1, keepdim=True) > 0.5)
    callable_from_python(occupancy.policy_of)(geometry, pairs_of(layout, reached.sum(-1)), found)
    close(found, pairs_of(layout, policy_of(reached, layout)))
    logits = 50 * random_policy(layout, seed=14)
    callable_from_python(occupancy.policy_of_logits)(geometry, pairs_of(layout, logits), found)
    close(found, pairs_of(layout, logits.softmax(-1)))
    found = pairs_of(layout, logits)
    callable_from_python(occupancy.log_softmax)(geometry, found, np.zeros_like(found))
    close(found, pairs_of(layout, logits.log_softmax(-1)))


@pytest.mark.parametrize("distinct", [None, 3])
def test_random_numbers_are_the_same_bit_for_bit(distinct: int | None) -> None:
    seed, first_run, m, layers = 4_294_967_295, 7, 2, 5
    expected = RunStreams(seed, 6, first_run, distinct=distinct)
    uniform = callable_from_python(streams.uniform)
    for episode in (0, 513, 4_000_000_000):
        numbers = expected.uniform(episode, m, layers)
        for run in range(6):
            number = (first_run + run) % distinct if distinct else first_run + run
            for k in range(layers):
                for purpose in range(3 + m):
                    assert uniform(seed, number, episode, k + streams.SLOTS * purpose) == numbers[run, k, purpose].item()


@exposed
def estimates(reward, upper, gamma, path, threshold, scale, cap, visits, estimate, cost, logarithm, bonus_scale):
    gamma_excess = kernels.excess(path, threshold, scale, cap)
    rate = kernels.learning_rate(gamma_excess, visits)
    cost_bonus = kernels.bonus(visits, logarithm, bonus_scale)
    updated = kernels.update_cost_estimate(estimate, rate, cost)
    optimistic = kernels.optimistic_cost(updated, cost_bonus, visits, -1.0)
    return kernels.loss_estimate(reward, upper, gamma), gamma_excess, rate, cost_bonus, updated, optimistic


@pytest.mark.parametrize("visits", [0.0, 1.0, 17.0])
@pytest.mark.parametrize("path", [-3.0, 4.0, 400.0])
def test_estimates(visits: float, path: float) -> None:
    layout = Layout((1, 1), 1)
    found = estimates(0.3, 0.2, 0.05, path, 10.0, 0.2, 1.5, visits, 0.4, -0.7, math.log(2 * 2 * 1 * HORIZON / DELTA), 0.1)
    gamma_excess = estimation.excess(torch.tensor([path], dtype=torch.float64), torch.tensor(10.0), 0.2, 1.5)
    rate = estimation.learning_rate(gamma_excess, number(visits))
    cost_bonus = estimation.bonus(number(visits), layout, 1, horizon=HORIZON, delta=DELTA, bonus_scale=0.1)
    costs = torch.tensor([[-0.7]], dtype=torch.float64)
    updated = estimation.update_cost_estimate(number(0.4)[None], rate, costs[..., None, None])
    rewards, upper = torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.2], dtype=torch.float64)
    expected = (
        estimation.loss_estimate(number(1.0), rewards, upper, 0.05),
        gamma_excess,
        rate,
        cost_bonus,
        updated,
        estimation.optimistic_cost(updated, cost_bonus, number(visits), layout),
    )
    for value, tensor in zip(found, expected, strict=True):
        close(value, tensor.item())


@exposed
def beliefs(estimate, samples, end, occupancy, total, surprise, slack, reward, upper, gamma, mean_loss):
    loss = kernels.hopeful_loss(mean_loss, samples) + kernels.loss_correction(reward, upper, gamma, mean_loss)
    error = math.sqrt(kernels.squared_error(occupancy, estimate, samples))
    return kernels.prior_cost(estimate, samples, end), error, kernels.cumulative_surprise(total, surprise, slack), loss


@pytest.mark.parametrize("samples", [0.0, 1.0, 17.5])
@pytest.mark.parametrize(("estimate", "surprise"), [(0.4, 0.7), (-0.99, -0.7)])
def test_beliefs(samples: float, estimate: float, surprise: float) -> None:
    found = beliefs(estimate, samples, -0.8, 0.6, 0.5, surprise, 0.25, 0.3, 0.2, 0.05, 0.45)
    guess, one = number(estimate)[None], torch.ones(1, dtype=torch.float64)
    sums = estimation.cumulative_surprise(torch.tensor([[0.5, 0.0]], dtype=torch.float64), surprise * one, 0.25)
    expected = (
        estimation.prior_cost(guess, number(samples), number(-0.8)),
        estimation.standard_error(number(0.6), guess, number(samples)),
        sums[0, 0],
        estimation.doubly_robust_loss(number(1.0), 0.3 * one, 0.2 * one, 0.05, number(0.45), number(samples)),
    )
    for value, tensor in zip(found, expected, strict=True):
        close(value, tensor.item())


@exposed
def thresholds(geometry, lower, upper, visits, uncertainty, constant, factor, logarithm, episode):
    total = 0.0
    for p in range(visits.shape[0]):
        total += kernels.step_uncertainty(geometry, p, lower, upper, 0.1 / max(visits[p], 1.0), visits[p])
    empirical = kernels.empirical_threshold(uncertainty, factor, logarithm, episode)
    return total, kernels.violation_threshold(constant, episode), empirical


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_thresholds(layout: Layout) -> None:
    torch_set, own = both_sets("entrywise", layout, seed=15)
    visits, _ = random_counts(layout, seed=15)
    like = {"horizon": HORIZON, "delta": DELTA}
    constant = float(estimation.violation_threshold(1, layout, 2, **like))
    unknown = sum(width > 1 for width in layout.widths[1:])
    factor, logarithm = float(4 * layout.layers + 6 * layout.layers * unknown), math.log(3 * 2 * HORIZON / DELTA)
    found = thresholds(geometry_of(layout), own.lower, own.upper, pairs_of(layout, visits), 5.0, constant, factor, logarithm, 37)
    steps = estimation.step_uncertainty(torch_set.lower, torch_set.upper, 0.1 / visits.clamp_min(1), visits, layout)
    close(found[0], steps.sum().item())
    close(found[1], estimation.violation_threshold(37, layout, 2, **like).item())
    uncertainty = torch.tensor(5.0, dtype=torch.float64)
    close(found[2], estimation.empirical_threshold(uncertainty, 37, layout, 2, **like).item())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Greedy, {}),
        *((OptCMDP, {"radii": radii}) for radii in RADIUS_MODES),
        *((OptCMDP, {"radii": "matched", "confidence": confidence}) for confidence in CONFIDENCE_KINDS),
    ],
    ids=str,
)
def test_the_program_of_opt_cmdp(kind: type[OptCMDP], options: dict[str, str], layout: Layout) -> None:
    scales = {} if kind is Greedy else {"bonus_scale": torch.tensor([1.0, 0.1]), "radius_scale": torch.tensor([0.3, 0.05])}
    learner = kind(layout, 2, HORIZON, DELTA, runs=2, **options, **scales)
    counts = [random_counts(layout, seed) for seed in (18, 19)]
    learner.visits, learner.transition_visits = (torch.stack(each) for each in zip(*counts, strict=True))
    learner.reward_sum = learner.visits * random_policy(layout, seed=20)
    signed = torch.stack([random_policy(layout, seed=21), -random_policy(layout, seed=22)])
    learner.cost_sum = learner.visits.unsqueeze(1) * signed
    rewards, safe_set = learner.program()
    packed, geometry = Packed(learner), geometry_of(layout)
    _, state = packed.room(2)
    carry, follow = callable_from_python(opt_cmdp.carry), callable_from_python(opt_cmdp.follow)
    for run in range(2):
        carry(geometry, packed.settings, run, packed.buffers, state, LOAD)
        for p in range(len(state.visits)):
            follow(geometry, packed.settings, packed.hyperparameters, run, p, state)
        close(state.rewards, pairs_of(layout, rewards[run]))
        for i in range(2):
            close(state.costs[i], pairs_of(layout, safe_set.costs[run, i]))
        close(state.kernels.lower, entries_of(layout, safe_set.lower[run]))
        close(state.kernels.upper, entries_of(layout, safe_set.upper[run]))


def test_two_processes_that_compile_at_once_keep_their_files_apart(tmp_path: Path) -> None:
    one, other = (_KernelFiles(str(tmp_path), "module.kernel-7.py311", "stamp") for _ in range(2))
    saved = one._save_data

    def interrupted(name: str, data: str) -> None:
        other.save("another signature", "its code")
        saved(name, data)

    one._save_data = interrupted
    one.save("a signature", "code")
    assert [one.load("a signature"), one.load("another signature"), one.load("a third")] == ["code", "its code", None]


def test_a_cache_of_older_kernels_is_forgotten(tmp_path: Path) -> None:
    old, new = (_KernelFiles(str(tmp_path), f"module.kernel-{line}.py311", stamp) for line, stamp in ((7, "old"), (9, "new")))
    old.save("a signature", "old code")
    assert new.load("a signature") is None
    new.save("a signature", "code")
    assert old.load("a signature") is None and new.load("a signature") == "code"
    assert len(list(tmp_path.iterdir())) == 1
