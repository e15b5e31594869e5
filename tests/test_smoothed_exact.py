"""Smoothed gradients against literal ones: runs played one after the other, and the formulas of the papers in a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import torchcmdp as tc
from torchcmdp.costs import Drift, MeanCosts
from torchcmdp.learners.practical import RECIPE, practical_costs
from torchcmdp.tuning import Smoothed, Study, Through, estimate_gradient
from torchcmdp.tuning.online import Online
from torchcmdp.tuning.smoothed import Pairs, without

CMDP = tc.random_cmdp((1, 2, 2, 1), 2, 1, seed=0, feasibility="binding", margin=0.2)
POINT = {"eta_scale": 3.0, "gamma_scale": 1.0, "bonus_scale": 0.02, "radius_scale": 0.05}
SIGMA = {"eta_scale": 0.5, "gamma_scale": 0.4, "bonus_scale": 0.3, "radius_scale": 0.7}
CENTRE = np.log(list(POINT.values()))
SPREAD = np.array(list(SIGMA.values()))
WEIGHT, PAIRS, SEED = 2.0, 3, 4


def environment(instances: Tensor, seed: int) -> tc.Simulator:
    return tc.Simulator(CMDP, tc.Bernoulli(CMDP.rewards), tc.Bernoulli(CMDP.costs, low=-1), runs=len(instances), seed=seed)


def noise(seed: int, window: int, pairs: int, parameters: int) -> np.ndarray:
    return np.random.default_rng((seed, window)).standard_normal((pairs, parameters))


class ByHand:
    """Runs of one side of the pairs, alone in their simulator, played episode by episode."""

    def __init__(self, seed: int, pairs: int, horizon: int) -> None:
        self.env, self.horizon, self.learner = environment(torch.zeros(pairs), seed), horizon, None
        self.best = float((tc.safe_optimum(CMDP).occupancy.sum(-1) * CMDP.rewards).sum())

    def objective(self, logs: np.ndarray, episodes: int) -> np.ndarray:
        """What these episodes add to regret + weight * positive violation, with new constants and the old state."""
        scales = dict(zip(POINT, torch.from_numpy(np.exp(logs)).unbind(1), strict=True))
        fresh = tc.WCOPS.for_env(self.env, horizon=self.horizon, delta=0.01, **scales)
        if self.learner is not None:
            constants = {name: value for name, value in fresh.state_dict().items() if name in tc.WCOPS.hyperparameters}
            fresh.load_state_dict({**self.learner.state_dict(), **constants})
        self.learner, total = fresh, np.zeros(self.env.runs)
        for _ in range(episodes):
            policy = self.learner.policy
            occupancy = tc.occupancy_of(policy, CMDP.transitions, CMDP.layout).sum(-1)
            rewards = (occupancy * CMDP.rewards).sum((-3, -2, -1))
            costs = (occupancy.unsqueeze(1) * CMDP.costs).sum((-3, -2, -1)).clamp_min(0).sum(-1)
            total += (self.best - rewards + WEIGHT * costs).numpy()
            self.learner.update(self.env.rollout(policy))
        return total


def windows_by_hand(seed: int, pairs: int, points: list[np.ndarray], window: int, horizon: int, redraw: bool) -> list[np.ndarray]:
    """ES (one window), NRES (the noise of a pair is kept) or PES (it is redrawn, and adds up): a gradient for each point."""
    up, down = ByHand(seed, pairs, horizon), ByHand(seed, pairs, horizon)
    so_far, found = np.zeros((pairs, len(POINT))), []
    for j, point in enumerate(points):
        fresh = noise(seed, j if redraw else 0, pairs, len(POINT))
        so_far = so_far + fresh if redraw else fresh
        difference = up.objective(point + SPREAD * fresh, window) - down.objective(point - SPREAD * fresh, window)
        found.append(difference[:, None] * so_far / (2 * SPREAD) / horizon)
    return found


def close(found: Tensor, expected: np.ndarray) -> bool:
    assert np.abs(expected).max() > 1e-4, "something must be seen"
    return np.allclose(found.numpy(), expected, rtol=1e-7, atol=1e-9)


def test_a_pair_is_its_difference_times_its_noise_over_twice_sigma() -> None:
    study = Study(environment, 1, 12, weight=WEIGHT)
    found = Smoothed(SIGMA).samples(study, tuple(POINT), torch.from_numpy(CENTRE), PAIRS, SEED, None)
    (expected,) = windows_by_hand(SEED, PAIRS, [CENTRE], 12, 12, redraw=False)
    assert close(found.derivatives, expected)


@pytest.mark.parametrize("redraw", [False, True], ids=["NRES", "PES"])
def test_windows_are_those_of_a_literal_implementation_while_the_point_moves(redraw: bool) -> None:
    study = Study(environment, 1, 12, weight=WEIGHT)
    pairs = Pairs(Smoothed(SIGMA, window=4, redraw=redraw), study, tuple(POINT), PAIRS, SEED)
    points = [CENTRE, CENTRE + 0.2, CENTRE - 0.3]
    expected = windows_by_hand(SEED, PAIRS, points, 4, 12, redraw)
    found = [study.objective(pairs.advance(torch.from_numpy(point))) for point in points]
    for window, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert close(ours, theirs), window
    assert not redraw or close(  # and at a point that stays, samples are the sum of the windows
        Smoothed(SIGMA, window=4, redraw=True)
        .samples(study, tuple(POINT), torch.from_numpy(CENTRE), PAIRS, SEED, None)
        .derivatives,
        np.sum(windows_by_hand(SEED, PAIRS, [CENTRE] * 3, 4, 12, redraw), axis=0),
    )


def test_online_steps_add_up_the_windows_that_groups_are_at_with_their_standard_error() -> None:
    """Two windows a run: the first step sees one group, doubled; the second sees both windows, of two groups."""
    study = Study(environment, 1, 8, weight=WEIGHT)
    online = Online(study, tuple(POINT), Smoothed(SIGMA, window=4), PAIRS, SEED)
    points = [CENTRE, CENTRE + 0.2, CENTRE - 0.1]
    found = [online.step(j, torch.from_numpy(point), None) for j, point in enumerate(points)]
    groups = [windows_by_hand(SEED + j, PAIRS, points[j : j + 2], 4, 8, redraw=False) for j in range(3)]
    seen = [[groups[0][0]], [groups[0][1], groups[1][0]], [groups[1][1], groups[2][0]]]
    for estimate, windows in zip(found, seen, strict=True):
        share = 2 / len(windows)
        assert close(estimate.gradient, share * sum(x.mean(0) for x in windows))
        assert close(estimate.standard_error, share * np.sqrt(sum(x.var(0, ddof=1) / PAIRS for x in windows)))
    assert online.run_episodes == 2 * PAIRS * 4 * (1 + 2 + 2)


def test_the_standard_error_is_that_of_the_mean() -> None:
    study, n = Study(environment, 1, 12, weight=WEIGHT), 6
    found = estimate_gradient(study, POINT, estimator=Smoothed(SIGMA), repeats=n, seed=SEED)
    (samples,) = windows_by_hand(SEED, n, [CENTRE], 12, 12, redraw=False)
    assert close(found.gradient, samples.mean(0)) and close(found.standard_error, stats.sem(samples, axis=0))
    assert close(found.half_width, stats.t.ppf(0.975, n - 1) * stats.sem(samples, axis=0))


def test_the_coefficient_of_a_control_is_the_least_squares_of_the_other_half() -> None:
    draw = np.random.default_rng(0)
    control = draw.standard_normal((40, 3))
    samples = 2.0 + control * [0.5, -3.0, 0.0] + 0.1 * draw.standard_normal((40, 3))
    expected = samples.copy()
    for own, other in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        for j in range(3):
            design = np.stack([np.ones(20), control[other, j]], axis=1)
            coefficient = np.linalg.lstsq(design, samples[other, j], rcond=None)[0][1]
            expected[own, j] -= coefficient * control[own, j]
    assert close(without(torch.from_numpy(samples), torch.from_numpy(control)), expected)


@pytest.mark.parametrize("how", [Through(), Through("sampled", memory=1.0, score=False, run_clip=None)], ids=["mixed", "pathwise"])
def test_a_control_is_what_its_slopes_would_have_shown_less_the_slopes(how: Through) -> None:
    """Of mean zero: eps_j / sigma_j <sigma eps, slope> - slope_j, of the derivatives along the same random numbers."""
    study, n, centre = Study(environment, 1, 6, weight=WEIGHT), 12, torch.from_numpy(CENTRE)
    plain = Smoothed(SIGMA).samples(study, tuple(POINT), centre, n, SEED, None).derivatives
    slopes = np.zeros((n, len(POINT)))
    for j in range(len(POINT)):
        along = torch.eye(len(POINT), dtype=torch.float64)[j].expand(n, -1)
        options: dict[str, Any] = {"feedback": how.feedback, "memory": how.memory}
        points, instances = centre.expand(n, -1), torch.zeros(n, dtype=torch.int64)
        found = tc.tuning.forward_derivative(study, tuple(POINT), points, along, instances, SEED, **options)
        slopes[:, j] = tc.tuning.run_derivatives(study, found, how.run_clip, how.score).numpy()
    unit = noise(SEED, 0, n, len(POINT))
    control = np.stack([unit[i] / SPREAD * (unit[i] * SPREAD @ slopes[i]) - slopes[i] for i in range(n)])
    corrected = without(plain, torch.from_numpy(control))
    kept = torch.where(corrected.var(0) < plain.var(0), corrected, plain)
    assert close(Smoothed(SIGMA, control=how).samples(study, tuple(POINT), centre, n, SEED, None).derivatives, kept.numpy())
    assert (kept != plain).any(), "a control that is never kept shows nothing"


GAP = tc.slater_gap(CMDP)
GUARD: dict[str, Any] = {"baseline": tc.baselines.baseline(CMDP, 0.5 * GAP)}
PRACTICAL = {**{name: value for name, value in RECIPE.items() if not name.endswith("_scale")}, "costs": practical_costs()}
LEARNERS: Mapping[str, tuple[type[tc.Learner], dict[str, float], dict[str, Any]]] = {
    "OptCMDP": (tc.OptCMDP, {"bonus_scale": 0.1, "radius_scale": 0.1}, {}),
    "OptCMDP, prior costs": (tc.OptCMDP, {"bonus_scale": 0.1, "margin": 1.0}, {"costs": tc.PriorCosts(drift=Drift())}),
    "OptPrimalDual": (
        tc.OptPrimalDual,
        {"primal_step_scale": 30.0, "bonus_scale": 1e-3},
        {"slater_gap": GAP, "radius_scale": 1e-3},
    ),
    "PDBPS": (tc.PDBPS, {"eta_scale": 30.0, "dual_step_scale": 1.0}, {}),
    "UOBREPS": (tc.UOBREPS, {"eta_scale": 10.0, "gamma_scale": 1.0}, {}),
    "SOPS": (tc.SOPS, {"eta_scale": 10.0, "margin": 1.0}, GUARD),
    "SOPS, prior costs": (tc.SOPS, {"eta_scale": 10.0, "margin": 1.0}, {**GUARD, "costs": tc.PriorCosts()}),
    "WCOPS, mean costs": (tc.WCOPS, {"bonus_scale": 0.05, "eta_scale": 10.0}, {"costs": MeanCosts(margin=0.5)}),
    "WCOPS.practical": (tc.WCOPS, {"eta_scale": 20.0, "radius_scale": 0.01, "margin": 1.0}, PRACTICAL),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_any_learner_and_cost_model_is_played_as_it_would_be_alone(name: str) -> None:
    """Whole runs of both sides by `run`, learners made by their constructors."""
    kind, point, options = LEARNERS[name]
    study = Study(environment, 1, 10, weight=WEIGHT, learner=kind, options=options)
    found = estimate_gradient(study, point, estimator=Smoothed(0.4), repeats=PAIRS, seed=SEED)
    unit, values = noise(SEED, 0, PAIRS, len(point)), []
    for side in (1, -1):
        logs = np.log(list(point.values())) + side * 0.4 * unit
        scales = dict(zip(point, torch.from_numpy(np.exp(logs)).unbind(1), strict=True))
        given = {**options, **scales}
        if "margin" in given:
            costs = given.get("costs") or MeanCosts()  # of SOPS, which has them where nobody asks
            given["costs"] = type(costs)(margin=given.pop("margin"), drift=costs.drift)
        env = environment(torch.zeros(PAIRS), SEED)
        result = tc.run(kind.for_env(env, horizon=10, **given), env, 10, progress=False)
        values.append((result.regret[:, -1] + WEIGHT * result.positive_violation_by_constraint[:, -1].sum(-1)).numpy() / 10)
    expected = (values[0] - values[1])[:, None] * unit / (2 * 0.4)
    assert np.abs(expected).max() > 1e-7
    assert np.allclose(found.gradient.numpy(), expected.mean(0), rtol=1e-5, atol=1e-10)


def test_a_margin_is_that_of_the_learners_own_cost_model_and_needs_one() -> None:
    made = Study(environment, 1, 5, learner=tc.SOPS, options=GUARD).make(environment(torch.zeros(2), 0), {"margin": 1.5})
    assert type(made.costs) is MeanCosts and made.costs.margin.tolist() == [1.5, 1.5]
    with pytest.raises(tc.InvalidInput, match="margin is a setting of a cost model, and OptCMDP has none unless asked"):
        estimate_gradient(Study(environment, 1, 5, learner=tc.OptCMDP), {"margin": 1.0})
