"""The estimators of WC-OPS against the paper's formulas, its product weights, and the properties that the proofs need."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torchcmdp.estimation import (
    bonus,
    empirical_threshold,
    excess,
    expected_learning_rate,
    learning_rate,
    loss_estimate,
    optimistic_cost,
    step_uncertainty,
    update_cost_estimate,
    violation_threshold,
)
from torchcmdp.layout import Layout

LAYOUT = Layout((1, 2, 3, 1), 2)
BANDIT = Layout((1, 1), 1)


def product_weights(rates: list[float]) -> np.ndarray:
    """The paper's w(tau) = beta_tau prod_{h > tau} (1 - beta_h)."""
    return np.array([b * math.prod(1 - later for later in rates[i + 1 :]) for i, b in enumerate(rates)])


def estimate_one_pair(rates: list[float], costs: list[float]) -> float:
    """Run the recursion on the only pair of a bandit, with prescribed rates."""
    estimate = torch.zeros(1, *BANDIT.pair_shape, dtype=torch.float64)
    for rate, cost in zip(rates, costs, strict=True):
        estimate = update_cost_estimate(estimate, torch.full_like(estimate, rate), torch.full_like(estimate, cost))
    return float(estimate)


def capped_rates(gammas: list[float]) -> list[float]:
    """beta at the first, second, ... visit of a pair."""
    visits = [torch.full(BANDIT.pair_shape, n, dtype=torch.float64) for n in range(1, len(gammas) + 1)]
    return [float(learning_rate(torch.tensor([g], dtype=torch.float64), n)) for g, n in zip(gammas, visits, strict=True)]


def test_without_excess_the_estimate_is_the_sample_mean() -> None:
    costs = np.random.default_rng(0).uniform(-1, 1, 25).tolist()
    rates = capped_rates([0.0] * 25)
    assert np.allclose(product_weights(rates), 1 / 25, atol=1e-12)
    assert math.isclose(estimate_one_pair(rates, costs), float(np.mean(costs)), abs_tol=1e-12)


def test_recursion_equals_the_product_weights() -> None:
    rng = np.random.default_rng(1)
    for n in (1, 2, 9):
        rates, costs = (1 - rng.uniform(0, 1, n)).tolist(), rng.uniform(-1, 1, n).tolist()
        assert math.isclose(estimate_one_pair(rates, costs), float(product_weights(rates) @ costs), abs_tol=1e-12)


def test_capped_rates_give_a_convex_combination_and_uncapped_ones_do_not() -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        gammas = (rng.exponential(3, 12) * (rng.random(12) < 0.7)).tolist()
        weights = product_weights(capped_rates(gammas))
        assert weights.min() >= 0 and math.isclose(weights.sum(), 1, abs_tol=1e-12)
    assert abs(estimate_one_pair(capped_rates([2.5] * 5), [1.0, -1.0, 1.0, 1.0, -1.0])) <= 1
    assert math.isclose(product_weights([3.5 / n for n in (1, 2, 3)]).sum(), 1.3125, abs_tol=1e-12)


def test_pairs_not_visited_keep_their_estimate_and_unseen_ones_have_no_rate() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = LAYOUT.pair_mask().to(torch.float64)
    estimate = torch.rand(4, 3, *LAYOUT.pair_shape, generator=generator, dtype=torch.float64) * mask
    visited = torch.zeros(4, *LAYOUT.pair_shape, dtype=torch.float64)
    visited[:, :, 0, 1] = 1
    visits = 4 * visited
    visits[:, 1, 1] = 9  # visited in earlier episodes, but not in this one
    rate = learning_rate(torch.tensor([[0.0, 1.0, 7.0]] * 4, dtype=torch.float64), visits)
    assert torch.equal(rate[:, :, 0, 0, 1], torch.tensor([[0.25, 0.5, 1.0]] * 4, dtype=torch.float64))
    assert (rate.movedim(1, 0)[:, visits == 0] == 0).all()
    costs = torch.rand(4, LAYOUT.layers, 3, generator=generator, dtype=torch.float64)
    updated = update_cost_estimate(estimate, rate * visited.unsqueeze(-4), costs.transpose(1, 2)[..., None, None])
    assert torch.equal(updated.movedim(1, 0)[:, visited == 0], estimate.movedim(1, 0)[:, visited == 0])
    assert torch.allclose(updated[2, 1, 1, 0, 1], 0.5 * estimate[2, 1, 1, 0, 1] + 0.5 * costs[2, 1, 1])
    assert torch.allclose(updated[1, 2, 2, 0, 1], costs[1, 2, 2])


def test_loss_estimate_is_line_5() -> None:
    visited = torch.zeros(2, *LAYOUT.pair_shape, dtype=torch.float64)
    visited[:, :, 0, 1] = 1
    rewards = torch.tensor([[0.0, 0.25, 1.0], [0.5, 0.5, 0.5]], dtype=torch.float64)
    upper = torch.tensor([[0.5, 0.25, 0.125], [1.0, 1.0, 0.5]], dtype=torch.float64)
    loss = loss_estimate(visited, rewards, upper, torch.tensor([0.5, 1.0], dtype=torch.float64))
    expected = torch.tensor([[1.0, 1.0, 0.0], [0.25, 0.25, 1 / 3]], dtype=torch.float64)
    assert torch.allclose(loss[:, :, 0, 1], expected)
    assert (loss[visited == 0] == 0).all()


def test_threshold_is_the_formula_and_unreachable_below_a_million_episodes() -> None:
    layout = Layout((1, 4, 4, 1, 1), 3)  # L = 4, |X| = 11
    T, delta = 10**6, 0.01
    threshold = violation_threshold(torch.tensor([1, T]), layout, 2, horizon=T, delta=delta)
    for t, value in zip((1, T), threshold.tolist(), strict=True):
        assert math.isclose(value, 21 * 4 * 11 * math.sqrt(2 * t * 3 * math.log(2 * 2 * T**2 * 11 * 3 / delta)), rel_tol=1e-12)
    episodes = torch.arange(1, T + 1, 999)
    worst = (4.0 * episodes).unsqueeze(-1).to(torch.float64)  # cost +1 at every step so far
    assert (excess(worst, violation_threshold(episodes, layout, 2, horizon=T, delta=delta)) == 0).all()


def test_step_uncertainty_is_that_of_the_widths_in_force() -> None:
    visits = torch.full((1, *LAYOUT.pair_shape), 5.0, dtype=torch.float64) * LAYOUT.pair_mask()
    visits[0, 1, 0, 0] = 0
    mask = LAYOUT.transition_mask().to(torch.float64)
    lower, upper, b = 0.1 * mask, 0.4 * mask, 0.3 * LAYOUT.pair_mask().to(torch.float64)
    found = step_uncertainty(lower, upper, b, visits, LAYOUT)[0]
    L = 3
    assert math.isclose(found[0, 0, 0], 2 * 0.3 + 3 * L * 2 * 0.3)  # two successors
    assert math.isclose(found[1, 1, 0], 2 * 0.3 + 3 * L * 3 * 0.3)  # three
    assert math.isclose(found[1, 0, 0], 2 + 3 * L * 3 * 0.3)  # never visited: nothing is known of its cost
    assert math.isclose(found[2, 1, 1], 2 * 0.3)  # a single successor has nothing to learn
    assert (found[~LAYOUT.pair_mask()] == 0).all()
    assert math.isclose(step_uncertainty(0 * mask, mask, 9 * b, visits, LAYOUT)[0, 0, 0, 0], 2 + 3 * L * 2)  # both are capped


def test_empirical_threshold_adds_the_luck_of_the_paths() -> None:
    layout, t, T, delta = Layout((1, 4, 1, 3, 1), 2), 50, 1000, 0.05  # L = 4, two layers with several successors
    found = empirical_threshold(torch.tensor([0.0, 7.0], dtype=torch.float64), t, layout, 2, horizon=T, delta=delta)
    luck = (4 * 4 + 6 * 4 * 2) * math.sqrt(2 * t * math.log(3 * 2 * T / delta))
    assert torch.allclose(found, torch.tensor([luck, 7 + luck], dtype=torch.float64))
    bandit = empirical_threshold(torch.zeros(1, dtype=torch.float64), t, BANDIT, 1, horizon=T, delta=delta)
    assert math.isclose(float(bandit), 4 * math.sqrt(2 * t * math.log(3 * T / delta)), rel_tol=1e-12)


def test_the_expected_rate_is_the_rate_where_a_visit_is_certain() -> None:
    visits = torch.tensor([0.0, 1.0, 4.0, 0.25], dtype=torch.float64).view(1, 1, 4, 1)
    visited = torch.tensor([0.0, 1.0, 1.0, 0.25], dtype=torch.float64).view(1, 1, 4, 1)
    gamma = torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    found = expected_learning_rate(gamma, visits, visited).squeeze()
    assert torch.equal(found[:, :3], learning_rate(gamma, visits).squeeze()[:, :3])
    assert (found[:, 3] == 1).all()  # the first visits, however few, are all that is known
    half = expected_learning_rate(gamma, visits, 0.5 * visited).squeeze()
    assert half[0, 2] == 0.125 and half[1, 2] == 0.375


def test_excess_starts_at_the_threshold_and_ends_at_the_cap() -> None:
    S = torch.tensor([[-3.0, 9.9, 10.0, 12.5, 1e6]], dtype=torch.float64)
    C = torch.tensor(10.0)
    assert torch.allclose(excess(S, C), torch.tensor([[0.0, 0.0, 0.0, 2.5, 10.0]], dtype=torch.float64))
    scales = torch.tensor([1.0, 0.0], dtype=torch.float64)
    both = excess(S.expand(2, -1), C, scales, torch.tensor([0.2, 1.0], dtype=torch.float64))
    assert torch.allclose(both[0], torch.tensor([0.0, 0.0, 0.0, 2.0, 2.0], dtype=torch.float64))
    # a threshold scaled to nothing must make Gamma react at once, not vanish with the cap
    assert torch.allclose(both[1], torch.tensor([0.0, 9.9, 10.0, 10.0, 10.0], dtype=torch.float64))


def test_bonus_and_optimistic_cost_are_line_7() -> None:
    visits = torch.zeros(2, *LAYOUT.pair_shape, dtype=torch.float64)
    visits[:, 0, 0] = torch.tensor([4.0, 900.0])
    visits[:, 1, 1, 0] = 10_000
    T, delta, scale = 1000, 0.05, torch.tensor([1.0, 0.1], dtype=torch.float64)
    b = bonus(visits, LAYOUT, 2, horizon=T, delta=delta, bonus_scale=scale)
    log = math.log(2 * 2 * 7 * 2 * T / delta)
    for j, s in enumerate((1.0, 0.1)):
        assert math.isclose(float(b[j, 0, 0, 1]), s * math.sqrt(2 * log / 900), rel_tol=1e-12)
    estimate = torch.full((2, 2, *LAYOUT.pair_shape), 0.3, dtype=torch.float64) * LAYOUT.pair_mask()
    g = optimistic_cost(estimate, b, visits, LAYOUT)
    mask = LAYOUT.pair_mask()
    for j in range(2):
        assert torch.allclose(g[j, :, 1, 1, 0], 0.3 - b[j, 1, 1, 0])
        assert torch.allclose(g[j, :, 0, 0, 0], (0.3 - b[j, 0, 0, 0]).clamp_min(-1))
    assert float(g[0, 0, 0, 0, 0]) == -1 < float(g[1, 0, 0, 0, 0])
    assert (g.movedim(1, 0)[:, (visits == 0) & mask] == -1).all()
    assert (g[..., ~mask] == 0).all() and (b[..., ~mask] == 0).all()


@pytest.mark.parametrize("m", [0, 2])
def test_empty_constraint_axis_meta_and_float32(m: int) -> None:
    for device, dtype in (("meta", torch.float64), ("cpu", torch.float32)):
        visits = torch.ones(3, *LAYOUT.pair_shape, device=device, dtype=dtype)
        scale = torch.ones(3, device=device, dtype=dtype)
        C = violation_threshold(torch.tensor(3, device=device), LAYOUT, m, horizon=10, delta=0.1)
        gamma = excess(torch.ones(3, m, device=device, dtype=dtype), C, scale, scale)
        rate = learning_rate(gamma, visits)
        estimate = torch.zeros(3, m, *LAYOUT.pair_shape, device=device, dtype=dtype)
        estimate = update_cost_estimate(estimate, rate * visits.unsqueeze(-4), torch.ones_like(estimate))
        b = bonus(visits, LAYOUT, m, horizon=10, delta=0.1, bonus_scale=scale)
        g = optimistic_cost(estimate, b, visits, LAYOUT)
        loss = loss_estimate(
            visits, torch.ones(3, 3, device=device, dtype=dtype), torch.ones(3, 3, device=device, dtype=dtype), scale
        )
        assert g.shape == (3, m, *LAYOUT.pair_shape)
        assert gamma.dtype == g.dtype == b.dtype == loss.dtype == dtype


def test_gradients_match_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)
    visits = (1 + torch.randint(0, 20, (2, *LAYOUT.pair_shape), generator=generator)).to(torch.float64)
    visited = torch.zeros_like(visits)
    visited[:, :, 0, 0] = 1
    costs = torch.rand(2, LAYOUT.layers, 1, generator=generator, dtype=torch.float64)

    def whole(gamma, scale, threshold_scale, cap_scale):
        g = excess(torch.full((2, 1), 7.0, dtype=torch.float64), torch.tensor(10.0), threshold_scale, cap_scale)
        old = torch.zeros(2, 1, *LAYOUT.pair_shape, dtype=torch.float64)
        rate = learning_rate(g, visits) * visited.unsqueeze(-4)
        estimate = update_cost_estimate(old, rate, costs.transpose(1, 2)[..., None, None])
        b = bonus(visits, LAYOUT, 1, horizon=100, delta=0.1, bonus_scale=scale)
        loss = loss_estimate(visited, costs.squeeze(-1), 0.5 + 0 * costs.squeeze(-1), gamma)
        return optimistic_cost(estimate, b, visits, LAYOUT), loss

    inputs = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in ([0.1, 0.2], [0.1, 0.05], [0.5, 0.1], [0.7, 0.03])]
    assert torch.autograd.gradcheck(whole, inputs, check_forward_ad=True)
