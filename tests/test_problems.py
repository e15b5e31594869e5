"""Tables, tabular environments and named problems: the same problem however it is given, and its optimum by another program."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import NEEDED
from scipy.optimize import linprog
from scipy.sparse import lil_matrix

import torchcmdp as tc
from torchcmdp.adapters.tabular import fell_in_a_hole, from_arrays, from_gymnasium, told_cost


def layered_optimum(cmdp: tc.LayeredCMDP) -> float:
    """max <r, q> with <g_i, q> <= 0 over the occupancies of a layered CMDP, by HiGHS."""
    layout = cmdp.layout
    first, transitions, real = np.cumsum([0, *layout.widths]), layout.dense(cmdp.transitions), layout.pair_mask()
    pairs = first[-2] * layout.actions
    flow, given = lil_matrix((first[-2], pairs)), np.zeros(first[-2])
    pay, costs = np.zeros(pairs), np.zeros((cmdp.constraints, pairs))
    given[0] = 1
    for k in range(layout.layers):
        for x in range(layout.widths[k]):
            for a in real[k, x].nonzero().flatten().tolist():
                j = (first[k] + x) * layout.actions + a
                pay[j], costs[:, j] = cmdp.rewards[k, x, a], cmdp.costs[:, k, x, a]
                flow[first[k] + x, j] += 1
                if k + 1 < layout.layers:
                    for y in transitions[k, x, a].nonzero().flatten().tolist():
                        flow[first[k + 1] + y, j] -= float(transitions[k, x, a, y])
    unsafe = {"A_ub": costs, "b_ub": np.zeros(len(costs))} if len(costs) else {}
    return -linprog(-pay, A_eq=flow.tocsr(), b_eq=given, **unsafe).fun


@pytest.mark.parametrize("name", tc.problems.names())
def test_every_named_problem_has_the_optimum_of_its_linear_program(name) -> None:
    """To 1e-7 in the user's units, whatever their scale; the published settings."""
    problem = tc.problems.make(name)
    facts, units = problem.facts(), problem.cmdp.units
    value = layered_optimum(problem.cmdp)
    assert facts.optimum == pytest.approx(value if units is None else float(units.episode_return(value)), rel=0, abs=1e-7)
    if problem.optimum is not None:
        assert facts.optimum == pytest.approx(problem.optimum, rel=0, abs=5e-7)
    assert facts.optimum <= facts.best + 1e-9 and facts.slater >= -1e-9 and problem.source


@pytest.mark.parametrize("name", tc.problems.names())
@pytest.mark.filterwarnings("ignore:what was seen refutes")  # a baseline where none is safe is no baseline
def test_all_learners_play_every_named_problem(name) -> None:
    problem = tc.problems.make(name)
    room = float(tc.slater_gap(problem.cmdp)) > 1e-9
    for key, kind in tc.LEARNERS.items():
        env = problem.simulator(runs=2, episodes=3)
        given = {"baseline": tc.baseline(problem.cmdp)} if key in NEEDED and room else NEEDED.get(key, {})
        learner = kind.for_env(env, horizon=3, **given)
        result = tc.run(learner, env, 3, progress=False)
        policy, real = learner.policy, problem.cmdp.layout.pair_mask()
        assert result.completed and result.regret.isfinite().all() and result.violation.isfinite().all()
        assert (policy[:, ~real] == 0).all() and torch.allclose(policy.sum(-1), problem.cmdp.layout.state_mask().to(policy))


def test_published_optima() -> None:
    """Inventory's is printed by its authors' code; the circle's and the buffer's follow by hand and from that code's program."""
    assert tc.problems.make("dope/inventory").facts().optimum == pytest.approx(6.665322, rel=0, abs=5e-7)
    assert tc.problems.make("dope/factored").facts().optimum == pytest.approx(2.0)  # three moves, which pay 1/3, 2/3 and 1
    assert tc.problems.make("alwayssafe/cliff").facts().best == pytest.approx(-7)
    assert tc.problems.make("alwayssafe/simple", budget=6).facts().optimum == pytest.approx(12)
    changed = tc.problems.make("dope/media", horizon=6, budget=3)
    assert changed.cmdp.layout.layers == 6 and changed.facts().budget == ("<= 3",) and changed.optimum is None


def given(seed: int = 0):
    """Random tables over five states, with masks, and what else there is to say about them."""
    rng = np.random.default_rng(seed)
    mask = rng.random((5, 3)) < 0.6
    mask[np.arange(5), rng.integers(3, size=5)] = True
    return {
        "P": rng.dirichlet(np.full(5, 0.5), (5, 3)),
        "R": rng.normal(size=(5, 3)) * 7,
        "C": rng.normal(size=(2, 5, 3)) * 3,
        "mask": mask,
        "start": np.array([0.5, 0.25, 0.25, 0, 0]),
        "terminal": [4],
        "discount": 0.9,
    }


def table_optimum(tables, horizon: int, budgets, senses) -> float:
    """The same problem over (step, state, action), in the user's units, without layers, units or extra states."""
    n, actions = tables["mask"].shape
    ended = np.isin(np.arange(n), tables["terminal"])
    index = {pair: j for j, pair in enumerate(np.ndindex(horizon, n, actions))}
    weights = np.zeros((1 + len(budgets), len(index)))
    flow, fixed = np.zeros((horizon * n, len(index))), np.zeros(horizon * n)
    fixed[:n] = tables["start"]
    bounds = []
    for (k, x, a), j in index.items():
        weights[:, j] = tables["discount"] ** k * np.array([tables["R"][x, a], *tables["C"][:, x, a]])
        flow[k * n + x, j] += 1
        if k + 1 < horizon:
            flow[(k + 1) * n : (k + 2) * n, j] -= tables["P"][x, a] * ~ended
        bounds.append((0, None if tables["mask"][x, a] else 0))
    sign = np.array([1 if sense == "<=" else -1 for sense in senses])
    return -linprog(
        -weights[0], A_ub=sign[:, None] * weights[1:], b_ub=sign * np.array(budgets), A_eq=flow, b_eq=fixed, bounds=bounds
    ).fun


@pytest.mark.parametrize("seed", range(4))
def test_arrays_with_all_there_is_have_the_optimum_of_their_own_program(seed) -> None:
    tables, budgets, senses = given(seed), [6.0, -8.0], ["<=", ">="]
    cmdp = from_arrays(**tables, horizon=6, budget=budgets, sense=senses)
    found = float(cmdp.units.episode_return(tc.safe_optimum(cmdp).value))
    assert found == pytest.approx(table_optimum(tables, 6, budgets, senses), rel=0, abs=1e-7)
    assert cmdp.layout.layers == 7 and cmdp.origin.states[0, 0] == 6 and cmdp.origin.stationary
    assert cmdp.origin.truncation[0] == pytest.approx(0.9**6 / 0.1 * np.abs(tables["R"][tables["mask"]]).max())


def test_time_varying_tables_agree_with_stationary_ones_and_differ_where_they_do() -> None:
    tables = given(1)
    still = from_arrays(**tables, horizon=4, budget=[6.0, -8.0], sense=["<=", ">="])
    moving = {**tables, "P": np.stack([tables["P"]] * 4)}
    same = from_arrays(**moving, horizon=4, budget=[6.0, -8.0], sense=["<=", ">="])
    for name in ("transitions", "rewards", "costs"):
        assert torch.equal(getattr(still, name), getattr(same, name))
    assert still.origin.stationary and not same.origin.stationary
    plain = {name: tables[name] for name in ("P", "C")}
    rising = np.stack([tables["R"] * 0, tables["R"], tables["R"] * 0])
    late = from_arrays(**plain, R=rising, horizon=3, budget=100.0)
    assert (late.rewards[0, 0] == late.rewards[0, 0, 0]).all() and late.rewards[1].std() > 0


def best_return(P, R, mask) -> float:
    """By backward induction from state 0, of tables by step and successor, `(H x N x A x N)`."""
    value = np.zeros(P.shape[-1])
    for k in reversed(range(len(P))):
        value = np.where(mask[k], (P[k] * (R[k] + value)).sum(-1), -np.inf).max(-1)
    return float(value[0])


@pytest.mark.parametrize("by_step", [(), ("P",), ("mask",), ("R",), ("P", "mask"), ("R", "mask"), ("P", "R", "mask")])
@pytest.mark.parametrize("successors", [False, True])
def test_each_table_may_change_with_the_step_or_not(by_step, successors) -> None:
    """And rewards and costs may depend on the successor besides: it is the problem of the tables that say all."""
    H, tables, rng = 4, given(3), np.random.default_rng(6)
    tables["R"] = rng.normal(size=(5, 3, 5)) if successors else tables["R"]
    whole = {name: np.stack([tables[name]] * H) for name in ("P", "R", "mask")}
    if "P" in by_step:
        whole["P"] = rng.dirichlet(np.full(5, 0.5), (H, 5, 3))
    if "R" in by_step:
        whole["R"] = whole["R"] * 9.0 ** np.arange(H).reshape(-1, *[1] * tables["R"].ndim)
    if "mask" in by_step:
        whole["mask"][0] = np.arange(3) == 0  # and what pays most may come later alone
    said = {name: whole[name] if name in by_step else tables[name] for name in whole}
    R = whole["R"] if successors else np.repeat(whole["R"][..., None], 5, -1)
    found = from_arrays(**said, C=said["R"][None], horizon=H, budget=9e9)
    full = from_arrays(whole["P"], R, R[None], mask=whole["mask"], horizon=H, budget=9e9)
    for name in ("transitions", "rewards", "costs"):
        torch.testing.assert_close(getattr(found, name), getattr(full, name), rtol=0, atol=1e-12)
    optimum = float(found.units.episode_return(tc.safe_optimum(found).value))
    assert optimum == pytest.approx(best_return(whole["P"], R, whole["mask"]), rel=1e-9)


def as_environment(tables) -> SimpleNamespace:
    """The tables as an old Gym environment: five columns, and `isd`."""
    n, actions = tables["mask"].shape
    P = {
        x: {
            a: [
                (tables["P"][x, a, y], y, tables["R"][x, a], y in tables["terminal"], {"cost": tables["C"][0, x, a]})
                for y in range(n)
            ]
            for a in range(actions)
            if tables["mask"][x, a]
        }
        for x in range(n)
    }
    return SimpleNamespace(P=P, isd=tables["start"])


def by_hand(tables, horizon: int, budget: float) -> tc.LayeredCMDP:
    """The same problem unrolled by hand: an end, and a start with one action."""
    n, actions = tables["mask"].shape
    P, pay, cost = np.zeros((n + 2, actions, n + 2)), np.zeros((n + 2, actions)), np.zeros((1, n + 2, actions))
    for x in range(n):
        for a in range(actions):
            for y in range(n):
                P[x, a, n if y in tables["terminal"] else y] += tables["P"][x, a, y]
            if tables["mask"][x, a]:
                pay[x, a], cost[0, x, a] = tables["R"][x, a], tables["C"][0, x, a]
    P[n, :, n] = 1
    P[n + 1, :, :n] = tables["start"]
    mask = np.vstack([tables["mask"], np.ones((1, actions), bool), np.arange(actions)[None] == 0])
    return tc.unroll(P / P.sum(-1, keepdims=True), pay, cost, horizon=horizon + 1, start=n + 1, budget=budget, mask=mask)


def test_a_budgeted_problem_given_three_ways_is_the_same_problem_digit_for_digit() -> None:
    # probabilities that are sums of powers of two, so that no order of summation can tell
    tables = {**given(2), "P": np.random.default_rng(5).multinomial(16, np.full(5, 0.2), (5, 3)) / 16}
    tables["R"], tables["C"] = np.round(tables["R"]), np.round(tables["C"] * 4) / 4
    arrays = from_arrays(
        tables["P"], tables["R"], tables["C"][:1], mask=tables["mask"], start=tables["start"], terminal=tables["terminal"],
        horizon=5, budget=3.0,
    )  # fmt: skip
    imported = from_gymnasium(as_environment(tables), 5, told_cost, 3.0).cmdp
    hand = by_hand(tables, 5, 3.0)
    for other in (imported, hand):
        assert other.layout == arrays.layout
        for name in ("transitions", "rewards", "costs"):
            assert torch.equal(getattr(other, name), getattr(arrays, name)), name
        for name in ("reward_scale", "reward_offset", "cost_scale", "budget"):
            assert torch.equal(getattr(other.units, name), getattr(arrays.units, name)), name
    results = [tc.safe_optimum(each).value for each in (arrays, imported, hand)]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("seed", range(4))
def test_what_an_action_surely_pays_is_the_same_by_arrays_and_by_gymnasium_whatever_the_probabilities(seed) -> None:
    tables = given(seed)
    named = {name: tables[name] for name in ("P", "R", "mask", "start", "terminal")}
    arrays = from_arrays(**named, C=tables["C"][:1], horizon=5, budget=9.0)
    imported = from_gymnasium(as_environment(tables), 5, told_cost, 9.0).cmdp
    for name in ("transitions", "rewards", "costs"):
        assert torch.equal(getattr(imported, name), getattr(arrays, name)), name


def test_a_cost_that_the_table_does_not_tell_gets_a_sentence() -> None:
    with pytest.raises(tc.InvalidInput, match="P has no fifth column"):
        from_gymnasium("FrozenLake-v1", 4, told_cost, 0.1)


def test_frozen_lake_by_arrays_is_frozen_lake_by_gymnasium() -> None:
    import gymnasium

    table = gymnasium.make("FrozenLake-v1").unwrapped.P
    P, R, C = np.zeros((16, 4, 16)), np.zeros((16, 4)), np.zeros((16, 4))
    for x, row in table.items():
        for a, outcomes in row.items():
            for p, y, reward, over in outcomes:
                P[x, a, y] += p
                R[x, a] += p * reward
                C[x, a] += p * float(over and reward <= 0)
    ends = [5, 7, 11, 12, 15]
    C[ends] = 0
    arrays = from_arrays(P, R, C, horizon=12, budget=0.1, terminal=ends, reward_range=(0, 1), cost_range=(0, 1))
    imported = from_gymnasium("FrozenLake-v1", 12, fell_in_a_hole, 0.1).cmdp
    for name in ("transitions", "rewards", "costs"):
        torch.testing.assert_close(getattr(arrays, name), getattr(imported, name), rtol=0, atol=1e-15)


def test_mistakes_get_a_sentence() -> None:
    tables = given()
    good = {"horizon": 3, "budget": [60.0, 60.0], **tables}
    bad = tables["P"].copy()
    bad[1, :, 2] += 0.5
    negative = tables["P"].copy()
    negative[0, :, 0], negative[0, :, 1] = -0.5, negative[0, :, 1] + negative[0, :, 0] + 0.5
    for words, change in {
        r"P has shape \(5, 3\)": {"P": tables["R"]},
        "P does not sum to one at state 1": {"P": bad},
        "P has a negative probability at state 0": {"P": negative},
        "P has 2 steps and the horizon is 3": {"P": np.stack([tables["P"]] * 2)},
        "P is nan at index": {"P": tables["P"] * np.nan},
        "P is 'words'": {"P": "words"},
        r"R has shape \(4, 3\); expected \(N x A\) = \(5, 3\)": {"R": tables["R"][:4]},
        r"C has shape \(5,\)": {"C": tables["C"][0, :, 0]},
        "mask leaves no action in state 0": {"mask": np.zeros((5, 3), bool)},
        "mask has shape": {"mask": np.ones((5, 2), bool)},
        "mask is .*True where an action": {"mask": np.full((5, 3), 2)},
        "start is 5": {"start": 5},
        "start is .*a distribution over 5": {"start": [0.5, 0.5, 0.5, 0, 0]},
        "a terminal state": {"start": 4},
        "terminal is": {"terminal": [7]},
        "terminal is .* or their numbers below 5, each once": {"terminal": [0, 0, 0, 0, 1]},
        "start is True": {"start": True},
        "discount is 0": {"discount": 0.0},
        "horizon is 0": {"horizon": 0},
    }.items():
        with pytest.raises(tc.InvalidInput, match=words):
            from_arrays(**{**good, **change})
    for words, call in {
        "did you mean 'dope/media'": lambda: tc.problems.make("dope/medai"),
        "horizon is 3 for 'arms/4', which has no horizon": lambda: tc.problems.make("arms/4", horizon=3),
        "budget is -1 for constraint 0": lambda: tc.problems.make("dope/media", budget=-1),
        r"P has shape \(5, 0, 5\)": lambda: from_arrays(np.zeros((5, 0, 5)), np.zeros((5, 0)), horizon=2),
        "budget is 0.5, and there are no costs": lambda: from_arrays(tables["P"], tables["R"], horizon=2, budget=0.5),
        r"R has shape \(3, 3, 3\), which may be": lambda: from_arrays(np.ones((3, 3, 3)) / 3, np.ones((3, 3, 3)), horizon=3),
        r"C has shape \(1, 3, 3, 3\), which may be": lambda: from_arrays(
            np.ones((3, 3, 3)) / 3, np.ones((3, 3)), np.ones((1, 3, 3, 3)), horizon=3, budget=3
        ),
        r"C has shape \(5, 3, 5\); expected \(N x A\)": lambda: from_arrays(tables["P"], tables["R"], tables["P"], horizon=2),
    }.items():
        with pytest.raises(tc.InvalidInput, match=words):
            call()


def test_ends_and_tables_come_as_any_array() -> None:
    tables = {name: given()[name] for name in ("P", "R", "C")}
    ends = {"cost_range": [(-20.0, 20.0), (-30.0, 30.0)], "reward_range": (-40.0, 40.0)}
    listed = from_arrays(**tables, **ends, horizon=3, budget=60)
    for like in (np.array, torch.tensor):
        arrays = from_arrays(**tables, **{name: like(pair) for name, pair in ends.items()}, horizon=3, budget=60)
        assert torch.equal(arrays.costs, listed.costs) and torch.equal(arrays.units.cost_low, listed.units.cost_low)
    sparse = from_arrays(torch.tensor(tables.pop("P")).to_sparse(), **tables, horizon=3, budget=60)
    assert torch.equal(sparse.transitions, listed.transitions)


def test_rewards_by_successor_may_all_be_the_same() -> None:
    """Their means are rounded, and rows may miss a sum of one by a little: neither is a reason to refuse them."""
    P = given()["P"] * (1 + 4e-7)
    cmdp = from_arrays(P, np.full((5, 3, 5), 0.7), np.full((2, 5, 3, 5), 0.1), horizon=3, budget=0.3)
    found = tc.evaluate(tc.uniform_policy(cmdp.layout), cmdp)
    assert float(cmdp.units.episode_return(found.value)) == pytest.approx(2.1, abs=1e-12)
    assert cmdp.units.episode_costs(found.violations).tolist() == pytest.approx([0.3, 0.3], abs=1e-12)
    arrival = from_arrays(P, np.broadcast_to(np.arange(5.0), (5, 3, 5)), horizon=1)  # what pays is the number of the next state
    earned = arrival.units.episode_return(arrival.rewards[0, 0])
    assert earned.tolist() == pytest.approx((given()["P"][0] @ np.arange(5)).tolist(), abs=1e-12)


def test_a_fifth_column_may_be_the_cost_itself_or_nothing() -> None:
    def costs(fifth) -> float:
        env = SimpleNamespace(P=[[[(0.5, 0, 0.0, False, fifth), (0.5, 0, 0.0, True)]]], isd=np.ones(1))
        cmdp = from_gymnasium(env, 1, told_cost, 3.0).cmdp
        return cmdp.units.episode_costs(tc.evaluate(tc.uniform_policy(cmdp.layout), cmdp).violations).item()

    assert [costs(fifth) for fifth in (4.0, {"cost": 4.0}, {}, None)] == [2.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("words", "table", "options"),
    [
        (r"P lists \(1.0, 0, 0.0, False, \{\}, 1\) at state 0, action 0", {0: {0: [(1.0, 0, 0.0, False, {}, 1)]}}, {}),
        (r"P lists \(1.0, 0, 0.0\) at state 0", {0: {0: [(1.0, 0, 0.0)]}}, {}),
        ("next state below 1", {0: {0: [(1.0, 1, 0.0, False)]}}, {}),
        ("P lists .*'much'", {0: {0: [(1.0, 0, "much", False)]}}, {}),
        ("P lists .*nan", {0: {0: [(1.0, 0, np.nan, False)]}}, {}),
        ("P does not sum to one at state 0, action 0", {0: {0: [(0.9, 0, 0.0, False)]}}, {}),
        ("P has a negative probability", {0: {0: [(1.5, 0, 0.0, False), (-0.5, 0, 0.0, True)]}}, {}),
        (r"P has the states \[0, 2\]; they must be the numbers from 0 to 1", {0: {}, 2: {}}, {}),
        (r"P\[0\] is \{\}", {0: {}}, {}),
        (r"P\[0\] is \{0: \[\]\}", {0: {0: []}}, {}),
        ("initial_state_distrib is .*a distribution over 1 states", {0: {0: [(1.0, 0, 0.0, False)]}}, {"isd": [0.5, 0.5]}),
        ("initial_state_distrib is .*a distribution over 1 states", {0: {0: [(1.0, 0, 0.0, False)]}}, {"isd": [0.0]}),
        ("does not say where it starts", {0: {0: [(1.0, 0, 0.0, False)]}}, {"isd": None}),
        ("cost is 3; it must be a function", {0: {0: [(1.0, 0, 0.0, False)]}}, {"cost": 3}),
        ("the cost of Move.* is nan", {0: {0: [(1.0, 0, 0.0, False)]}}, {"cost": lambda move: np.nan}),
        ("the cost of Move.* is 'x'", {0: {0: [(1.0, 0, 0.0, False)]}}, {"cost": [lambda move: "x"]}),
    ],
)
def test_damaged_tables_of_gymnasium_get_a_sentence(words, table, options) -> None:
    env = SimpleNamespace(P=table, isd=options.get("isd", [1.0]))
    with pytest.raises(tc.InvalidInput, match=words):
        from_gymnasium(env, 2, options.get("cost", ()))
