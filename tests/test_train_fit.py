"""`python -m train tune fit`: the map's features, its gradient, its file, and that judging is what it says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torchcmdp as tc
from torchcmdp.learners.fitted import FEATURES, FILE, Follow, features
from torchcmdp.learners.practical import RECIPE
from torchcmdp.tuning import Smoothed
from train.__main__ import main
from train.tune import fit, fit_design
from train.tune.fit_design import Cell

CELLS = (Cell((1, 2, 1), 2, 1, 6), Cell((1, 2, 2, 1), 2, 1, 8, 0.1, 0.5))
SEEN = torch.stack([cell.features for cell in CELLS])


def test_features_are_logarithms_of_what_is_known_before_a_run() -> None:
    found = features(tc.Layout((1, 2, 3, 1), 4), 2, 500, 0.05, -0.5)
    assert found.exp().tolist() == pytest.approx([3, 7, 4, 2, 3, 500, math.log(20), 1.5]) and len(FEATURES) == 8
    assert features(tc.Layout((1, 2, 1), 2), 0, 10, 0.1).isfinite().all()  # nothing is asked, and a map has a value all the same


def test_a_map_is_linear_in_the_logarithms_within_its_reach() -> None:
    begun = Follow.at({"eta_scale": 20.0, "margin": 1.0}, SEEN, reach=2.0)
    assert begun.scales(SEEN[0]) == pytest.approx({"eta_scale": 20.0, "margin": 1.0})
    slopes = torch.zeros_like(begun.slopes)
    slopes[0, FEATURES.index("episodes")], slopes[1, FEATURES.index("actions")] = 0.7, 9.0
    moved = replace(begun, slopes=slopes, offset=torch.tensor([0.1, 5.0], dtype=torch.float64))
    far = features(tc.Layout((1, 2, 1), 7), 1, 600, 0.01)
    away = (math.log(600) - math.log(48) / 2) / (math.log(8 / 6) / math.sqrt(2))
    assert math.log(moved.scales(far)["eta_scale"] / 20) == pytest.approx(min(0.1 + 0.7 * away, 2.0))
    nearer = features(tc.Layout((1, 2, 1), 7), 1, 7, 0.01)
    away = (math.log(7) - math.log(48) / 2) / (math.log(8 / 6) / math.sqrt(2))
    assert math.log(moved.scales(nearer)["eta_scale"] / 20) == pytest.approx(0.1 + 0.7 * away) and abs(away) < 1
    assert moved.scales(far)["margin"] == pytest.approx(
        math.exp(2.0)
    )  # actions did not vary where it was trained: no slope in them


def test_the_gradient_of_the_map_is_that_of_the_scales_times_the_features() -> None:
    studies = [cell.study(range(3, 5), fit_design.WEIGHT) for cell in CELLS]
    follow = Follow.at(fit_design.START, SEEN, 2.3)
    offset, slopes = fit.gradient(follow, SEEN, studies, 11)
    found = [
        Smoothed(fit_design.SIGMA).samples(study, follow.names, follow.start, 1, 11 + j, None).derivatives.mean(0)
        for j, study in enumerate(studies)
    ]
    assert torch.allclose(offset, (found[0] + found[1]) / 2) and (offset != 0).any()
    away = torch.where(follow.spread > 0, (SEEN - follow.centre) / follow.spread, 0)
    assert torch.allclose(slopes, (found[0][:, None] * away[0] + found[1][:, None] * away[1]) / 2)


def test_training_goes_downhill_and_only_a_map_has_slopes(monkeypatch) -> None:
    """On a made-up objective with its minimum at ln scale = 1 + what the first feature says."""
    slope = torch.tensor([1.0, -1.0], dtype=torch.float64)  # of the first feature in spreads, over sqrt 2

    def pull(follow: Follow, seen, studies, seed):
        live = replace(follow, offset=follow.offset.clone().requires_grad_(), slopes=follow.slopes.clone().requires_grad_())
        wanted = follow.start + 1 + slope[:, None] / 4
        loss = (live(seen) - wanted).square().sum(-1).mean() / 2
        return torch.autograd.grad(loss, (live.offset, live.slopes))

    monkeypatch.setattr(fit, "gradient", pull)
    monkeypatch.setattr(Cell, "study", lambda *arguments: None)
    fixed, fitted = (fit.train(fit.Options(updates=200), CELLS, name) for name in (fit.FIXED, fit.FITTED))
    assert torch.allclose(fixed.offset, torch.ones(4, dtype=torch.float64), atol=1e-3) and not fixed.slopes.any()
    apart = (fitted(SEEN) - fitted.start - 1)[:, 0]
    assert torch.allclose(apart, slope / 4, atol=0.02)


def test_it_writes_its_map_and_continues(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(fit_design, "TRAIN_COUNT", 2)
    monkeypatch.setattr(fit_design, "BLOCK", 1)
    monkeypatch.setattr(fit_design, "TRAINING", CELLS)
    monkeypatch.setattr(fit_design, "HELD_OUT_CELLS", CELLS[::-1])
    arguments = ["tune", "fit", "--updates", "2", "--held-out", "2", "--logdir", str(tmp_path)]
    assert main(arguments) == 0
    out, folder = capsys.readouterr().out, tmp_path / "tune-fit"
    assert "outside the range they were trained on" in out and "fitted - one trained set" in out
    file = folder / "fitted.json"
    kept = Follow.of(json.loads(file.read_text()))
    assert file.stat().st_size < 8000 and kept.names == tuple(fit_design.START) and kept.slopes.any()
    stages = {file: file.stat().st_mtime_ns for file in (folder / "stages").iterdir()}
    assert len(stages) == 2 + 2 + 2 and main(arguments) == 0 and capsys.readouterr().out == out
    assert stages == {file: file.stat().st_mtime_ns for file in (folder / "stages").iterdir()}
    monkeypatch.setattr(fit_design, "RATE", 0.1)
    assert main(arguments) == 0 and "RATE = 0.4, and this command has 0.1; it is played again." in capsys.readouterr().err
    with pytest.raises(tc.InvalidInput, match="this version knows layers, states"):
        Follow.of({**kept.plain(), "features": ["layers"]})
    assert main([*arguments[:-3], "1", *arguments[-2:]]) == 2 and "needs at least 2" in capsys.readouterr().err


def test_judging_is_practical_wcops_with_the_scales_on_the_same_random_numbers() -> None:
    cell, points = CELLS[1], {"today's": dict(fit_design.START), "other": {**fit_design.START, "eta_scale": 3.0, "margin": 2.0}}
    found = fit.judge(fit.Options(held_out=2), cell, 40, points)
    instances = cell.instances(range(40, 42))
    for name, point in points.items():
        env = instances.environment(torch.arange(4), 77_000)
        costs = tc.PriorCosts(margin=point["margin"], drift=tc.costs.Drift())
        rest = {key: value for key, value in point.items() if key != "margin"}
        learner = tc.WCOPS.practical(env.cmdp.layout, 1, 8, 0.1, runs=4, costs=costs, cost_low=-0.5, **rest)
        result = tc.run(learner, env, 8, progress=False)
        regret, violation = result.regret[:, -1] / 8, result.positive_violation_by_constraint[:, -1].sum(-1) / 8
        assert found[name]["regret"] == pytest.approx(regret.view(2, 2).mean(1).tolist(), abs=1e-9)
        assert found[name]["positive violation"] == pytest.approx((2 * violation).view(2, 2).mean(1).tolist(), abs=1e-9)
        assert found[name]["objective"] == pytest.approx((regret + 6 * violation).view(2, 2).mean(1).tolist(), abs=1e-9)
    assert float(instances.cmdp.costs.abs().max()) <= 0.5 and instances.low == -0.5


def test_it_wins_only_beyond_both_intervals() -> None:
    def judged(fitted: float, spread: float) -> list[fit.Judged]:
        draw = torch.randn(20, generator=torch.Generator().manual_seed(0))
        noise = (spread * (draw - draw.mean())).tolist()
        methods = {fit.TODAY: [0.0] * 20, fit.FIXED: [-0.5] * 20, fit.FITTED: [fitted + x for x in noise]}
        return [{name: {measure: values for measure in fit.MEASURES} for name, values in methods.items()}]

    assert fit.wins(judged(-0.7, 0.1)) and "win outside" in fit.finding(judged(-0.7, 0.1))
    assert not fit.wins(judged(-0.3, 0.1))  # better than today's, worse than the trained set
    assert not fit.wins(judged(-0.52, 0.3)) and "do not win" in fit.finding(judged(-0.52, 0.3))


def test_held_out_cells_lie_outside_the_range_of_training_in_size_and_in_horizon() -> None:
    ends = torch.stack([cell.features for cell in fit_design.TRAINING])
    low, high = ends.amin(0), ends.amax(0)
    sizes, episodes = [FEATURES.index(name) for name in ("layers", "states", "actions", "constraints")], FEATURES.index("episodes")
    for cell in fit_design.HELD_OUT_CELLS:
        outside = (cell.features < low - 1e-9) | (cell.features > high + 1e-9)
        assert outside[sizes].any() and outside[episodes], cell
    seeds = [fit_design.TRAIN_SEEDS, fit_design.JUDGE_SEEDS, fit_design.INSIDE_SEEDS]
    cells = max(len(fit_design.TRAINING), len(fit_design.HELD_OUT_CELLS))
    assert all(b - a >= 100 * cells for a, b in zip(seeds, seeds[1:], strict=False)) and fit_design.TRAIN_COUNT <= 100


def test_fitted_scales_are_those_of_the_data_file_for_the_problem() -> None:
    """By hand from the file; what is given otherwise stays."""
    kept, layout = json.loads(FILE.read_text()), tc.Layout((1, 5, 5, 1), 4)
    away = (features(layout, 3, 200, 0.05, -0.5) - torch.tensor(kept["centre"])) / torch.tensor(kept["spread"])
    moved = torch.tensor(kept["offset"]) + torch.tensor(kept["slopes"], dtype=torch.float64) @ away
    scales = dict(zip(kept["names"], (torch.tensor(kept["start"]) + moved.clamp(-2.3, 2.3)).exp().tolist(), strict=True))
    made = tc.WCOPS.practical(layout, 3, 200, 0.05, 2, cost_low=-0.5, scales="fitted")
    plain = tc.WCOPS.practical(layout, 3, 200, 0.05, 2, cost_low=-0.5)
    for name in ("eta", "gamma"):
        times = RECIPE[f"{name}_scale"] / scales[f"{name}_scale"]
        assert torch.allclose(getattr(made, name) * times, getattr(plain, name), rtol=1e-6), name
    assert made.radius_scale.tolist() == pytest.approx([scales["radius_scale"]] * 2)
    assert made.costs.margin.tolist() == pytest.approx([scales["margin"]] * 2) and made.costs.drift == plain.costs.drift
    assert made.loss == plain.loss and torch.equal(made.share, plain.share)
    assert tc.WCOPS.practical(layout, 3, horizon=200, scales="fitted", eta_scale=1.0).eta[0] < plain.eta[0]
    assert FILE.stat().st_size < 8000 and set(kept["names"]) == set(fit_design.START)


def test_an_unknown_value_for_scales_and_a_horizon_never_judged_are_refused() -> None:
    layout = tc.Layout((1, 2, 1), 2)
    with pytest.raises(tc.InvalidInput, match="scales is 'fited'; did you mean 'fitted'"):
        tc.WCOPS.practical(layout, 1, 100, scales="fited")
    for horizon in (29, 1001):
        with pytest.raises(tc.InvalidInput, match=f"horizon is {horizon} with scales=.fitted., .* from 30 to 1,000 episodes"):
            tc.WCOPS.practical(layout, 1, horizon, scales="fitted")
    judged = [cell.horizon for cell in fit_design.HELD_OUT_CELLS]
    assert [tc.WCOPS.practical(layout, 1, T, scales="fitted").horizon for T in (min(judged), max(judged))] == [30, 1000]
