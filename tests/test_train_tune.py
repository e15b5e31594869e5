"""`python -m train tune`: what it writes and prints, that it continues, and one sentence for every mistake."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import torchcmdp as tc
from torchcmdp.learners.practical import PRACTICAL_SCALES, STUDY_COMMAND
from torchcmdp.tuning import SCALES, Estimator, Smoothed, Through
from train.__main__ import main
from train.paper.presets import RIVALS_COMMAND, TUNED
from train.tune import compare, methods, rivals, sensitivity, variance
from train.tune.evaluate import PAPER, evaluate, stage
from train.tune.instances import MULTIPLIERS, make_instances, multipliers
from train.tune.study import BOX, START, Options

TINY = ["--horizon", "4", "--steps", "2", "--instances", "1", "--repeats", "1", "--held-out", "2", "--front-steps", "1"]


def test_the_study_writes_its_files_and_a_second_call_repeats_them(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("train.output.SILENCE", 0.0)
    arguments = ["tune", *TINY, "--front", "0.5", "--logdir", str(tmp_path)]
    assert main(arguments) == 0
    (out, progress), folder = capsys.readouterr(), tmp_path / "tune"
    for stage_name in ("tuning", "random search", "4 episodes", "40 episodes", "sensitivity"):  # without a terminal, too
        assert re.search(rf"^{stage_name}: \d+ of \d+, .* gone, .* left$", progress, flags=re.MULTILINE), stage_name
    assert {"report.md", "study.json", "sensitivity.png", "front.png", "descent"} <= {file.name for file in folder.iterdir()}
    assert {"checkpoint.pt", "metrics.csv", "config.json"} < {file.name for file in (folder / "descent").iterdir()}
    study = json.loads((folder / "study.json").read_text())
    assert "tune --instances 1 --horizon 4" in study["command"] and set(study["tuned"]) == set(START)
    assert study["run_episodes"] == 2 * 5 * 2 * 4 and set(study["front"]) == {"paper", "weight 3", "random search", "weight 0.5"}
    for words in ("paper", "tuned", "random search", "adversarial", "stochastic", "+-", "tuned - paper"):
        assert words in out
    assert (folder / "report.md").read_text().strip() in out
    kept = {file: file.stat().st_mtime_ns for file in (folder / "stages").iterdir()}
    assert main(arguments) == 0 and capsys.readouterr().out == out
    assert kept == {file: file.stat().st_mtime_ns for file in (folder / "stages").iterdir()}
    assert main([*arguments, "--weight", "4"]) == 2
    assert "study.weight = 3.0, and this one has 4.0" in capsys.readouterr().err


def test_horizons_and_threshold_print_their_tables(tmp_path: Path, capsys) -> None:
    small = ["--instances", "2", "--logdir", str(tmp_path)]
    assert main(["tune", "horizons", "--horizons", "3", "5", "--widths", "1", "2", "1", *small]) == 0
    out = capsys.readouterr().out
    assert out.count("practical") == 4 and out.count("paper") == 4
    assert main(["tune", "threshold", "--horizon", "5", "--layered-horizon", "4", *small]) == 0
    out = capsys.readouterr().out
    assert out.count("empirical threshold") == 6 and out.count("| plain mean ") == 2 and "0.00%" in out


def test_variance_and_sensitivity_write_table_figures_and_json(tmp_path: Path, capsys) -> None:
    small = ["--widths", "1", "2", "1", "--actions", "2", "--constraints", "1", "--instances", "1", "--logdir", str(tmp_path)]
    assert main(["tune", "variance", "--horizons", "10", "20", "--through", "10", "--samples", "4", *small, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["tables"]
    counted = [(row["estimator"], row["episodes"]) for row in found["rows"]]
    assert len(counted) == 9 and {name for name, episodes in counted if episodes == 20} == {"smoothed", "PES"}
    assert all(0 < row["from"] <= row["variance of a sample"] * 1.5 and row["to"] > 0 for row in found["rows"])
    rows = {row["estimator"]: row for row in found["rows"] if row["episodes"] == 10}
    assert {rows[f"smoothed, {kind} control"]["runs of a sample"] for kind in ("mixed", "pathwise")} == {7}
    for name in ("smoothed", "smoothed, pathwise control", "sampled", "PES"):  # what a row says is what its estimator gives
        assert rows[name]["variance of a sample"] == pytest.approx(variance_by_hand(name), rel=1e-2), name
    assert main(["tune", "sensitivity", "--horizon", "6", "--pairs", "2", *small]) == 0
    assert capsys.readouterr().out.count("| learning rate") == 5
    for folder, name in (("tune-variance", "variance"), ("tune-sensitivity", "sensitivity")):
        assert all((tmp_path / folder / f"{name}.{kind}").stat().st_size > 1000 for kind in ("png", "pdf"))


def variance_by_hand(name: str) -> float:
    """Of four samples of each of two instances, 10 episodes."""
    study = make_instances((1, 2, 1), 2, 1, [0], 10).study(10, 3.0, 0.01)
    pathwise = Through("sampled", memory=1.0, score=False, run_clip=None)
    how: Estimator = {
        "smoothed": Smoothed(0.3),
        "smoothed, pathwise control": Smoothed(0.3, control=pathwise),
        "sampled": Through("sampled", memory=1.0, run_clip=None),
        "PES": Smoothed(0.3, window=1, redraw=True),
    }[name]
    point = torch.tensor(list(START.values()), dtype=torch.float64).log()
    samples = how.samples(study, tuple(START), point, 4, 0, None).derivatives.numpy()
    return float(np.mean([sum(samples[j::2].var(0, ddof=1)) for j in (0, 1)]))


def test_sensitivities_are_the_smoothed_objective_and_its_slope_an_episode() -> None:
    """At the point itself, of both parts, by two runs of every pair that are played alone."""
    study, pairs, seed = make_instances((1, 2, 1), 2, 1, [0], 6).study(6, 3.0, 0.01), 3, 2
    found = sensitivity.sensitivity(study, {"eta_scale": 2.0, "bonus_scale": 0.05}, pairs, seed)["eta_scale"]
    n, middle = 2 * pairs, len(sensitivity.FACTORS) // 2
    whole = len(sensitivity.FACTORS) * n
    unit = np.random.default_rng((seed, 0)).standard_normal((whole, 1))
    parts = []
    for side in (1, -1):
        factors = np.repeat(sensitivity.FACTORS, n)
        scales = {"eta_scale": torch.from_numpy(2.0 * factors * np.exp(side * sensitivity.SIGMA * unit[:, 0])), "bonus_scale": 0.05}
        played = study.play(scales, torch.arange(whole) % 2, seed)
        parts.append(played.parts.numpy()[middle * n : (middle + 1) * n] / 6)
    value, slope = (parts[0] + parts[1]) / 2, (parts[0] - parts[1]) * unit[middle * n : (middle + 1) * n] / (2 * sensitivity.SIGMA)
    assert found["scale"][middle] == pytest.approx(2.0)
    for kind, numbers in (("value", value), ("slope", slope)):
        within = np.stack([numbers[j::2].var(0, ddof=1) for j in (0, 1)]).mean(0)
        assert found[kind][middle] == pytest.approx(numbers.mean(0)), kind
        assert found[f"{kind}_half"][middle] == pytest.approx(1.96 * np.sqrt(within / n)), kind


def test_the_variance_is_that_within_instances() -> None:
    samples = torch.randn(4000, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    samples = samples * torch.tensor([1.0, 2.0]) + torch.tensor([0.0, 50.0, 90.0])[:, None]
    value, low, high = variance.variance(samples)
    assert low < 5 < high and low < value < high and high - low < 1


def test_compare_gives_every_method_the_same_budget_and_continues(tmp_path: Path, capsys) -> None:
    size = ["--widths", "1", "2", "1", "--actions", "2", "--constraints", "1", "--instances", "1", "--horizon", "4"]
    arguments = ["tune", "compare", *size, "--budget", "640", "--repetitions", "2", "--held-out", "2", "--logdir", str(tmp_path)]
    assert main(arguments) == 0
    out, folder = capsys.readouterr().out, tmp_path / "tune-compare"
    assert {"report.md", "compare.csv", "compare.json", "compare.png", "compare.pdf"} <= {file.name for file in folder.iterdir()}
    assert all(f"| {method} " in out for method in methods.METHODS) and "Smoothed gradients beat random search at" in out
    kept = {file: file.stat().st_mtime_ns for file in (folder / "stages").iterdir()}
    assert len(kept) == 10 and main(arguments) == 0 and capsys.readouterr().out == out
    assert kept == {file: file.stat().st_mtime_ns for file in (folder / "stages").iterdir()}


@pytest.mark.parametrize(
    ("part", "name", "value", "words"),
    [
        ("compare", "methods.SMOOTHED_RATE", 0.3, "methods.smoothed.rate = 0.2, and this command has 0.3"),
        ("compare", "methods.MIXED", Through(memory=0.9), "methods.mixed.memory = 0.98, and this command has 0.9"),
        ("compare", "methods.SPREAD", 0.3, "methods.spread = 0.25, and this command has 0.3"),
        ("variance", "variance.WINDOWS", 5, "estimator.window = 1, and this command has 2"),
        ("variance", "variance.RESAMPLES", 400, "resamples = 500, and this command has 400"),
        ("sensitivity", "sensitivity.SIGMA", 0.2, "sigma = 0.3, and this command has 0.2"),
    ],
)
def test_a_folder_of_other_constants_is_played_again_with_a_sentence(
    part, name, value, words, tmp_path, capsys, monkeypatch
) -> None:
    """What is played is made up here: of interest is what the folder holds of the settings."""
    calls: list[str] = []
    monkeypatch.setattr(methods, "METHODS", {"random search": lambda given: calls.append("played") or [(0, given.start)]})
    monkeypatch.setattr(compare, "METHODS", methods.METHODS)
    monkeypatch.setattr(compare, "judge", lambda options, points: [[0.0]])
    monkeypatch.setattr(variance, "measure", lambda *case: calls.append("played") or {"variance": 1.0})
    monkeypatch.setattr(sensitivity, "sensitivity", lambda *rest: calls.append("played") or {})
    unseen = {variance: ("variance_figure", "report", "publish"), sensitivity: ("sensitivity_figure", "publish")}
    for module, name_of in ((module, name) for module, names in unseen.items() for name in names):
        monkeypatch.setattr(module, name_of, lambda *rest: "")
    size = ["--widths", "1", "2", "1", "--actions", "2", "--constraints", "1", "--instances", "1", "--logdir", str(tmp_path)]
    small = compare.Options(
        horizon=2, budget=320, repetitions=2, instances=1, held_out=2, widths=(1, 2, 1), actions=2, constraints=1
    )

    def play() -> tuple[int, str]:
        calls.clear()
        if part == "compare":
            compare.repetition(small, tmp_path, "random search", 0)
        else:
            assert main(["tune", part, *size, *(["--horizons", "10"] if part == "variance" else ["--horizon", "4"])]) == 0
        return len(calls), capsys.readouterr().err

    assert play()[0] > 0 and play()[0] == 0
    monkeypatch.setattr(f"train.tune.{name}", value)
    again, said = play()
    assert again > 0 and words in said and "; it is played again." in said


def test_every_method_stays_in_the_box_and_in_its_budget() -> None:
    study = make_instances((1, 2, 1), 2, 1, [0], 4).study(4, 3.0, 0.01)
    given = methods.Search(study, BOX, methods.start_of(BOX, 1), 640, 1)
    for name, search in methods.METHODS.items():
        trail = search(given)
        spent = [x for x, _ in trail]
        assert spent == sorted(set(spent)) and 0.9 * 640 <= spent[-1] <= 640, name
        inside = [low * (1 - 1e-9) <= point[key] <= high * (1 + 1e-9) for _, point in trail for key, (low, high) in BOX.items()]
        assert all(inside), name
    assert methods.METHODS["random search"](given)[:8] == methods.METHODS["smoothed gradient"](given)[:8]


def test_the_goal_is_met_only_if_both_intervals_exclude_zero_at_every_large_budget() -> None:
    noise = 0.01 * torch.randn(5, 10, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = {"smoothed gradient": noise - 1, "random search": torch.zeros_like(noise)}
    assert compare.finding(compare.Options(), values)[0]
    values["smoothed gradient"][:, 0] += 2  # a tenth: too small a budget to count
    assert compare.finding(compare.Options(), values)[0]
    values["smoothed gradient"][:, 4, :4] += 3  # worse on half of the instances, in all repetitions alike
    met, words = compare.finding(compare.Options(), values)
    assert not met and "at 7 of the 8 budgets" in words


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune", "compare", "--logdir", str(tmp_path)]) == 2
    assert "optuna is not installed; the comparison needs it: pip install 'torchcmdp[tune]'." in capsys.readouterr().err


def test_the_practical_constants_name_the_study_that_found_them() -> None:
    assert set(PRACTICAL_SCALES) == set(START) and STUDY_COMMAND.startswith("python -m train tune")
    assert all(BOX[name][0] <= value <= BOX[name][1] for name, value in PRACTICAL_SCALES.items())
    study = json.loads((Path(__file__).parents[1] / "docs" / "study.json").read_text())
    assert study["command"] == STUDY_COMMAND
    assert {name: float(f"{study['tuned'][name]:.2g}") for name in PRACTICAL_SCALES} == PRACTICAL_SCALES


def test_instances_change_as_they_say() -> None:
    instances = make_instances((1, 2, 2, 1), 2, 1, [0, 1], 9)
    assert instances.kinds == ("stochastic", "adversarial") * 2 and instances.change == 3
    env = instances.environment(torch.arange(4), 0)
    seen = []
    for _ in range(9):
        env.rollout(tc.uniform_policy(env.cmdp.layout))
        seen.append(env.cost_values)
    seen = torch.stack(seen)
    assert torch.allclose(seen.mean(0), instances.cmdp.costs)  # what the comparator is safe for is the mean over the horizon
    assert (seen[:, 0] == seen[0, 0]).all() and (seen[3:, 1] == seen[3, 1]).all() and (seen[2, 1] != seen[3, 1]).any()
    for j in (1, 3):
        costs = torch.cat([instances.before[j], instances.after[j]])
        both = tc.LayeredCMDP(env.cmdp.layout, env.cmdp.transitions[j], env.cmdp.rewards[j], costs)
        assert float(tc.slater_gap(both)) >= 0


@pytest.mark.parametrize(("widths", "constraints"), [((1, 3, 3, 1), 2), ((1, 4, 4, 4, 1), 2), ((1, 1), 1), ((1, 3, 3, 1), 1)])
def test_safety_has_a_price_in_every_instance_and_the_weight_is_above_it(widths, constraints) -> None:
    """By a difference of optima: costs lower by e in all pairs of a constraint are worth about e L times its multiplier."""
    instances = make_instances(widths, 3, constraints, range(4), 1000)
    low, high = MULTIPLIERS
    assert (multipliers(instances.cmdp) >= low - 0.02).all() and (multipliers(instances.cmdp) <= high + 0.02).all()
    assert Options().weight > high + 0.02
    cmdp, small = instances.cmdp, 1e-6
    gains = []
    for i in range(constraints):
        costs = cmdp.costs.clone()
        costs[:, i] -= small * cmdp.layout.pair_mask()
        optima = tc.safe_optimum(cmdp, costs=costs).value - tc.safe_optimum(cmdp).value
        gains.append(optima / (small * cmdp.layout.layers))
    assert torch.allclose(torch.stack(gains).amax(0), multipliers(instances.cmdp), rtol=1e-2)


def test_evaluation_is_that_of_a_run_with_the_same_constants() -> None:
    """One method, one instance: the numbers are those of the tracker."""
    instances = make_instances((1, 2, 2, 1), 2, 2, [3], 12, ("stochastic",))
    found = evaluate(instances, {"paper": PAPER}, horizon=12, weight=2.0, delta=0.01, seed=5)["paper"]
    env = instances.environment(torch.arange(1), 5)
    result = tc.run(tc.WCOPS(env.cmdp.layout, 2, 12), env, 12, progress=False)
    assert found["regret"] == pytest.approx(result.regret[:, -1].tolist())
    assert found["violation"] == pytest.approx(result.violation[:, -1].tolist())
    assert found["positive violation"] == pytest.approx(result.positive_violation[:, -1].tolist())
    total = result.regret[:, -1] + 2 * result.positive_violation_by_constraint[:, -1].sum(-1)
    assert found["objective"] == pytest.approx((total / 12).tolist())
    assert set(PAPER) == set(SCALES)


def test_the_rivals_are_searched_over_a_grid_that_their_constants_come_from(tmp_path: Path, capsys, monkeypatch) -> None:
    for key, grid in rivals.GRIDS.items():
        constants = {**({"radii": "matched"} if "radii" in grid else {"confidence": "entrywise"}), **TUNED[key]}
        assert set(constants) == set(grid) and all(value in grid[name] for name, value in constants.items())
    assert RIVALS_COMMAND == "python -m train tune rivals"
    small = {"opt-cmdp": {"radii": ("matched", "literal"), "scale": (0.1, 1.0)}}
    monkeypatch.setattr(rivals, "GRIDS", small)
    arguments = ["--horizon", "6", "--instances", "1", "--runs", "2", "--repetitions", "3", "--logdir", str(tmp_path)]
    assert main(["tune", "rivals", *arguments]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "tune-rivals" / "stages" / "opt-cmdp.json").read_text())["result"]
    best = rivals.ranked(found)[0]
    assert len(found) == 4 and all(len(point["objectives"]) == 3 for point in found)
    rows = [line for line in out.splitlines() if line.startswith("| OptCMDP")]
    assert len(rows) == 3 and f"radii {best['radii']}, scale {best['scale']}" in rows[0]
    assert main(["tune", "rivals", "--weight", "0.1", *arguments]) == 2 and "largest multiplier" in capsys.readouterr().err


def test_the_point_with_the_least_mean_rank_is_taken_and_ties_go_to_the_lower_objective() -> None:
    """One repetition that goes wildly wrong, or right, counts as one."""
    points = {"steady": [2.0, 2.0, 2.0], "lucky": [-99.0, 9.0, 9.0], "late": [3.0, 1.0, 3.0], "tie": [9.0, 3.0, 1.0]}
    found = rivals.ranked([{"name": name, "objectives": values} for name, values in points.items()])
    ranks = {"steady": (2 + 2 + 2) / 3, "lucky": (1 + 4 + 4) / 3, "late": (3 + 1 + 3) / 3, "tie": (4 + 3 + 1) / 3}
    assert [point["name"] for point in found] == ["steady", "late", "tie", "lucky"]
    assert {point["name"]: point["rank"] for point in found} == pytest.approx(ranks)
    assert {point["name"]: point["first"] for point in found} == {"steady": 0, "lucky": 1, "late": 1, "tie": 1}
    twins = rivals.ranked([{"name": "dear", "objectives": [1.0, 5.0]}, {"name": "cheap", "objectives": [2.0, 3.0]}])
    assert [point["name"] for point in twins] == ["cheap", "dear"]


def test_a_stage_is_played_again_only_for_other_settings(tmp_path: Path) -> None:
    calls = []
    for setting in (1, 1, 2):
        assert stage(tmp_path, "name", {"setting": setting}, lambda s=setting: calls.append(s) or s) == setting
    assert calls == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["horizon"], "'horizon' is not a part of python -m train tune; did you mean horizons?"),
        (["--horizn", "5"], "did you mean --horizon?"),
        (["--steps", "0"], "--steps is 0; it must be greater than zero."),
        (["--held-out", "1"], "needs at least 2"),
        (["--weight", "0.6"], "--weight is 0.6; it must be greater than"),
        (["horizons", "--weight", "0.1"], "the largest multiplier of the instances"),
        (["--seed", "999"], "training seeds must stay below 1000"),
        (["horizons", "--instances", "1"], "needs at least 2"),
        (["variance", "--horizons", "15"], "--horizons has 15; PES needs a multiple of 10"),
        (["variance", "--samples", "3"], "needs at least 4"),
        (["variance", "--through", "5"], "--through is 5; it must reach the shortest of --horizons, 10."),
        (["sensitivity", "--pairs", "1"], "needs at least 2"),
        (["compare", "--budget", "1000"], "a tenth of it must pay for one step of every method"),
    ],
)
def test_a_mistake_gets_one_sentence_and_code_2(arguments, words, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("train.tune.study.Work.run", "train.tune.horizons.evaluate"):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("the study was started"))
    assert main(["tune", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == "" and list(tmp_path.iterdir()) == []


def test_half_a_run_is_not_kept(tmp_path: Path, monkeypatch) -> None:
    """A run that Ctrl-C ended in good order returns a result, which must not become a stage."""
    whole = tc.run

    def interrupted(*arguments, **options):
        return dataclasses.replace(whole(*arguments, **options), completed=False)

    monkeypatch.setattr("train.tune.threshold.tc.run", interrupted)
    small = ["--horizon", "2", "--layered-horizon", "2", "--instances", "2"]
    assert main(["tune", "threshold", *small, "--logdir", str(tmp_path)]) == 130
    assert not list(tmp_path.glob("*/stages/*"))
