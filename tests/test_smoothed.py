"""Smoothed gradients: against differences of the smoothed objective, pairs with common random numbers, windows, any learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import interrupted
from torch import Tensor

import torchcmdp as tc
from torchcmdp.tuning import Descent, Smoothed, Study, Through, estimate_gradient, optimise
from torchcmdp.tuning.smoothed import Pairs, noise_of

CMDP = tc.random_cmdp((1, 2, 2, 1), 2, 1, seed=0)
POINT = {"eta_scale": 3.0, "gamma_scale": 1.0, "bonus_scale": 0.02, "radius_scale": 0.05}
NAMES, CENTRE = tuple(POINT), torch.tensor(list(POINT.values()), dtype=torch.float64).log()


def environment(instances: Tensor, seed: int) -> tc.Simulator:
    return tc.Simulator(CMDP, tc.Bernoulli(CMDP.rewards), tc.Bernoulli(CMDP.costs, low=-1), runs=len(instances), seed=seed)


@pytest.mark.parametrize(("horizon", "pairs"), [(50, 400), (500, 80), pytest.param(2000, 60, marks=pytest.mark.slow)])
def test_it_is_the_gradient_of_the_smoothed_objective(horizon: int, pairs: int) -> None:
    """Averaged over an interval it is the difference of the smoothed objective between its ends, exactly: within 99% intervals."""
    study, count, h = Study(environment, 1, horizon, weight=2.0), len(NAMES), 0.5
    along = torch.eye(count, dtype=torch.float64).repeat_interleave(pairs, dim=0)
    inside = 2 * torch.rand(count * pairs, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1
    samples = Smoothed(sigma=0.5).differentiate(study, NAMES, CENTRE + h * inside * along, 1).derivatives
    found = (samples * along).sum(-1).view(count, pairs)
    spread = CENTRE + 0.5 * noise_of(9, 0, count * pairs, count)
    ends = torch.cat([spread + h * along, spread - h * along]).exp()
    instances = torch.zeros(len(ends), dtype=torch.int64)
    played = study.play(dict(zip(NAMES, ends.unbind(1), strict=True)), instances, 2, distinct_runs=count * pairs)
    up, down = study.objective(played.parts).view(2, count, pairs).unbind(0)
    difference = (up - down) / (2 * h)
    error = ((found.var(1) + difference.var(1)) / pairs).sqrt()
    assert ((found.mean(1) - difference.mean(1)).abs() < 2.58 * error).all()
    assert (found.mean(1).abs() > 2.58 * error).any(), "something must be seen, or a gradient of zero would do"


def test_new_noise_in_every_window_has_the_same_mean() -> None:
    """PES: its objective has new noise in every window, which differences would have to play too; it must agree with ES."""
    study, points = Study(environment, 1, 50, weight=2.0), CENTRE.expand(1000, -1)
    whole = Smoothed(sigma=0.5).differentiate(study, NAMES, points, 3)
    found = Smoothed(sigma=0.5, window=10, redraw=True).differentiate(study, NAMES, points, 4)
    error = ((found.derivatives.var(0) + whole.derivatives.var(0)) / len(points)).sqrt()
    assert ((found.derivatives.mean(0) - whole.derivatives.mean(0)).abs() < 4 * error).all()
    assert not torch.equal(found.played.parts, Smoothed(sigma=0.5).differentiate(study, NAMES, points, 4).played.parts)


def test_a_pair_shares_its_random_numbers() -> None:
    """Without noise both runs of a pair are the same run, and pairs are not."""
    pairs = Pairs(Smoothed(sigma=1e-12), Study(environment, 1, 20), NAMES, 5, 0)
    pairs.advance(CENTRE)
    up, down = pairs.played().parts.view(2, 5, 2).unbind(0)
    assert torch.allclose(up, down, atol=1e-6) and len(up[:, 0].unique()) > 1


def test_compiled_and_torch_play_come_to_the_same_where_costs_change() -> None:
    def changing(instances: Tensor, seed: int) -> tc.Simulator:
        later = CMDP.costs / 2  # for which whoever is safe now stays so
        cmdp = tc.LayeredCMDP(CMDP.layout, CMDP.transitions, CMDP.rewards, (CMDP.costs + later) / 2)
        return tc.Simulator(cmdp, tc.Bernoulli(CMDP.rewards), tc.Switching([CMDP.costs, later], at=[6]), len(instances), seed)

    study, instances = Study(changing, 1, 12), torch.zeros(3, dtype=torch.int64)
    live = {name: torch.full((3,), value, dtype=torch.float64, requires_grad=True) for name, value in POINT.items()}
    assert torch.allclose(study.play(POINT, instances, 1).parts, study.play(live, instances, 1).parts, atol=1e-8)


@pytest.mark.parametrize(
    ("learner", "point", "options"),
    [
        (tc.OptCMDP, {"bonus_scale": 0.1, "radius_scale": 0.1}, {}),
        (tc.PDBPS, {"eta_scale": 30.0, "dual_step_scale": 1.0}, {}),
        (tc.WCOPS, {"margin": 1.0, "eta_scale": 10.0}, {"costs": tc.PriorCosts()}),
    ],
    ids=["OptCMDP", "PDB-PS", "prior costs"],
)
def test_any_learner_and_cost_model_has_a_gradient(learner: Any, point: dict[str, float], options: dict[str, Any]) -> None:
    found = estimate_gradient(Study(environment, 1, 20, learner=learner, options=options), point, repeats=12)
    assert (found.gradient != 0).all() and (found.standard_error > 0).all() and (found.half_width > found.standard_error).all()
    with pytest.raises(tc.InvalidInput, match="a scale is .eta_scale."):
        estimate_gradient(Study(environment, 1, 20, learner=tc.OptCMDP), {"eta_scale": 1.0})


def test_a_control_variate_is_kept_only_where_it_lowers_the_variance() -> None:
    study, how = Study(environment, 1, 6, weight=2.0), Through("sampled", memory=1.0, run_clip=None)
    plain, controlled = (
        Smoothed(control=control).samples(study, NAMES, CENTRE, 60, 1, None).derivatives.var(0) for control in (None, how)
    )
    assert (controlled <= plain).all() and (controlled < plain).any()


def test_an_interrupted_online_descent_continues_where_it_was(tmp_path: Path) -> None:
    start = {"eta_scale": 1.0, "bonus_scale": 0.1}
    how: dict[str, Any] = {"estimator": Smoothed(window=5), "repeats": 3, "patience": 0}
    rest: dict[str, Any] = {"box": dict.fromkeys(start, (1e-3, 10.0)), "progress": False}
    whole = optimise(Study(environment, 1, 10), start, Descent(steps=4, **how), folder=tmp_path / "whole", **rest)
    assert whole.run_episodes == 6 * 5 * (1 + 2 + 2 + 2)
    with pytest.raises(KeyboardInterrupt):
        optimise(Study(interrupted(environment, 3), 1, 10), start, Descent(steps=4, **how), folder=tmp_path / "parts", **rest)
    resumed = optimise(Study(environment, 1, 10), start, Descent(steps=4, **how), folder=tmp_path / "parts", **rest)
    assert resumed.history == whole.history and resumed.scales == whole.scales


def test_bad_settings_get_a_sentence() -> None:
    study = Study(environment, 1, 10)
    with pytest.raises(tc.InvalidInput, match="window is 3; it must divide the horizon"):
        estimate_gradient(study, POINT, estimator=Smoothed(window=3))
    with pytest.raises(tc.InvalidInput, match="sigma has no gamma_scale"):
        estimate_gradient(study, POINT, estimator=Smoothed(sigma={"eta_scale": 0.1}))
    with pytest.raises(tc.InvalidInput, match="did you mean 'smoothed'"):
        estimate_gradient(study, POINT, estimator="smooth")
    for redraw in (False, True):
        with pytest.raises(tc.InvalidInput, match="control is given with a window of 5 episodes; .* window must be None"):
            Smoothed(window=5, redraw=redraw, control=Through())
