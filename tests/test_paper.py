"""The paper's experiments: the rules that decide a claim, the pictures' geometry, and the command from end to end."""

from __future__ import annotations

import csv
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import torchcmdp as tc
from train.__main__ import main
from train.paper import claims, experiment, presets, simplex
from train.paper.claims import FAILS, HOLDS, UNDECIDED

T, L, RUNS = 1000, 4, 10
EPISODES = torch.arange(10, T + 1, 10)


def result(end: float, spread: float = 0.0, exponent: float = 0.5, **more: Any) -> Any:
    """A run whose curves are all c t^exponent and end at `end`, give or take `spread` over the runs."""
    ends = end + spread * torch.linspace(-1, 1, RUNS, dtype=torch.float64)
    curve = ends[:, None] * (EPISODES.double() / T) ** exponent
    names = ("regret", "alpha_regret", "violation", "positive_violation")
    return SimpleNamespace(episodes=EPISODES, bounds={"trivial": L * EPISODES.double()}, **{**dict.fromkeys(names, curve), **more})


def verdict(setting: str, claim: str, **results: Any) -> str:
    labels = {"wcops": "WC-OPS", "optcmdp": "OptCMDP", "opd": "OptPrimalDual", "greedy": "Greedy"}
    rows = claims._claims(setting, {labels[name]: value for name, value in results.items()})
    return next(decided for name, _, decided in rows if name.endswith(claim))


def test_lower_means_an_interval_below_zero() -> None:
    claim = "violation lower than OptCMDP's"
    assert verdict("stochastic", claim, wcops=result(100), optcmdp=result(200)) == HOLDS
    assert verdict("stochastic", claim, wcops=result(200), optcmdp=result(100)) == FAILS
    noisy = result(100)
    noisy.violation = noisy.violation + 200 * torch.linspace(-1, 1, RUNS, dtype=torch.float64)[:, None]
    assert verdict("stochastic", claim, wcops=noisy, optcmdp=result(110)) == UNDECIDED
    assert verdict("stochastic", claim, wcops=result(float("nan")), optcmdp=result(1)) == UNDECIDED


def test_comparable_allows_a_margin_above_and_similar_on_both_sides() -> None:
    margin = claims.MARGIN * L * T
    assert verdict("stochastic", "regret comparable to OptCMDP's", wcops=result(margin - 1), optcmdp=result(0)) == HOLDS
    assert verdict("stochastic", "regret comparable to OptCMDP's", wcops=result(margin + 1), optcmdp=result(0)) == FAILS
    assert verdict("stochastic", "regret comparable to OptCMDP's", wcops=result(-3 * margin), optcmdp=result(0)) == HOLDS
    assert verdict("adversarial", "violation similar to Greedy's", wcops=result(-3 * margin), greedy=result(0)) == FAILS
    assert verdict("adversarial", "violation similar to Greedy's", wcops=result(5), greedy=result(0)) == HOLDS


def test_growth_is_judged_by_its_exponent() -> None:
    claim = "regret grows like sqrt(t)"
    assert verdict("stochastic", claim, wcops=result(50, exponent=0.5)) == HOLDS
    assert verdict("stochastic", claim, wcops=result(50, exponent=1.0)) == FAILS
    assert verdict("stochastic", claim, wcops=result(-50, exponent=1.0)) == HOLDS
    uneven = result(50)
    uneven.regret = 50 * (EPISODES.double() / T) ** torch.linspace(0.2, 1.2, RUNS, dtype=torch.float64)[:, None]
    assert verdict("stochastic", claim, wcops=uneven) == UNDECIDED


def test_convergence_needs_less_at_the_end_than_at_the_beginning() -> None:
    claim = "the policies converge to the safe set"
    assert verdict("simplex", claim, wcops=result(50, exponent=0.4)) == HOLDS
    assert verdict("simplex", claim, wcops=result(50, exponent=1.3)) == FAILS
    assert verdict("simplex", claim, wcops=result(0)) == HOLDS


def test_overall_needs_all_of_them_and_counts_own_sequences_only() -> None:
    def finding(decided: str, sequence: str = experiment.OWN) -> claims.Finding:
        return claims.Finding("a claim", "somewhere", "theory", sequence, "", decided)

    assert claims.overall([finding(HOLDS), finding(HOLDS), finding(FAILS, experiment.REPLAY)]).startswith("holds (2 of 2")
    assert claims.overall([finding(HOLDS), finding(FAILS)]).startswith("does not hold (1 of 2 hold, 1 do not")
    assert claims.overall([finding(HOLDS), finding(UNDECIDED)]).startswith("cannot tell")
    assert claims.overall([]) == "not run"


@pytest.mark.parametrize("seed", range(5))
def test_safe_polygon_is_the_safe_set(seed: int) -> None:
    """Random points of the simplex lie in the convex hull of the corners exactly when they are safe."""
    rng = np.random.default_rng(seed)
    costs = rng.uniform(-1, 1, (2, 3))
    costs[:, 0] = -abs(costs[:, 0])  # the first corner is safe, so the set is not empty
    corners = simplex.safe_polygon(costs)
    assert (corners @ costs.T <= 1e-12).all() and np.allclose(corners.sum(1), 1)
    for point in rng.dirichlet(np.ones(3), 300):
        safe = bool((costs @ point <= 0).all())
        assert safe == inside(point @ simplex.CORNERS, corners @ simplex.CORNERS)


def inside(point: np.ndarray, polygon: np.ndarray) -> bool:
    """Even-odd rule."""
    odd = False
    for (ax, ay), (bx, by) in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
        if (ay > point[1]) != (by > point[1]) and point[0] < (bx - ax) * (point[1] - ay) / (by - ay) + ax:
            odd = not odd
    return odd


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_instance_binds_and_every_process_fits(name: str) -> None:
    preset = presets.PRESETS[name]
    cmdp = presets.instance(preset)
    optimum = tc.safe_optimum(cmdp)
    assert optimum.feasible and optimum.value < tc.unconstrained_optimum(cmdp).value - 1e-3
    env = tc.Simulator(cmdp, *presets.processes(preset, cmdp, 30), runs=2)
    env.rollout(tc.uniform_policy(cmdp.layout))
    if preset.costs == "switching":
        later = env.costs._blocks[1]
        assert tc.slater_gap(cmdp, later) >= -1e-9 and not torch.equal(later, cmdp.costs)


def test_families_scale_every_learner_that_has_widths() -> None:
    preset = presets.PRESETS["stochastic-1"]
    cmdp = presets.instance(preset)
    both = ("bonus_scale", "radius_scale")
    scaled = [(presets.WC_OPS, both), (presets.OPT_CMDP, both), (presets.PRIMAL_DUAL, both), (presets.PDB_PS, both[1:])]
    for player, scales in scaled:
        theory, practical = (presets.learner(player, preset, cmdp, family, 50, 2).config() for family in presets.FAMILIES)
        for scale in scales:
            assert (theory[scale], practical[scale]) == (1.0, 0.1)
    plain, tuned = (presets.learner(player, preset, cmdp, "practical", 50, 2) for player in (presets.WC_OPS, presets.TUNED))
    assert tuned.config() == tc.WCOPS.practical(cmdp.layout, 1, 50, presets.DELTA, 2).config() != plain.config()
    assert plain.config() == tc.WCOPS(cmdp.layout, 1, 50, presets.DELTA, 2, bonus_scale=0.1, radius_scale=0.1).config()
    assert presets.TUNED not in preset.players_of("theory") and presets.TUNED in preset.players_of("practical")


def test_command_plays_reports_and_reads_back(tmp_path, capsys) -> None:
    names = ["adversarial-1", "simplex-1"]
    arguments = ["paper", *names, "--episodes", "12", "--runs", "2", "--jobs", "1", "--logdir", str(tmp_path)]
    assert main(arguments) == 0
    printed, folder = capsys.readouterr(), tmp_path / "paper"
    report = (folder / "report-partial.md").read_text()
    assert "the policies converge to the safe set" in printed.out and "adversarial rewards and costs: alpha-regret" in report
    assert "about 0 s left" in printed.err
    for name in names:
        figures = {path.name for path in (folder / name).glob("*.png")}
        assert {"regret.png", "violation.png", "positive_violation.png"} <= figures
        assert ("simplex.png" in figures) == name.startswith("simplex")
        assert ("regret-replay.png" in figures) == name.startswith("adversarial")
        assert name in report
    rows = list(csv.DictReader(open(folder / "adversarial-1" / "summary.csv")))
    assert {(row["family"], row["sequence"]) for row in rows} == {
        (family, sequence) for family in presets.FAMILIES for sequence in (experiment.OWN, experiment.REPLAY)
    }
    # all learners of a replay meet the same sequence, and so the same rho and the same optimum
    replays = [row for row in rows if row["sequence"] == experiment.REPLAY and row["family"] == "theory"]
    assert len({row["rho"] for row in replays}) == 1 and len({row["best_value"] for row in replays}) == 1
    assert min(float(row["rho"]) for row in rows) >= presets.SAFE_BY - 1e-9
    assert list((folder / "simplex-1" / "theory" / "wc-ops").glob("events.*"))
    before = {path: path.read_bytes() for path in folder.rglob("*.csv")}
    assert main(arguments) == 0 and "about 0 s left" in capsys.readouterr().err
    assert (folder / "report-partial.md").read_text() == report
    assert {path: path.read_bytes() for path in folder.rglob("*.csv")} == before


def test_interrupted_experiments_say_so_and_go_on(tmp_path, capsys, monkeypatch) -> None:
    arguments = ["paper", "simplex-1", "--episodes", "30", "--runs", "2", "--jobs", "1", "--logdir", str(tmp_path)]
    whole = experiment.play(experiment.Job("simplex-1", "theory", 30, 2, tmp_path / "whole", False))
    rollout = experiment.WatchedSimulator.rollout

    def interrupted(self: Any, policy: torch.Tensor) -> Any:
        if self.episode == 17:
            monkeypatch.setattr(experiment.WatchedSimulator, "rollout", rollout)
            import signal

            signal.raise_signal(signal.SIGINT)
        return rollout(self, policy)

    monkeypatch.setattr(experiment.WatchedSimulator, "rollout", interrupted)
    assert main(arguments) == 130 and "the same command continues" in capsys.readouterr().err
    assert not (tmp_path / "paper" / "report-partial.md").exists()
    assert main(arguments) == 0
    again = experiment.play(experiment.Job("simplex-1", "theory", 30, 2, tmp_path / "paper" / "simplex-1", False))
    assert torch.equal(again.policies["WC-OPS"], whole.policies["WC-OPS"])
    assert torch.equal(again.results[experiment.OWN, "WC-OPS"].regret, whole.results[experiment.OWN, "WC-OPS"].regret)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["stochastic1"], "did you mean stochastic-1?"),
        (["--quick", "stochastic-1"], "names of experiments come first"),
        (["--runs", "1"], "--runs is 1; the report needs intervals"),
        (["--jobs", "0"], "--jobs is 0"),
        (["--episode", "5"], "did you mean --episodes?"),
        (["--name", "../up"], "one plain folder name"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments, sentence, capsys, tmp_path) -> None:
    assert main(["paper", *arguments, "--logdir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
