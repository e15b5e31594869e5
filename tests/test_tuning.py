"""Derivatives through the learner: both modes, against finite differences, unbiased where they claim it, and in constant memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import interrupted
from torch import Tensor

import torchcmdp as tc
from torchcmdp.tuning import (
    SCALES,
    Descent,
    Study,
    Through,
    estimate_gradient,
    forward_derivative,
    optimise,
    random_search,
    reverse_derivative,
    run_derivatives,
)
from torchcmdp.tuning.study import FEEDBACKS, _of_others

ROOT = Path(__file__).parents[1]
CMDPS = [tc.random_cmdp((1, 2, 2, 1), 2, 1, seed=seed) for seed in range(2)]
# Safety binds, Gamma reacts within a few episodes, and its cap is felt
POINT = {
    "eta_scale": 3.0,
    "gamma_scale": 1.0,
    "bonus_scale": 0.02,
    "radius_scale": 0.05,
    "threshold_scale": 1e-4,
    "cap_scale": 1e-4,
}
BOX = {name: (1e-6, 10.0) for name in SCALES}


def environment(instances: Tensor, seed: int) -> tc.Simulator:
    cmdp = tc.stack_cmdps([CMDPS[i] for i in instances.tolist()])
    return tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1), runs=len(instances), seed=seed)


def changing_environment(instances: Tensor, seed: int) -> tc.Simulator:
    """Costs that change: where they do not, an expected cost estimate is exact whatever its weights are."""
    cmdp = tc.stack_cmdps([CMDPS[i] for i in instances.tolist()])
    costs = tc.Switching([cmdp.costs, cmdp.layout.pair_mask() * (0.5 + cmdp.costs / 2)], at=[2])
    return tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), costs, runs=len(instances), seed=seed)


def log_point(runs: int) -> Tensor:
    return torch.tensor([POINT[name] for name in SCALES], dtype=torch.float64).log().repeat(runs, 1)


@pytest.mark.parametrize("memory", [1.0, 0.8])
@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_forward_and_reverse_mode_agree(feedback: str, memory: float) -> None:
    study, runs = Study(environment, 2, 12, weight=2.0), 12
    instances = torch.arange(runs) % 2
    directions = torch.randn(runs, len(SCALES), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options: dict[str, Any] = {"feedback": feedback, "memory": memory}
    forward = forward_derivative(study, SCALES, log_point(runs), directions, instances, 3, **options)
    reverse = reverse_derivative(study, SCALES, log_point(runs), instances, 3, **options)
    for ours, theirs in ((forward.pathwise, reverse.pathwise), (forward.score, reverse.score)):
        assert torch.allclose(ours, (theirs * directions.unsqueeze(1)).sum(-1), rtol=1e-8, atol=1e-8)
    assert (reverse.pathwise.abs().amax((0, 1))[:4] > 1e-3).all(), "the steps, the bonus and the widths must matter here"
    assert (forward.score == 0).all() == (feedback != "sampled")
    assert torch.equal(forward.played.parts, reverse.played.parts)


@pytest.mark.parametrize(
    ("threshold", "cap", "matters"),
    [(8e-4, 1e-2, "threshold_scale"), (1e-6, 1e-4, "cap_scale")],
    ids=["below its cap", "at its cap"],
)
def test_expected_feedback_passes_gradcheck(threshold: float, cap: float, matters: str) -> None:
    """Once where Gamma follows the threshold, and once where it is at its cap."""
    study = Study(changing_environment, 2, 8, weight=2.0)
    instances = torch.arange(2)

    def objective(log_scales: Tensor) -> Tensor:
        scales = {name: log_scales[:, j].exp() for j, name in enumerate(SCALES)}
        return study.objective(study.play(scales, instances, 0, feedback="expected").parts)

    start = log_point(2)
    start[:, 4:] = torch.tensor([threshold, cap], dtype=torch.float64).log()
    (slopes,) = torch.autograd.grad(objective(point := start.clone().requires_grad_()).sum(), [point])
    for name in (*SCALES[:4], matters):
        assert slopes[:, SCALES.index(name)].abs().max() > 1e-6, f"{name} does not matter here, and so is not tested"
    assert torch.autograd.gradcheck(objective, [start.requires_grad_()], atol=1e-6, rtol=1e-4, check_forward_ad=True)


def test_expected_feedback_does_not_depend_on_the_seed() -> None:
    study = Study(environment, 2, 5)
    first, second = (study.play(POINT, torch.arange(2), seed, feedback="expected").parts for seed in (0, 1))
    assert torch.equal(first, second)


def test_mixed_feedback_has_the_values_of_sampled_feedback() -> None:
    study, instances = Study(environment, 2, 25), torch.arange(8) % 2
    sampled, mixed = (study.play(POINT, instances, 5, feedback=feedback) for feedback in ("sampled", "mixed"))
    assert torch.allclose(sampled.parts, mixed.parts, atol=1e-8) and torch.allclose(sampled.violation, mixed.violation, atol=1e-8)


def test_the_estimator_is_unbiased_and_the_pathwise_one_is_not() -> None:
    """Against central differences of the expectation with common random numbers, within the 99% interval of the difference."""
    names, horizon, runs, h = ("eta_scale", "gamma_scale", "bonus_scale", "radius_scale"), 8, 6000, 0.25
    two_path = tc.two_path_cmdp()

    def world(instances: Tensor, seed: int) -> tc.Simulator:
        costs = tc.Bernoulli(two_path.costs, low=-1)
        return tc.Simulator(two_path, tc.Bernoulli(two_path.rewards), costs, runs=len(instances), seed=seed)

    study = Study(world, 1, horizon, weight=2.0)
    point = torch.tensor([2.0, 0.5, 0.1, 0.1], dtype=torch.float64).log()
    instances = torch.zeros(runs, dtype=torch.int64)
    pathwise_errors = []
    for j, direction in enumerate(torch.eye(len(names), dtype=torch.float64)):
        found = forward_derivative(study, names, point.repeat(runs, 1), direction.repeat(runs, 1), instances, 1)
        values = [
            study.objective(study.play(dict(zip(names, (point + s * direction).exp(), strict=True)), instances, 2).parts)
            for s in (h, -h, h / 2, -h / 2)
        ]
        # Richardson's extrapolation of the two differences, so that what is left of the error is noise
        difference = (4 * (values[2] - values[3]) / h - (values[0] - values[1]) / (2 * h)) / 3
        unbiased, pathwise = run_derivatives(study, found), study.objective(found.pathwise)

        def distance(estimate: Tensor, difference: Tensor = difference) -> float:
            return float((estimate.mean() - difference.mean()) / (estimate.var() / runs + difference.var() / runs).sqrt())

        print(f"{names[j]}: {unbiased.mean():.5f}, pathwise {pathwise.mean():.5f}, differences {difference.mean():.5f}")
        assert abs(distance(unbiased)) < 2.58, f"{names[j]} is {distance(unbiased):.1f} standard errors off"
        pathwise_errors.append(abs(distance(pathwise)))
    assert max(pathwise_errors) > 5


@pytest.mark.parametrize(
    ("name", "cmdp", "horizon", "threshold", "cap", "h", "runs"),
    [
        ("cap_scale", tc.two_path_cmdp(), 8, 4e-4, 1e-3, 0.02, 12_000),
        ("threshold_scale", tc.single_state_cmdp([0.9, 0.2], [[0.4, -0.4]]), 10, 3.03e-3, 0.1, 0.004, 40_000),
    ],
    ids=["cap", "threshold"],
)
def test_the_estimator_is_unbiased_where_gamma_reacts(
    name: str, cmdp: tc.LayeredCMDP, horizon: int, threshold: float, cap: float, h: float, runs: int
) -> None:
    """Gamma has kinks where the path's cost meets its threshold or cap: differences over a long step would straddle them."""

    def world(instances: Tensor, seed: int) -> tc.Simulator:
        costs = tc.Bernoulli(cmdp.costs, low=-1)
        return tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), costs, runs=len(instances), seed=seed)

    study, instances = Study(world, 1, horizon, weight=2.0), torch.zeros(runs, dtype=torch.int64)
    point = torch.tensor([2.0, 0.5, 0.1, 0.1, threshold, cap], dtype=torch.float64).log()
    direction = torch.eye(len(SCALES), dtype=torch.float64)[SCALES.index(name)]
    found = run_derivatives(
        study, forward_derivative(study, SCALES, point.repeat(runs, 1), direction.repeat(runs, 1), instances, 1)
    )
    up, down = (
        study.objective(study.play(dict(zip(SCALES, (point + s * direction).exp(), strict=True)), instances, 2).parts)
        for s in (h, -h)
    )
    difference = (up - down) / (2 * h)
    error = (found.var() / runs + difference.var() / runs).sqrt()
    assert abs(found.mean() - difference.mean()) < 2.58 * error
    assert abs(found.mean()) > 2.58 * (found.var() / runs).sqrt(), f"{name} must matter here"


def test_the_unbiased_estimator_explodes_with_the_horizon_and_the_mixed_one_does_not() -> None:
    """Why there is a biased estimator at all."""
    runs = 24
    direction = torch.zeros(runs, len(SCALES), dtype=torch.float64)
    direction[:, SCALES.index("eta_scale")] = 1

    def spread(horizon: int, feedback: str) -> float:
        study = Study(environment, 2, horizon, weight=2.0)
        found = forward_derivative(study, SCALES, log_point(runs), direction, torch.arange(runs) % 2, 0, feedback=feedback)
        return float(run_derivatives(study, found).std())

    assert spread(80, "sampled") > 5 * spread(20, "sampled")
    assert spread(80, "mixed") < 2 * spread(20, "mixed")


MEMORY = """
import resource, sys, torch
sys.path.insert(0, "tests")
import test_tuning as t
runs = 120
directions = torch.eye(6, dtype=torch.float64)[torch.arange(runs) % 6]
def play(horizon):
    study = t.Study(t.environment, 2, horizon)
    t.forward_derivative(study, t.SCALES, t.log_point(runs), directions, torch.arange(runs) % 2, 0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
short = play(8)
print(play(80) - short)
"""


def test_forward_mode_needs_no_more_memory_for_ten_times_the_horizon() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], cwd=ROOT, capture_output=True, text=True, check=True)
    # in reverse mode it is some 60 MB
    assert int(done.stdout) < 15_000, f"{int(done.stdout) / 1000} MB more"


def test_the_baseline_is_the_mean_of_the_others_of_the_group() -> None:
    values = torch.tensor([[1.0], [2.0], [6.0], [5.0], [7.0]], dtype=torch.float64)
    found = _of_others(values, torch.tensor([1, 1, 1, 2, 0])).squeeze(-1)
    assert found.tolist() == [4.0, 3.5, 1.5, 0.0, 0.0]


def test_estimate_gradient_takes_each_partial_derivative_from_its_own_runs() -> None:
    study = Study(environment, 2, 6, weight=2.0)
    start = {name: POINT[name] for name in ("eta_scale", "bonus_scale")}
    found = estimate_gradient(study, start, estimator=Through(memory=1.0, run_clip=None), repeats=3, seed=4)
    log_scales = torch.tensor([3.0, 0.02], dtype=torch.float64).log().repeat(12, 1)
    whole = reverse_derivative(study, ("eta_scale", "bonus_scale"), log_scales, torch.arange(12) % 2, 4, feedback="mixed")
    per_run = study.objective(whole.pathwise.transpose(1, 2))
    assert torch.allclose(found.gradient, torch.stack([per_run[:6, 0].mean(), per_run[6:, 1].mean()]), atol=1e-10)
    assert found.objective == pytest.approx(float(study.objective(whole.played.parts).mean()))
    clipped = estimate_gradient(study, start, estimator=Through(memory=1.0, run_clip=1e-3), repeats=3, seed=4)
    assert (clipped.gradient.abs() <= 1e-3).all() and (found.gradient.abs() > 1e-3).any()


def test_descent_improves_a_deterministic_study() -> None:
    study = Study(environment, 2, 15, weight=2.0)
    start = {"eta_scale": 0.1, "bonus_scale": 0.05}
    descent = Descent(steps=8, learning_rate=0.5, estimator="expected", repeats=1)
    result = optimise(study, start, descent, box=BOX, progress=False)
    objectives = [row["Tuning/objective"] for row in result.history]
    assert objectives[-1] < 0.95 * objectives[0]
    assert result.scales.keys() == start.keys() and result.run_episodes == len(objectives) * 2 * 2 * 15


def test_descent_respects_its_box_and_its_patience() -> None:
    study = Study(environment, 2, 5)
    narrow = {"eta_scale": (0.9, 1.1)}
    descent = Descent(steps=30, patience=2, estimator="expected", repeats=1)
    result = optimise(study, {"eta_scale": 1.0}, descent, box=narrow, progress=False)
    assert all(0.9 - 1e-9 <= row["Scales/eta_scale"] <= 1.1 + 1e-9 for row in result.history)
    assert 4 <= len(result.history) < 30, "at the edge of the box nothing improves any more"


def test_an_interrupted_descent_continues_where_it_was(tmp_path: Path) -> None:
    descent, start = Descent(steps=5, seed=2, estimator="mixed", repeats=1), {"eta_scale": 1.0, "bonus_scale": 0.1}
    options: dict[str, Any] = {"box": BOX, "progress": False}
    whole = optimise(Study(environment, 2, 8), start, descent, folder=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        optimise(Study(interrupted(environment, 4), 2, 8), start, descent, folder=tmp_path / "parts", **options)
    resumed = optimise(Study(environment, 2, 8), start, descent, folder=tmp_path / "parts", **options)
    assert resumed.history == whole.history and resumed.scales == whole.scales
    assert (tmp_path / "parts" / "metrics.csv").read_text() == (tmp_path / "whole" / "metrics.csv").read_text()
    with pytest.raises(tc.RunFolderError, match="study.horizon = 8, and this one has 9"):
        optimise(Study(environment, 2, 9), start, descent, folder=tmp_path / "parts", **options)


def test_random_search_returns_the_best_of_what_it_tried() -> None:
    study = Study(environment, 2, 10)
    best, tried = random_search(study, {"eta_scale": (0.1, 10.0)}, candidates=5, runs=4, seed=1, progress=False)
    assert len(tried) == 5 and all(0.1 <= scales["eta_scale"] <= 10 for scales, _ in tried)
    assert best == min(tried, key=lambda pair: pair[1])[0] and len({value for _, value in tried}) == 5


def test_bad_input_gets_a_sentence() -> None:
    study = Study(environment, 2, 3)
    with pytest.raises(tc.InvalidInput, match="did you mean 'eta_scale'"):
        study.play({"eta_scales": 1.0}, torch.arange(2), 0)
    with pytest.raises(tc.InvalidInput, match="did you mean 'expected'"):
        study.play({}, torch.arange(2), 0, feedback="expect")
    with pytest.raises(tc.InvalidInput, match="box has None for eta_scale"):
        optimise(study, {"eta_scale": 1.0}, box={}, progress=False)
    with pytest.raises(tc.InvalidInput, match="weight is -1"):
        Study(environment, 2, 3, weight=-1)
    with pytest.raises(tc.InvalidInput, match="horizon is 0"):
        Study(environment, 2, 0)
