"""The user's units: budgets of any sign and sense, costs and rewards of any range, and everything a person reads."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch

import torchcmdp as tc
from torchcmdp.metrics import Tracker
from torchcmdp.problems import from_arrays
from torchcmdp.units import normal_form

P = np.random.default_rng(0).dirichlet(np.ones(3), (3, 2))
PAY = np.array([[5.0, -2.0], [10.0, 0.0], [-3.0, 4.0]])
COST = np.array([[[7.0, -3.0], [2.0, 0.0], [30.0, 1.0]], [[1.0, 2.0], [0.0, 4.0], [3.0, 0.5]]])
SENSES = ("<=", ">=")


def table(**options):
    return from_arrays(P, PAY, COST, **{"horizon": 4, "budget": [20.0, 5.0], "sense": SENSES, **options})


def expected(cmdp, policy):
    """Return and costs of a policy in the user's units, from the stationary tables alone."""
    states, mass, pay, costs = cmdp.origin.states, np.eye(3)[0], 0.0, np.zeros(2)
    for k in range(cmdp.layout.layers):
        chosen = np.zeros((3, 2))
        for place, state in enumerate(states[k].tolist()):
            if state >= 0:
                chosen[state] = policy[k, place].numpy()
        pairs = mass[:, None] * chosen
        pay, costs = pay + (pairs * PAY).sum(), costs + (pairs * COST).sum((1, 2))
        mass = np.einsum("xa,xay->y", pairs, P)
    return pay, costs


def test_the_way_back_is_exact(random_policy) -> None:
    cmdp = table()
    for seed in range(3):
        policy = random_policy(cmdp.layout, seed=seed)
        found, (pay, costs) = tc.evaluate(policy, cmdp), expected(cmdp, policy)
        assert float(cmdp.units.episode_return(found.value)) == pytest.approx(pay, abs=1e-10)
        assert cmdp.units.episode_costs(found.violations).tolist() == pytest.approx(costs.tolist(), abs=1e-10)
        assert cmdp.units.violations(found.violations).tolist() == pytest.approx([costs[0] - 20, 5 - costs[1]], abs=1e-10)
        assert bool(found.safe) == (costs[0] <= 20 and costs[1] >= 5)


def test_the_normal_form_fills_its_ranges_and_knows_its_ends() -> None:
    cmdp = table()
    assert (float(cmdp.rewards.min()), float(cmdp.rewards.max())) == (0, 1)
    assert cmdp.costs.abs().amax((1, 2, 3)).tolist() == pytest.approx([1, 1]) and (cmdp.costs >= cmdp.units.cost_low).all()
    real = cmdp.layout.pair_mask()
    for i in range(2):  # the smallest cost that the table has is the end
        assert float(cmdp.costs[i][real].min()) == pytest.approx(float(cmdp.units.cost_low[i][real].min()))
    assert (cmdp.units.cost_low[:, ~real] == 0).all() and (cmdp.units.reward_high[~real] == 0).all()


def test_costs_that_fit_are_left_alone_and_small_ones_are_stretched() -> None:
    for costs, scale in (([[0.0, 1.0]], 1.0), ([[0.0, 0.01]], 0.0075), ([[0.0, 40.0]], 30.0)):
        *_, units = normal_form(torch.zeros(2), torch.tensor(costs).double(), 2, max(costs[0]) / 2)
        assert units(torch.ones(1, 1, 2, dtype=torch.bool)).cost_scale.tolist() == pytest.approx([scale])


@pytest.mark.parametrize("cost", [0.1, 1e-9, 0.7e9, -0.1, 0.0])
def test_a_budget_that_costs_without_a_choice_use_up_is_kept(cost) -> None:
    """Of a cost less its share of the budget rounding alone is left, which nobody stretches."""
    cmdp = from_arrays(P, PAY, np.full((1, 3, 2), cost), horizon=3, budget=3 * cost)
    assert float(cmdp.costs.abs().max()) < 1e-12 and float(cmdp.units.cost_scale) == max(1, abs(cost))


@pytest.mark.parametrize("shift", [0.0, -11.5])
def test_a_budget_means_what_it_says_and_may_be_negative(shift) -> None:
    """Costs shifted by a number every step, and the budget by the horizon times it, are the same problem."""
    cmdp = from_arrays(P, PAY, COST[:1] + shift, horizon=4, budget=15.0 + 4 * shift)
    optimum = tc.safe_optimum(cmdp)
    used = cmdp.units.episode_costs(tc.evaluate(tc.policy_of(optimum.occupancy, cmdp.layout), cmdp).violations)
    assert float(used) == pytest.approx(15.0 + 4 * shift)
    base = from_arrays(P, PAY, COST[:1], horizon=4, budget=15.0)
    assert float(optimum.value) == pytest.approx(float(tc.safe_optimum(base).value), abs=1e-9)


def test_a_utility_is_a_cost_turned_round() -> None:
    cost = from_arrays(P, PAY, COST[:1], horizon=4, budget=15.0)
    utility = from_arrays(P, PAY, -COST[:1], horizon=4, budget=-15.0, sense=">=")
    assert torch.equal(cost.costs, utility.costs) and torch.equal(cost.units.cost_low, utility.units.cost_low)


def test_unroll_takes_a_budget_as_well() -> None:
    rolled = tc.unroll(P, PAY, COST, horizon=4, budget=[20.0, 5.0], sense=SENSES)
    cmdp = table()
    assert torch.equal(rolled.costs, cmdp.costs) and torch.equal(rolled.rewards, cmdp.rewards)
    assert tc.unroll(P, np.abs(PAY) / 10, COST[:, :, :] / 30, horizon=4).units is None


def test_units_follow_a_cmdp_everywhere() -> None:
    cmdp = table()
    both = tc.stack_cmdps([cmdp, table(budget=[30.0, 4.0])])
    assert both.units.budget.tolist() == [[20, 5], [30, 4]] and both[1].units.budget.tolist() == [30, 4]
    small = cmdp.to(dtype=torch.float32)
    assert small.units.cost_low.dtype == torch.float32 and small.units.budget.dtype == torch.float64
    with pytest.raises(tc.InvalidInput, match="some have none"):
        tc.stack_cmdps([cmdp, tc.LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards, cmdp.costs)])


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    cmdp, folder = table(), tmp_path_factory.mktemp("run")
    plain = tc.LayeredCMDP(cmdp.layout, cmdp.transitions, cmdp.rewards, cmdp.costs)

    def result(cmdp, place, **options):
        env = tc.Simulator(cmdp, cmdp.rewards, cmdp.costs, runs=3)
        ends = {"cost_low": table().units.cost_low, "reward_high": table().units.reward_high}
        return tc.run(tc.WCOPS(cmdp.layout, 2, 20, runs=3, **ends), env, 20, place, 10)

    return cmdp, result(cmdp, folder / "units"), result(plain, folder / "plain"), folder


def test_a_result_is_in_the_users_units_and_scaled_is_the_normal_form(played) -> None:
    cmdp, shown, plain, _ = played
    scales = cmdp.units.cost_scale
    torch.testing.assert_close(shown.regret, plain.regret * cmdp.units.reward_scale)
    torch.testing.assert_close(shown.violation_by_constraint, plain.violation_by_constraint * scales)
    torch.testing.assert_close(shown.violation, (plain.violation_by_constraint * scales).amax(-1))
    torch.testing.assert_close(shown.safe_value, cmdp.units.episode_return(plain.safe_value))
    for name in ("regret", "alpha_regret", "violation", "positive_violation", "realised_violation", "safe_value", "best_value"):
        torch.testing.assert_close(getattr(shown.scaled, name), getattr(plain, name))
    for name, bound in plain.bounds.items():
        torch.testing.assert_close(shown.scaled.bounds[name], bound)
    assert plain.scaled is plain and not plain.units


def test_the_folder_speaks_the_users_units_too(played) -> None:
    cmdp, shown, _, folder = played
    rows = list(csv.DictReader((folder / "units" / "metrics.csv").open()))
    assert float(rows[-1]["Regret/cumulative"]) == pytest.approx(float(shown.regret[:, -1].mean()))
    assert float(rows[-1]["Violation/cumulative/0"]) == pytest.approx(float(shown.violation_by_constraint[:, -1, 0].mean()))
    assert 1 < float(rows[-1]["Metrics/EpCost/0"]) < 40  # the cost itself, not what is left of the budget
    loaded = tc.load(folder / "units")
    assert torch.equal(loaded.scaled.regret, shown.scaled.regret) and torch.equal(loaded.regret, shown.regret)
    assert f"{float(shown.regret[:, -1].mean()):.1f}" in shown.summary()


def test_the_tracker_keeps_the_normal_form_in_its_properties() -> None:
    cmdp = table()
    env = tc.Simulator(cmdp, cmdp.rewards, cmdp.costs)
    tracker, policy = Tracker(env), tc.uniform_policy(cmdp.layout)
    tracker.update(policy, env.rollout(policy))
    tracker.record()
    pay, costs = expected(cmdp, policy)
    assert float(tracker.curves()["episode_return"]) == pytest.approx(pay)
    assert tracker.curves()["episode_cost"].flatten().tolist() == pytest.approx(costs.tolist())
    assert float(tracker.reward) == pytest.approx(float(tc.evaluate(policy, cmdp).value))


LEARNERS = {"wc-ops": {"bonus_scale": 0.3}, "opt-cmdp": {}, "opt-primal-dual": {"bonus_scale": 0.01, "radius_scale": 1e-4}}


@pytest.mark.parametrize("key", LEARNERS)
def test_no_optimism_goes_below_the_end_and_both_engines_agree(key, monkeypatch) -> None:
    cmdp = from_arrays(P, PAY, COST[:1], horizon=4, budget=15.0)
    env = [tc.Simulator(cmdp, cmdp.rewards, cmdp.costs, runs=2, seed=3) for _ in range(2)]
    learners = [tc.LEARNERS[key].for_env(each, horizon=50, **LEARNERS[key]) for each in env]
    low = cmdp.units.cost_low
    assert float(low.min()) > -1 and torch.equal(learners[0].cost_low[0], low)
    for _ in range(6):
        learners[0].update(env[0].rollout(learners[0].policy))
        with tc.kernels.engine.using("torch"):
            learners[1].update(env[1].rollout(learners[1].policy))
    torch.testing.assert_close(learners[0].policy, learners[1].policy, rtol=1e-7, atol=1e-9)
    if key != "opt-primal-dual":
        safe_set = learners[0].safe_set() if key == "wc-ops" else learners[0].program()[1]
        assert (safe_set.costs >= low).all() and (safe_set.costs == low).any()
    else:
        lowest, highest = learners[0].value_ends()
        layer = torch.where(cmdp.layout.pair_mask(), low[0], 1.0).flatten(1).amin(-1)
        assert float(lowest[0, 1, 0]) == pytest.approx(float(layer.sum())) and float(highest[0, 0, 0]) == pytest.approx(4)


def test_rewards_that_are_known_to_be_nothing_tempt_nobody() -> None:
    cmdp = from_arrays(P, np.abs(PAY), horizon=4, terminal=[2])
    ended = cmdp.origin.states == 3
    assert ended.any() and (cmdp.units.reward_high[ended] == cmdp.rewards[ended]).all()
    env = tc.Simulator(cmdp, cmdp.rewards, runs=1)
    rewards, _ = tc.OptCMDP.for_env(env, horizon=10).program()
    assert (rewards[0][ended] == cmdp.rewards[ended]).all() and (rewards[0][~ended & (cmdp.origin.states >= 0)] == 1).all()


def test_the_layer_takes_a_budget() -> None:
    cmdp = from_arrays(P, PAY, COST[:1], horizon=4, budget=15.0)
    costs = torch.tensor(COST[:1])[:, cmdp.origin.states.clamp_min(0)] * cmdp.layout.pair_mask()
    layer = tc.nn.SafeOccupancy(cmdp.layout, 1, transitions=cmdp.transitions, costs=costs, budget=15.0)
    with pytest.raises(tc.InvalidInput, match="budget is -100 for constraint 0, which no policy keeps: every one costs at least"):
        tc.nn.SafeOccupancy(cmdp.layout, 1, transitions=cmdp.transitions, costs=costs, budget=-100)
    both = torch.tensor(COST)[:, cmdp.origin.states.clamp_min(0)] * cmdp.layout.pair_mask()
    both[1] *= -1  # a utility, as `SENSES` says
    tc.nn.SafeOccupancy(cmdp.layout, 2, transitions=cmdp.transitions, costs=both, budget=[20.0, -5.0])
    for unit in (1.0, 1e-6):  # each of them can be kept alone
        with pytest.raises(tc.InvalidInput, match="no policy keeps all 2 of the constraints at once"):
            tc.nn.SafeOccupancy(cmdp.layout, 2, transitions=cmdp.transitions, costs=both * unit, budget=[-3.5 * unit, -9.0 * unit])
    wished = torch.where(costs[0] > 0, 3.0, 0.0)  # costly actions are what the network would like
    found = layer(logits=wished)
    assert float((found.occupancy.sum(-1) * costs[0]).sum()) == pytest.approx(15.0, abs=1e-6) and float(found.multipliers) > 0


def test_mistakes_get_a_sentence() -> None:
    layout = table().layout
    for words, call in {
        "cost_low goes from -2": lambda: tc.WCOPS(layout, 2, 10, cost_low=-2.0),
        "cost_low has shape": lambda: tc.WCOPS(layout, 2, 10, cost_low=torch.zeros(3, 1, 1, 1)),
        "budget is 'much'; it must be a finite number": lambda: table(budget="much"),
        "one for each of 2 costs": lambda: table(budget=[1.0, 2.0, 3.0]),
        "budget is -100 for constraint 0, which no policy keeps: every one costs at least": lambda: table(budget=[-100.0, 5.0]),
        "budget is 500 for constraint 1, which no policy keeps: every one gets at most": lambda: table(budget=[20.0, 500.0]),
        "no policy keeps all 2 of the constraints": lambda: table(budget=[-3.5, 9.0]),
        "sense is '<'": lambda: table(sense="<"),
        "sense is .*one of them for each of 2 costs": lambda: table(sense=["<="]),
        "the range of reward is .*from -3 to 10": lambda: table(reward_range=(0.0, 1.0)),
        "the range of cost 0": lambda: table(cost_range=(0.0, 1.0)),
    }.items():
        with pytest.raises(tc.InvalidInput, match=words):
            call()
