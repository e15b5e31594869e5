"""Learners with a baseline: the pessimistic value, the mixing rule, the promise, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers import LAYOUT, play, simulator

import torchcmdp as tc
from torchcmdp.baselines import baseline_weight
from torchcmdp.confidence import Intervals, confidence_set, worst_value
from torchcmdp.occupancy import pair_occupancy_of
from torchcmdp.optimistic import optimistic_optimum
from torchcmdp.safe_set import SafeSet
from torchcmdp.streams import RunStreams
from torchcmdp.testing import _random_policy
from train.__main__ import main
from train.study import safe

SAFE = (tc.SOPS, tc.MAOPS, tc.DOPE)


def batch(n: int, seed: int = 0) -> tc.LayeredCMDP:
    made = [tc.random_cmdp(LAYOUT.widths, LAYOUT.actions, 2, seed + j, feasibility="strict") for j in range(n)]
    return tc.stack_cmdps(made)


def test_the_worst_value_is_the_cost_where_everything_is_known_and_above_it_where_the_truth_is_in_the_set() -> None:
    n = 1000
    cmdp, policy = batch(50), _random_policy(LAYOUT, n, 0)
    P, costs = (x.repeat(n // 50, *[1] * (x.dim() - 1)) for x in (cmdp.transitions, cmdp.costs))
    exact = (costs * pair_occupancy_of(policy, P, LAYOUT).unsqueeze(1)).sum((-3, -2, -1))
    torch.testing.assert_close(worst_value(Intervals(P, P, LAYOUT), policy, costs), exact, rtol=0, atol=1e-12)
    generator = torch.Generator().manual_seed(1)
    width = torch.rand(P.shape, generator=generator, dtype=torch.float64) * LAYOUT.transition_mask()
    kernels = Intervals((P - width).clamp_min(0), (P + width).clamp_max(1) * LAYOUT.transition_mask(), LAYOUT)
    above = worst_value(kernels, policy, costs)
    assert (above >= exact - 1e-12).all() and (above > exact + 0.01).float().mean() > 0.9
    assert (worst_value(kernels, policy, costs, maximise=False) <= exact + 1e-12).all()
    nothing = confidence_set("entrywise", torch.zeros(n, *LAYOUT.pair_shape), torch.zeros_like(P), LAYOUT, horizon=9, delta=0.1)
    ones = torch.ones_like(costs) * LAYOUT.pair_mask()
    torch.testing.assert_close(worst_value(nothing, policy, ones), torch.full_like(exact, LAYOUT.layers))


def test_the_worst_value_of_a_forced_policy_is_the_linear_programs() -> None:
    """A policy enters the program as an action that alone is cheap; here one action makes it the only one."""
    cmdp = tc.random_cmdp((1, 3, 2, 1), 1, 2, 0, feasibility="any")
    width = 0.2 * cmdp.layout.transition_mask()
    lower, upper = (cmdp.transitions - width).clamp_min(0), (cmdp.transitions + width).clamp_max(1) * cmdp.layout.transition_mask()
    worst = worst_value(Intervals(lower, upper, cmdp.layout), cmdp.layout.pair_mask().double(), cmdp.costs)
    program = [optimistic_optimum(g, SafeSet(cmdp.layout, lower, upper, cmdp.costs[:0])).value for g in cmdp.costs]
    torch.testing.assert_close(worst, torch.stack(program), rtol=0, atol=1e-9)


def test_lambda_is_the_least_weight_that_makes_the_mixture_safe() -> None:
    generator = torch.Generator().manual_seed(0)
    worst = 4 * torch.rand(500, 3, generator=generator, dtype=torch.float64) - 2.5
    bounds = -torch.rand(500, 3, generator=generator, dtype=torch.float64) - 0.01
    weight = baseline_weight(worst, bounds)
    low, high = torch.zeros(500).double(), torch.ones(500).double()
    for _ in range(60):  # bisection
        middle = (low + high) / 2
        fits = (middle[:, None] * bounds + (1 - middle[:, None]) * worst <= 0).all(-1)
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    torch.testing.assert_close(weight, torch.where((worst <= 0).all(-1), 0.0, high), rtol=0, atol=1e-12)
    assert (weight == 0).any() and baseline_weight(worst[:, :0], bounds[:, :0]).tolist() == [0.0] * 500


@pytest.mark.parametrize(
    ("key", "kind"), [("s-ops", "stochastic"), ("s-ops", "adversary"), ("ma-ops", "cyclic"), ("dope", "stochastic")]
)
def test_no_mixture_is_unsafe(key: str, kind: str) -> None:
    found = safe.count(safe.Options(instances=20, episodes=60), key, kind, 0.5, 1.0)
    assert found["unsafe"] == 0 and found["worst"] < 0 and found["weight"] > 0.5


def test_the_count_of_unsafe_episodes_is_drawn_beside_the_regret(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["study", "safe", "--instances", "4", "--episodes", "30", "--scales", "1", "0.03", "--rewards", "stochastic"]
    assert main([*command, "--logdir", str(tmp_path)]) == 0
    assert all((tmp_path / "study-safe" / f"report.{kind}").exists() for kind in ("md", "png", "pdf"))
    found = json.loads((tmp_path / "study-safe" / "stages" / "s-ops_stochastic_0.5_0.03.json").read_text())["result"]
    curves = {name: torch.tensor(found["curves"][name]) for name in safe.CURVES}
    assert found["curves"]["episodes"][-1] == 30 and curves["weight"].shape == (4, len(found["curves"]["episodes"]))
    assert float(curves["regret"][:, -1].mean()) / 30 == pytest.approx(found["regret"], rel=1e-5)
    assert all(float(curves[name][:, -1].mean()) == pytest.approx(found[name], rel=1e-5) for name in ("unsafe", "weight"))
    panels = safe.figure({("S-OPS", 1.0): found["curves"], ("S-OPS", 0.03): found["curves"]}).axes
    assert [axes.get_ylabel() for axes in panels] == list(safe.CURVES.values())
    assert "unsafe" in panels[0].get_title(loc="left") and "S-OPS at 0.03" in {text.get_text() for text in panels[0].texts}


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_a_warm_learner_leaves_the_baseline_and_stays_safe(scale: float) -> None:
    """Told what ten thousand visits of every pair tell, S-OPS plays its own policy more often, and is still safe."""
    cmdp = safe.instances(safe.Options(instances=20))
    learner, env = known(tc.SOPS, cmdp, 10_000.0, scale), simulator(cmdp, 20)
    tracker = tc.Tracker(env)
    for _ in range(20):
        mixture = learner.mixture
        trajectory = env.rollout(learner.policy)
        tracker.update(mixture, trajectory)
        learner.update(trajectory)
    tracker.record()
    assert tracker.unsafe_share.max() == 0 and learner.baseline_weight.min() < 0.9


def known(kind: Any, cmdp: tc.LayeredCMDP, visits: float, scale: float = 1.0) -> Any:
    """A learner that has seen every pair so often, with averages that are the truth."""
    scales = {"bonus_scale": scale, "radius_scale": scale}
    runs = len(cmdp.transitions)
    learner = kind(cmdp.layout, cmdp.constraints, 1000, runs=runs, baseline=tc.baseline(cmdp, 0.2 * tc.slater_gap(cmdp)), **scales)
    learner.visits = (visits * cmdp.layout.pair_mask()).double().expand(runs, -1, -1, -1).clone()
    learner.transition_visits = visits * cmdp.transitions
    learner.costs.cost_estimate = cmdp.costs.clone()
    return learner


def test_ma_ops_ends_with_half_of_the_largest_margin() -> None:
    cmdp = safe.instances(safe.Options(instances=20))
    learner = known(tc.MAOPS, cmdp, 1e10)
    assert learner.exploring.all()
    before = learner.baseline_policy.clone()
    play(learner, simulator(cmdp, 20), 60)
    ended = ~learner.exploring
    assert ended.float().mean() > 0.5  # those whose coin let them explore once
    margin = -learner.baseline_bounds.amax(-1)
    assert (margin >= tc.slater_gap(cmdp) / 2 - 1e-6)[ended].all()
    costs = tc.evaluate(learner.baseline_policy, cmdp).violations
    assert (costs <= learner.baseline_bounds + 1e-9).all(), "a bound that the policy does not keep"
    assert torch.equal(learner.baseline_policy[~ended], before[~ended]) and (learner.step_factor[ended] > 1).all()
    skipped = tc.MAOPS(LAYOUT, 1, 10, baseline=tc.Baseline(tc.uniform_policy(LAYOUT), [-2.0]))
    assert not skipped.exploring.any(), "2 d >= L"


def test_phase_one_learns_nothing_from_the_baseline() -> None:
    cmdp = batch(8)
    learner, env = tc.MAOPS(LAYOUT, 2, 100, runs=8, baseline=tc.baseline(cmdp)), simulator(cmdp, 8)
    for _ in range(10):
        stays, before = learner.on_baseline, learner.visits
        learner.update(env.rollout(learner.policy))
        assert ((learner.visits - before).sum((1, 2, 3)) == torch.where(stays, 0.0, 3.0)).all()


def test_the_coin_belongs_to_run_and_episode() -> None:
    whole, part = RunStreams(3, 6), RunStreams(3, 2, first_run=4)
    coins = torch.stack([whole.coin(torch.tensor(t)) for t in range(2000)])
    assert torch.equal(coins[:, 4:], torch.stack([part.coin(torch.tensor(t)) for t in range(2000)]))
    assert abs(float(coins.mean()) - 0.5) < 0.02 and len(coins.unique()) == coins.numel()
    assert torch.equal(RunStreams(3, 6, distinct=2).coin(torch.tensor(5)), coins[5, :2].repeat(3))
    used = torch.cat([whole.uniform(t, 3, 3).flatten() for t in range(20)])
    assert not torch.isin(coins, used).any(), "a number that the simulator uses as well"


def test_the_tracker_measures_the_mixture_and_not_the_draw(tmp_path: Any) -> None:
    cmdp = batch(1)
    cmdp = tc.LayeredCMDP(LAYOUT, cmdp.transitions[0], cmdp.rewards[0], cmdp.costs[0])
    env, same = simulator(cmdp, 5), simulator(cmdp, 5)
    made = {"baseline": tc.baseline(cmdp), "horizon": 20}
    result = tc.run(tc.SOPS.for_env(env, **made), env, 20, progress=False, logdir=tmp_path / "run", images=False)
    learner, costs = tc.SOPS.for_env(same, **made), torch.zeros(5, 2).double()
    for _ in range(20):
        weight = learner.baseline_weight[:, None]
        own, base = (tc.evaluate(policy, cmdp).violations for policy in (learner.own_policy, learner.baseline_policy))
        costs += weight * base + (1 - weight) * own
        learner.update(same.rollout(learner.policy))
    torch.testing.assert_close(result.violation_by_constraint[:, -1], costs)
    share = result.diagnostics["Learner/on_baseline"]
    assert 0 < float(share.mean()) <= 1 and (result.diagnostics["Learner/baseline_weight"] > 0).all()


def test_what_is_no_baseline_gets_a_sentence() -> None:
    uniform = tc.uniform_policy(LAYOUT)
    with pytest.raises(tc.InvalidInput, match="cost_bounds contains 0; .* below zero"):
        tc.Baseline(uniform, torch.tensor([-0.1, 0.0]))
    for kind in SAFE:
        for given, words in (
            (tc.Baseline(uniform[:, :2], [-0.1]), "baseline.policy has shape"),
            (tc.Baseline(0.9 * uniform, [-0.1]), "baseline.policy sums to 0.9"),
            (tc.Baseline(uniform, [-0.1, -0.1]), r"baseline.cost_bounds has shape \(2,\); expected"),
            (tc.Baseline(uniform, [-3.5]), "cannot cost less than -3"),
            ("careful", "baseline is 'careful'; it must be a Baseline"),
        ):
            with pytest.raises(tc.InvalidInput, match=words):
                kind(LAYOUT, 1, 10, baseline=given)
        with pytest.raises(tc.InvalidInput, match="no practical recipe"):
            kind.practical(LAYOUT, 1, 10, baseline=tc.Baseline(uniform, [-0.1]))
    unsafe = tc.random_cmdp(LAYOUT.widths, 2, 1, 0, feasibility="any")
    unsafe = tc.LayeredCMDP(LAYOUT, unsafe.transitions, unsafe.rewards, unsafe.costs.abs())
    with pytest.raises(tc.InvalidInput, match="no policy is safe with room to spare"):
        tc.baseline(unsafe)
    roomy = batch(2)
    with pytest.raises(tc.InvalidInput, match="margin is 9; it must be above zero and at most the Slater gap"):
        tc.baseline(roomy, 9)
    found = tc.baseline(roomy)
    torch.testing.assert_close(found.margin, tc.slater_gap(roomy) / 2, rtol=0, atol=1e-6)


def test_a_baseline_that_the_data_refute_is_counted_and_said() -> None:
    cmdp = tc.single_state_cmdp([0.5, 0.5], [[0.5, 0.5]])
    env = simulator(cmdp, 2)
    lie = tc.Baseline(tc.uniform_policy(cmdp.layout), [-0.9])
    learner = tc.SOPS.for_env(env, horizon=200, baseline=lie)
    with pytest.warns(UserWarning, match="refutes the cost bounds of the baseline"):
        result = tc.run(learner, env, 200, progress=False)
    assert (result.counts["Learner/baseline_refuted"] > 0).all()
