"""The paper's experiments: the rules that decide a claim, the pictures' geometry, and the command from end to end."""

from __future__ import annotations

import csv
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import torchcmdp as tc
from train import paper
from train.__main__ import main
from train.paper import claims, experiment, presets, regimes, report, simplex
from train.paper.claims import FAILS, HOLDS, UNDECIDED

T, L, INSTANCES, RUNS = 1000, 4, 10, 2
EPISODES = torch.arange(10, T + 1, 10)


def curve(end: float, spread: float = 0.0, exponent: float = 0.5) -> torch.Tensor:
    """c t^exponent, ending at `end`, give or take `spread` over the instances."""
    ends = end + spread * torch.linspace(-1, 1, INSTANCES, dtype=torch.float64)
    return (ends[:, None] * (EPISODES.double() / T) ** exponent).repeat_interleave(RUNS, 0)


def result(end: float, spread: float = 0.0, exponent: float = 0.5, **more: Any) -> Any:
    """A run whose curves are all c t^exponent and end at `end`, give or take `spread` over the instances."""
    names = ("regret", "alpha_regret", "violation", "positive_violation")
    curves = {**dict.fromkeys(names, curve(end, spread, exponent)), **more}
    return SimpleNamespace(episodes=EPISODES, bounds={"trivial": L * EPISODES.double()}, **curves)


def verdicts(setting: str, **results: Any) -> dict[str, str]:
    labels = {"wcops": "WC-OPS", "optcmdp": "OptCMDP, matched radii", "opd": "OptPrimalDual", "greedy": "Greedy"}
    rows = claims._claims(setting, {labels[name]: value for name, value in results.items()}, INSTANCES)
    return {name: decided for name, _, decided in rows}


def verdict(setting: str, claim: str, **results: Any) -> str:
    return next(decided for name, decided in verdicts(setting, **results).items() if name.endswith(claim))


MARGIN = claims.MARGIN * L * T


def test_lower_means_an_interval_below_the_margin() -> None:
    claim = "violation lower than OptCMDP's, matched radii"
    assert verdict("stochastic", claim, wcops=result(0), optcmdp=result(MARGIN + 1)) == HOLDS
    assert verdict("stochastic", claim, wcops=result(0), optcmdp=result(MARGIN - 1)) == FAILS
    assert verdict("stochastic", claim, wcops=result(200), optcmdp=result(100)) == FAILS
    noisy = result(0, violation=curve(0, 200))
    assert verdict("stochastic", claim, wcops=noisy, optcmdp=result(MARGIN)) == UNDECIDED
    assert verdict("stochastic", claim, wcops=result(float("nan")), optcmdp=result(1)) == UNDECIDED


def test_comparable_allows_the_same_margin_above_and_similar_on_both_sides() -> None:
    claim, safe = "regret comparable to OptCMDP's, matched radii", {"positive_violation": curve(0)}
    assert verdict("stochastic", claim, wcops=result(MARGIN - 1, **safe), optcmdp=result(0)) == HOLDS
    assert verdict("stochastic", claim, wcops=result(MARGIN + 1, **safe), optcmdp=result(0)) == FAILS
    assert verdict("stochastic", claim, wcops=result(-3 * MARGIN, **safe), optcmdp=result(0)) == HOLDS
    assert verdict("adversarial", "violation similar to Greedy's", wcops=result(-3 * MARGIN), greedy=result(0)) == FAILS
    assert verdict("adversarial", "violation similar to Greedy's", wcops=result(5), greedy=result(0)) == HOLDS


@pytest.mark.parametrize("word", ["regret comparable to OptCMDP's, matched radii", "regret lower than OptPrimalDual's"])
def test_regret_counts_only_where_the_violation_is_not_worse(word: str) -> None:
    rivals = {name: result(100, positive_violation=curve(50)) for name in ("optcmdp", "opd")}
    low = curve(-100)
    assert verdict("stochastic", word, wcops=result(0, regret=low, positive_violation=curve(50)), **rivals) == HOLDS
    assert verdict("stochastic", word, wcops=result(0, regret=low, positive_violation=curve(60, 100)), **rivals) == HOLDS
    assert verdict("stochastic", word, wcops=result(0, regret=low, positive_violation=curve(60, 1)), **rivals) == FAILS
    unknown = result(0, regret=low, positive_violation=curve(float("nan")))
    assert verdict("stochastic", word, wcops=unknown, **rivals) == UNDECIDED


@pytest.mark.parametrize("setting", ["stochastic", "adversarial-reward", "adversarial"])
def test_who_ignores_the_constraints_holds_nothing(setting: str) -> None:
    """Regret -0.3 t and violation t, against rivals of no regret and no violation."""
    unsafe = {name: curve(T, exponent=1.0) for name in ("violation", "positive_violation")}
    learner = result(-0.3 * T, exponent=1.0, **unsafe)
    found = verdicts(setting, wcops=learner, optcmdp=result(0), opd=result(0), greedy=result(0))
    assert len(found) >= 4 and set(found.values()) == {FAILS}


def test_growth_is_judged_by_its_exponent_and_never_without_the_violation() -> None:
    claim, safe = "regret grows like sqrt(t)", {"positive_violation": curve(50)}
    assert verdict("stochastic", claim, wcops=result(50, exponent=0.5, **safe)) == HOLDS
    assert verdict("stochastic", claim, wcops=result(50, exponent=1.0, **safe)) == FAILS
    assert verdict("stochastic", claim, wcops=result(-50, exponent=1.0, **safe)) == HOLDS
    assert verdict("stochastic", claim, wcops=result(50, positive_violation=curve(50, exponent=1.0))) == FAILS
    exponents = torch.linspace(0.2, 1.2, INSTANCES, dtype=torch.float64).repeat_interleave(RUNS)
    uneven = 50 * (EPISODES.double() / T) ** exponents[:, None]
    assert verdict("stochastic", claim, wcops=result(50, regret=uneven)) == UNDECIDED
    assert verdict("stochastic", claim, wcops=result(50, positive_violation=uneven)) == UNDECIDED


def test_intervals_are_over_instances_and_beside_them_over_runs() -> None:
    """Ten instances that differ, whose two runs do not: their interval is that of ten numbers; and the other way round."""
    instances = torch.linspace(0, 9, INSTANCES, dtype=torch.float64)
    same = instances.repeat_interleave(RUNS)
    assert claims.interval(same, INSTANCES) == f"4.5 +- {float(tc.mean_and_interval(instances)[1]):.1f} (0.0)"
    runs = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert claims.interval(runs.repeat(INSTANCES), INSTANCES) == f"2.0 +- 0.0 ({float(tc.mean_and_interval(runs)[1]):.1f})"


def test_a_rival_is_met_with_every_mode_of_its_radii() -> None:
    labels = [player.name for player in presets.PRESETS["stochastic-1"].players_of("small")]
    found = [name for name, *_ in claims._claims("stochastic", {label: result(1) for label in labels}, INSTANCES)]
    for mode in ("matched", "published", "literal"):
        assert {f"regret comparable to OptCMDP's, {mode} radii", f"violation lower than OptCMDP's, {mode} radii"} <= set(found)


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
    cmdp, seeds = presets.instances(preset, 3)
    optimum = tc.safe_optimum(cmdp)
    assert optimum.feasible.all() and (optimum.value < tc.unconstrained_optimum(cmdp).value - 9e-4).all()
    assert len(set(seeds)) == 3 and torch.equal(cmdp[0].rewards, presets.instance(preset, seeds[0]).rewards)
    env = tc.Simulator(presets.spread(cmdp, 2), *presets.processes(preset, cmdp, seeds, 30, 2), runs=6)
    env.rollout(tc.uniform_policy(cmdp.layout))
    assert torch.equal(env.cmdp.costs[4], env.cmdp.costs[5]) and torch.equal(env.cmdp.costs[4], cmdp.costs[2])
    if preset.costs == "switching":
        later = env.costs._blocks[1]
        assert (tc.slater_gap(env.cmdp, later) >= -1e-9).all() and not torch.equal(later, env.cmdp.costs)


def test_the_design_has_twenty_instances_and_no_two_experiments_share_one() -> None:
    assert paper.INSTANCES >= 20
    seeds = [seed for p in presets.PRESETS.values() if p.setting != "waking" for seed in presets.instances(p, 20)[1]]
    assert len(set(seeds)) == len(seeds)
    cmdp, _ = presets.instances(presets.PRESETS["stochastic-1"], 20)  # one draw is passed over, in which safety costs nothing
    assert (tc.unconstrained_optimum(cmdp).value - tc.safe_optimum(cmdp).value).min() >= presets.BINDING


def test_families_scale_every_learner_that_has_radii() -> None:
    preset = presets.PRESETS["stochastic-1"]
    cmdp = presets.spread(presets.instances(preset, 2)[0], 1)
    both = {"bonus_scale": 1.0, "radius_scale": 1.0}
    layers, width = cmdp.layout.layers, cmdp.layout.width
    # OptPrimalDual's bonus is L times the sum over the successors, and its radii are divided by as much
    scaled = [(presets.WC_OPS, both), *((player, both) for player in presets.OPT_CMDP[:3])]
    scaled += [
        (presets.PRIMAL_DUAL, {"bonus_scale": 1.0, "radius_scale": 1 / (layers * width)}),
        (presets.PDB_PS, {"radius_scale": 1.0}),
    ]
    for player, scales in scaled:
        for family, scale in presets.SCALES.items():
            config = presets.learner(player, cmdp, family, 50).config()
            assert {name: config[name] for name in scales} == pytest.approx({name: scale * x for name, x in scales.items()})
    assert 0.01 <= presets.SCALES["small"] <= 0.03
    found, own = presets.TUNED["wc-ops"], {"bonus_scale": 0.03, "radius_scale": 0.03, "eta_scale": 3.0}
    assert (found["scale"], found["steps"]) == (0.03, 3.0)
    tuned = presets.learner(presets.WC_OPS, cmdp, "tuned", 50)
    assert tuned.config() == tc.WCOPS.scaled(cmdp.layout, 1, 50, presets.DELTA, 2, **own).config()
    modes = [presets.learner(player, cmdp, "small", 50).config()["radii"] for player in presets.OPT_CMDP[:3]]
    assert modes == ["matched", "published", "literal"]
    # every rival that has constants plays with tuned ones where WC-OPS does
    assert {p.key for p in preset.players_of("tuned")} == {"wc-ops", "opt-cmdp", "opt-primal-dual", "pdb-ps"}


@pytest.mark.parametrize("family", presets.FAMILIES)
def test_optprimaldual_moves_in_every_family(family: str) -> None:
    """With WC-OPS's radii its values are cut off alike in all pairs, and it plays at random for ever."""
    preset = presets.PRESETS["stochastic-1"]
    cmdp = presets.instances(preset, 2)[0]
    learner: Any = presets.learner(presets.PRIMAL_DUAL, cmdp, family, 2000)
    env = tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1), runs=2)
    for _ in range(400):
        learner.update(env.rollout(learner.policy))
    assert (learner.policy - tc.uniform_policy(cmdp.layout)).abs().max() > 0.02


def test_command_plays_reports_and_reads_back(tmp_path, capsys) -> None:
    names = ["adversarial-1", "simplex-1"]
    size = ["--episodes", "12", "--instances", "2", "--runs", "2"]
    arguments = ["paper", *names, *size, "--jobs", "1", "--logdir", str(tmp_path)]
    assert main(arguments) == 0
    printed, folder = capsys.readouterr(), tmp_path / "paper"
    report = (folder / "report-partial.md").read_text()
    assert "the policies converge to the safe set" in printed.out and "adversarial rewards and costs: alpha-regret" in report
    assert "about 0 s left" in printed.err
    assert "These are 2 instances, where the design asks for 20" in report
    for name in names:
        figures = {path.name for path in (folder / name).glob("*.png")}
        assert "curves.png" in figures and (folder / name / "curves.pdf").exists()
        assert ("simplex.png" in figures) == name.startswith("simplex")
        assert ("curves-replay.png" in figures) == name.startswith("adversarial")
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


def test_the_report_names_modes_and_both_readings_of_the_violation(tmp_path) -> None:
    job = experiment.Job("stochastic-1", "small", 12, 2, 2, tmp_path, False)
    outcome = experiment.play(job)
    result = outcome.results[experiment.OWN, "WC-OPS"]
    assert not torch.equal(result.realised_violation, result.violation)
    report_of = report.write_report(tmp_path / "report.md", [outcome], "a command", 20)
    text = (tmp_path / "report.md").read_text()
    assert "OptCMDP's, literal radii" in report_of and "of realised costs" in text
    assert claims.interval(result.realised_violation[:, -1], 2) in text
    report.write_experiment([outcome])
    row = next(csv.DictReader(open(tmp_path / "summary.csv")))
    assert float(row["realised_violation"]) == pytest.approx(float(result.realised_violation[:, -1].mean()))
    # every bit of a summary follows from the seeds
    assert "seconds" not in row


def test_interrupted_experiments_say_so_and_go_on(tmp_path, capsys, monkeypatch) -> None:
    size = ["--episodes", "30", "--instances", "2", "--runs", "2"]
    arguments = ["paper", "simplex-1", *size, "--jobs", "1", "--logdir", str(tmp_path)]
    whole = experiment.play(experiment.Job("simplex-1", "theory", 30, 2, 2, tmp_path / "whole", False))
    watch = experiment.RecordingSimulator.watch

    def interrupted(self: Any, policy: torch.Tensor) -> None:
        if self.episode == 10:  # a logging point, where a block begins however long blocks are
            monkeypatch.setattr(experiment.RecordingSimulator, "watch", watch)
            signal.raise_signal(signal.SIGINT)
        watch(self, policy)

    monkeypatch.setattr(experiment.RecordingSimulator, "watch", interrupted)
    assert main(arguments) == 130 and "the same command continues" in capsys.readouterr().err
    assert not (tmp_path / "paper" / "report-partial.md").exists()
    assert main(arguments) == 0
    again = experiment.play(experiment.Job("simplex-1", "theory", 30, 2, 2, tmp_path / "paper" / "simplex-1", False))
    assert torch.equal(again.policies["WC-OPS"], whole.policies["WC-OPS"])
    assert torch.equal(again.results[experiment.OWN, "WC-OPS"].regret, whole.results[experiment.OWN, "WC-OPS"].regret)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["stochastic1"], "did you mean stochastic-1?"),
        (["--quick", "stochastic-1"], "names of experiments come first"),
        (["--runs", "1"], "--runs is 1; the report needs intervals over runs"),
        (["--instances", "1"], "--instances is 1; the report needs intervals over instances"),
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


def cell(*parts: str, mode: str = "matched") -> regimes.Regime:
    return regimes.Regime("paper-tight", "small", mode, 1000, dict(zip(regimes.PARTS, parts, strict=True)))


def test_the_headline_holds_where_all_of_it_does() -> None:
    assert cell(HOLDS, HOLDS, HOLDS).verdict == HOLDS
    assert cell(HOLDS, HOLDS, UNDECIDED).verdict == UNDECIDED
    assert cell(HOLDS, UNDECIDED, FAILS).verdict == FAILS
    words = regimes.paragraph([cell(HOLDS, HOLDS, HOLDS, mode="published"), cell(HOLDS, FAILS, UNDECIDED)])
    assert words.startswith("Of 2 regimes the headline holds in 1, does not hold in 1, and cannot be told in 0.")
    assert "It holds by radii: published 1, matched 0." in words
    assert '"violation lower than OptCMDP\'s" holds in 1 and fails in 1.' in words


def test_the_map_of_regimes_from_end_to_end(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(regimes, "QUICK_HORIZONS", (20,))
    monkeypatch.setattr(regimes, "REGIMES", {"narrow-tight": presets.REGIMES["narrow-tight"]})
    arguments = ["paper", "regimes", "--quick", "--jobs", "1", "--logdir", str(tmp_path)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("Of 6 regimes")  # three scales, two modes of radii
    folder = tmp_path / "regimes-quick"
    with (folder / "regimes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["constants"], row["radii"]) for row in rows} == {(f, m) for f in presets.SCALES for m in regimes.MODES}
    assert "not a finding" in (folder / "regimes.md").read_text()
    assert all((folder / f"regimes.{kind}").stat().st_size for kind in ("png", "pdf"))
    assert main([*arguments, "--runs", "1"]) == 2
