"""The estimators of WC-OPS: losses, adaptively weighted costs, what makes them optimistic, a test for costs that change.

Throughout, `(... x L x S x A)`: `visits` are N(x,a), `samples` n(x,a) and `visited` what an episode adds to them; u is the `upper`
occupancy and b the `cost_bonus`. `estimate` is ghat_i, `(... x m x L x S x A)`, and `costs` what was met, of a shape that
broadcasts to that; `gamma_excess` is Gamma_i and `path_violation` S_i, `(... x m)`. Gamma and scales are floats, or `(...)`;
`constraints` is m, `horizon` T and `episode` t, the number of episodes observed, an int or a tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchcmdp.hyperparameters import PerRun
from torchcmdp.layout import Layout

# The smallest variance of a cost that a standard error believes in: a mean of few samples may look like a certain one.
LEAST_VARIANCE = 0.05


def loss_estimate(visited: Tensor, rewards: Tensor, upper: Tensor, gamma: PerRun) -> Tensor:
    """The loss 1 - r, importance-weighted by u + gamma at the visited pairs and zero elsewhere (line 5, D6): `(... x L x S x A)`.

    Rewards and u are those of the visited pairs, `(... x L)`.
    """
    gamma = gamma[..., None] if isinstance(gamma, Tensor) else gamma
    return ((1 - rewards) / (upper + gamma))[..., None, None] * visited


def doubly_robust_loss(visited: Tensor, rewards: Tensor, upper: Tensor, gamma: PerRun, mean_loss: Tensor, visits: Tensor) -> Tensor:
    """m N / (N + 1) + 1{x,a} (1 - r - m) / (u + gamma): the mean loss so far, corrected at the visited pairs, `(... x L x S x A)`.

    Only what the mean does not explain is importance-weighted, which leaves less variance. The mean has one sample of loss zero
    added to it where it stands alone, so that a pair seen rarely looks good.

    Args:
        visited, rewards, upper, gamma: As for `loss_estimate`.
        mean_loss: m, the mean of 1 - r at each pair before the episode, zero where it was never visited, `(... x L x S x A)`.
        visits: N(x,a) before the episode.
    """
    gamma = gamma[..., None] if isinstance(gamma, Tensor) else gamma
    weight = (1 / (upper + gamma))[..., None, None] * visited
    return mean_loss * (visits / (visits + 1)) + weight * ((1 - rewards)[..., None, None] - mean_loss)


def violation_threshold(episode: Tensor | int, layout: Layout, constraints: int, *, horizon: int, delta: float) -> Tensor:
    """C_t = 21 L |X| sqrt(2 t |A| ln(2 m T^2 |X| |A| / delta)), what the path violation may reach before Gamma reacts.

    Float64, of the shape of `episode`.
    """
    logarithm = math.log(2 * max(constraints, 1) * horizon**2 * layout.total_states * layout.actions / delta)
    constant = 21 * layout.layers * layout.total_states * math.sqrt(2 * layout.actions * logarithm)
    return constant * torch.as_tensor(episode).to(torch.float64).sqrt()


def step_uncertainty(lower: Tensor, upper: Tensor, cost_bonus: Tensor, visits: Tensor, layout: Layout) -> Tensor:
    """min(2, 2b) + 3L min(2, sum_y upper - lower): what a visit may add to a violation that looks safe (a.6), `(... x L x S x A)`.

    The first term bounds how far the optimistic cost lies below the mean, and is 2 at pairs never visited. The second bounds what
    not knowing the transitions adds, by the intervals in force, `(... x L x S x A x K)`, and is left out where there is only one
    successor.
    """
    several = layout.next_widths(visits.device) > 1
    kernel_term = 3 * layout.layers * several * (upper - lower).sum(-1).clamp_max(2)
    return (torch.where(visits > 0, (2 * cost_bonus).clamp_max(2), 2.0) + kernel_term) * layout.pair_mask(visits.device)


def empirical_threshold(
    uncertainty: Tensor, episode: Tensor | int, layout: Layout, constraints: int, *, horizon: int, delta: float
) -> Tensor:
    """C_t from the widths in force: their sum along the paths, and for luck (4L + 6L L') sqrt(2 t ln(3 m T / delta)) (a.6).

    L' counts the layers whose transitions are to be learnt, those in which a pair has more than one successor. The sum of
    `step_uncertainty` over all visits so far is `uncertainty`, `(...)`, and so is the result.
    """
    factor, logarithm = luck_terms(layout, constraints, horizon=horizon, delta=delta)
    luck = factor * (2 * logarithm * torch.as_tensor(episode).to(torch.float64)).sqrt()
    return uncertainty + luck.to(uncertainty.dtype)


def luck_terms(layout: Layout, constraints: int, *, horizon: int, delta: float) -> tuple[int, float]:
    """4L + 6L L' and ln(3 m T / delta), of the empirical threshold."""
    layers, unknown = layout.layers, int((layout.next_widths() > 1).flatten(1).any(1).sum())
    return 4 * layers + 6 * layers * unknown, math.log(3 * max(constraints, 1) * horizon / delta)


def excess(path_violation: Tensor, threshold: Tensor, threshold_scale: PerRun = 1.0, cap_scale: PerRun = 1.0) -> Tensor:
    """Gamma_i = min(max(S_i - threshold_scale C_t, 0), cap_scale C_t): `(... x m)`, for C_t `(...)`.

    With one scale for both (D1), scaling C_t would scale Gamma away (D1b).
    """
    threshold = threshold.to(path_violation.dtype)
    start, cap = (threshold_scale * threshold).unsqueeze(-1), (cap_scale * threshold).unsqueeze(-1)
    return torch.minimum((path_violation - start).clamp_min(0), cap)


def learning_rate(gamma_excess: Tensor, visits: Tensor) -> Tensor:
    """beta = min(1, (1 + Gamma_i) / N(x,a)), and zero where N = 0, with the episode counted in N: `(... x m x L x S x A)`.

    Line 6; without the cap the weights leave the simplex (D2).
    """
    visits = visits.unsqueeze(-4)
    rate = (1 + gamma_excess)[..., None, None, None] / visits.clamp_min(1)
    return torch.minimum(rate, visits.clamp_max(1))  # the cap is one where the pair was visited and zero where it was not


def expected_learning_rate(gamma_excess: Tensor, visits: Tensor, visited: Tensor) -> Tensor:
    """min(1, (1 + Gamma_i) v(x,a) / N(x,a)), and zero where N = 0: beta where an episode visits a pair v <= 1 times on average."""
    share = torch.where(visits > 0, visited / torch.where(visits > 0, visits, 1.0), 0.0)
    return ((1 + gamma_excess)[..., None, None, None] * share.unsqueeze(-4)).clamp_max(1)


def update_cost_estimate(estimate: Tensor, rate: Tensor, costs: Tensor) -> Tensor:
    """ghat + beta (g - ghat) (line 7 as a recursion, exactly the paper's product weights), with beta zero at pairs not visited."""
    return torch.addcmul(estimate, rate, costs - estimate)


def bonus_log_term(layout: Layout, constraints: int, *, horizon: int, delta: float) -> float:
    """ln(2 m |X| |A| T / delta), the logarithm in the bonus."""
    return math.log(2 * max(constraints, 1) * layout.total_states * layout.actions * horizon / delta)


def bonus(visits: Tensor, layout: Layout, constraints: int, *, horizon: int, delta: float, bonus_scale: PerRun = 1.0) -> Tensor:
    """b_t = bonus_scale sqrt(2 ln(2 m |X| |A| T / delta) / N(x,a)); zero in the padding, and at N = 0 its value at N = 1."""
    logarithm = bonus_log_term(layout, constraints, horizon=horizon, delta=delta)
    return hoeffding_radius(visits, layout, logarithm, bonus_scale)


def hoeffding_radius(visits: Tensor, layout: Layout, logarithm: float, scale: PerRun) -> Tensor:
    """scale sqrt(2 logarithm / N(x,a)) for every pair, with N at least one, and zero in the padding."""
    scale = scale[..., None, None, None] if isinstance(scale, Tensor) else scale
    return scale * (2 * logarithm / visits.clamp_min(1)).sqrt() * layout.pair_mask(visits.device)


def optimistic_cost(estimate: Tensor, cost_bonus: Tensor, visits: Tensor, layout: Layout, low: Tensor | None = None) -> Tensor:
    """max(low, ghat - b), and low at pairs never visited (in line 9, D3): `(... x m x L x S x A)`.

    What each mean cost can be at least is `low`, of a shape that broadcasts, zero in the padding; -1 unless more is known.
    """
    lowest = 0 - layout.pair_mask(visits.device).to(estimate.dtype) if low is None else low
    return torch.where(visits.unsqueeze(-4) > 0, torch.maximum(estimate - cost_bonus.unsqueeze(-4), lowest), lowest)


def pessimistic_cost(estimate: Tensor, cost_bonus: Tensor, visits: Tensor, layout: Layout) -> Tensor:
    """min(1, ghat + b), and 1 at pairs never visited: the other side of `optimistic_cost`."""
    highest = layout.pair_mask(visits.device).to(estimate.dtype)
    return torch.where(visits.unsqueeze(-4) > 0, (estimate + cost_bonus.unsqueeze(-4)).clamp_max(1), highest)


def prior_cost(estimate: Tensor, samples: Tensor, end: Tensor) -> Tensor:
    """(n ghat + end) / (n + 1): the mean with one sample more, at an end of the costs' range, which broadcasts."""
    samples = samples.unsqueeze(-4)
    return (samples * estimate + end) / (samples + 1)


def standard_error(occupancy: Tensor, estimate: Tensor, samples: Tensor) -> Tensor:
    """min(1, sqrt(sum q(x,a)^2 max(1 - ghat_i(x,a)^2, 0.05) / n(x,a))), of the cost that a policy is believed to have: `(... x m)`.

    1 - ghat^2 is the largest variance that a cost in [-1, 1] with this mean can have; below 0.05 it is not trusted. No sample
    counts as one, and the occupancy q(x,a) is zero in the padding.
    """
    weights = (occupancy.square() / samples.clamp_min(1)).unsqueeze(-4)
    return (weights * (1 - estimate.square()).clamp_min(LEAST_VARIANCE)).sum((-3, -2, -1)).sqrt().clamp_max(1)


def surprise(visited: Tensor, costs: Tensor, estimate: Tensor, samples: Tensor) -> Tensor:
    """D_i, the sum over the path of g_i - ghat_i at the pairs seen before the episode: `(... x m)`."""
    known = (visited * (samples > 0)).unsqueeze(-4)
    return (known * (costs - estimate)).sum((-3, -2, -1))


def cumulative_surprise(sums: Tensor, episode_surprise: Tensor, slack: float) -> Tensor:
    """c+ <- max(0, c+ + D - slack) and c- <- max(0, c- - D - slack): Page's test, on both sides, `(... x m x 2)`.

    An episode may surprise by `slack` for free.
    """
    return (sums + torch.stack([episode_surprise, -episode_surprise], dim=-1) - slack).clamp_min(0)
