"""The estimators of WC-OPS at one pair, as `torchcmdp.estimation` has them."""

from __future__ import annotations

import math

from torchcmdp.estimation import LEAST_VARIANCE
from torchcmdp.kernels.options import formula


@formula
def loss_estimate(reward, upper, gamma):
    """The loss 1 - r, importance-weighted by u + gamma (line 5, D6)."""
    return (1.0 - reward) / (upper + gamma)


@formula
def hopeful_loss(mean_loss, visits):
    """m N / (N + 1), of the doubly robust loss at every pair."""
    return mean_loss * (visits / (visits + 1.0))


@formula
def loss_correction(reward, upper, gamma, mean_loss):
    """(1 - r - m) / (u + gamma), of the doubly robust loss at a visited pair."""
    return 1.0 / (upper + gamma) * ((1.0 - reward) - mean_loss)


@formula
def violation_threshold(constant, episode):
    """C_t, with all of the formula but sqrt(t) in the constant."""
    return constant * math.sqrt(float(episode))


@formula
def step_uncertainty(geometry, p, lower, upper, cost_bonus, visits):
    """min(2, 2b) + 3L min(2, sum_y upper - lower): what a visit may add to a violation that looks safe (a.6)."""
    begin, end = geometry.row[p], geometry.row[p + 1]
    spread = 0.0
    for e in range(begin, end):
        spread += upper[e] - lower[e]
    layers = geometry.first.shape[0] - 1
    kernel_term = 3.0 * layers * min(spread, 2.0) if end - begin > 1 else 0.0
    return (min(2.0 * cost_bonus, 2.0) if visits > 0.0 else 2.0) + kernel_term


@formula
def empirical_threshold(uncertainty, factor, logarithm, episode):
    """C_t from the widths in force: their sum along the paths, and for luck factor * sqrt(2 t ln(3 m T / delta)) (a.6)."""
    return uncertainty + factor * math.sqrt(2.0 * logarithm * float(episode))


@formula
def excess(path_violation, threshold, threshold_scale, cap_scale):
    """Gamma_i = min(max(S_i - threshold_scale C_t, 0), cap_scale C_t) (D1)."""
    return min(max(path_violation - threshold_scale * threshold, 0.0), cap_scale * threshold)


@formula
def learning_rate(gamma_excess, visits):
    """beta = min(1, (1 + Gamma_i) / N(x,a)), and zero where N = 0 (line 6, D2)."""
    return min((1.0 + gamma_excess) / max(visits, 1.0), min(visits, 1.0))


@formula
def update_cost_estimate(estimate, rate, cost):
    """ghat + beta (g - ghat) (line 6)."""
    return estimate + rate * (cost - estimate)


@formula
def bonus(visits, logarithm, bonus_scale):
    """b_t = bonus_scale sqrt(2 logarithm / N(x,a)), and at N = 0 its value at N = 1."""
    return bonus_scale * math.sqrt(2.0 * logarithm / max(visits, 1.0))


@formula
def prior_cost(estimate, samples, end):
    """(n ghat + end) / (n + 1)."""
    return (samples * estimate + end) / (samples + 1.0)


@formula
def squared_error(occupancy, estimate, samples):
    """q^2 max(1 - ghat^2, 0.05) / n, what a pair adds to the square of a standard error."""
    return occupancy * occupancy / max(samples, 1.0) * max(1.0 - estimate * estimate, LEAST_VARIANCE)


@formula
def cumulative_surprise(total, surprise, slack):
    """max(0, c + D - slack): one side of Page's test."""
    return max(total + surprise - slack, 0.0)


@formula
def optimistic_cost(estimate, cost_bonus, visits, low):
    """max(low, ghat - b), and low at pairs never visited (line 7, D3)."""
    return max(estimate - cost_bonus, low) if visits > 0.0 else low
