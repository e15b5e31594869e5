"""Tabular Gymnasium environments as layered CMDPs: the same returns and costs as the real ones, in other units."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from torchcmdp import InvalidInput, Simulator, pair_occupancy_of, safe_optimum, uniform_policy
from torchcmdp.adapters.tabular import ImportedCMDP, Move, broke_a_rule, fell_in_a_hole, fell_off_the_cliff, from_gymnasium
from torchcmdp.occupancy import expected_value
from torchcmdp.processes import Bernoulli

Z_999 = 3.2905  # 99.9% two-sided


def predicted(imported: ImportedCMDP, policy: torch.Tensor) -> tuple[float, list[float]]:
    """The environment's expected return and costs of a policy, according to the CMDP."""
    occupancy = pair_occupancy_of(policy, imported.cmdp.transitions, imported.cmdp.layout)
    value, costs = expected_value(imported.cmdp.rewards, occupancy), expected_value(imported.cmdp.costs, occupancy)
    return float(imported.environment_return(value)), imported.environment_costs(costs).tolist()


def test_frozen_lake_matches_the_real_one(random_policy):
    horizon, episodes = 25, 20_000
    env = gym.make("FrozenLake-v1").unwrapped
    imported = from_gymnasium(env, horizon, fell_in_a_hole, 0.2)
    policy = random_policy(imported.cmdp.layout, seed=4)
    table = [{int(s): policy[k, x].cumsum(0).numpy() for x, s in enumerate(row) if s >= 0} for k, row in enumerate(imported.states)]
    rng, returns, falls = np.random.default_rng(0), [], []
    state, _ = env.reset(seed=0)
    for _ in range(episodes):
        total, fell = 0.0, 0.0
        for k in range(horizon):
            state, reward, terminated, _, _ = env.step(int(np.searchsorted(table[k][state], rng.random())))
            total += reward
            if terminated:
                fell = float(env.desc.flat[state] == b"H")
                break
        returns.append(total)
        falls.append(fell)
        state, _ = env.reset()
    value, costs = predicted(imported, policy)
    assert 0 < value < 1 and 0 < costs[0] < 1
    for samples, expected in ((returns, value), (falls, costs[0])):
        assert abs(np.mean(samples) - expected) <= Z_999 * np.std(samples) / episodes**0.5


CASES = [("FrozenLake-v1", fell_in_a_hole, None), ("CliffWalking-v1", fell_off_the_cliff, None), ("Taxi-v4", broke_a_rule, 1)]


@pytest.mark.parametrize(("name", "cost", "start"), [*CASES, ("Taxi-v4", broke_a_rule, None)])
def test_the_uniform_policy_earns_what_the_table_says(name, cost, start):
    horizon = 8
    env = gym.make(name).unwrapped
    imported = from_gymnasium(env, horizon, cost, 0.5, start=start)
    initial = env.initial_state_distrib if start is None else np.eye(len(env.P))[start]
    mass, expected, costs = dict(enumerate(initial)), 0.0, 0.0
    for _ in range(horizon):  # forward through the environment's own table; what has terminated leaves
        later: dict[int, float] = defaultdict(float)
        for state, probability in mass.items():
            for action, outcomes in env.P[state].items():
                for p, next_state, reward, terminated in outcomes:
                    weight = probability * p / len(env.P[state])
                    expected += weight * reward
                    costs += weight * cost(Move(state, action, next_state, reward, terminated))
                    if not terminated:
                        later[next_state] += weight
        mass = later
    value, sums = predicted(imported, uniform_policy(imported.cmdp.layout))
    assert value == pytest.approx(expected) and sums == pytest.approx([costs])


def test_only_reachable_states_are_kept():
    frozen = from_gymnasium("FrozenLake-v1", 8, fell_in_a_hole)
    assert frozen.cmdp.layout.widths == (1, 3, 6, 9, 11, 12, 12, 12, 1)
    assert frozen.states[0].tolist() == [0] + [-1] * 11 and frozen.states[1, :3].tolist() == [0, 1, 4]
    assert frozen.states[-1].tolist() == [0, 1, 2, 3, 4, 6, 8, 9, 10, 13, 14, 16] and frozen.ended == 16
    taxi = from_gymnasium("Taxi-v4", 20, broke_a_rule, start=1)
    assert max(taxi.cmdp.layout.widths) == 101  # 25 squares with the passenger at each of three corners or aboard, and the end
    drawn = from_gymnasium("Taxi-v4", 2)
    assert 300 in drawn.cmdp.layout.widths and drawn.states[0, 0] == drawn.waiting == 501


def test_a_start_may_be_a_distribution():
    chances = np.zeros(16)
    chances[[0, 6]] = 0.25, 0.75
    frozen = from_gymnasium("FrozenLake-v1", 3, fell_in_a_hole, 3.0, start=chances)
    assert frozen.states[0, 0] == frozen.waiting and frozen.states[1, :2].tolist() == [0, 6]
    drawn = frozen.cmdp.layout.dense(frozen.cmdp.transitions)[0, 0, 0]
    assert drawn[:2].tolist() == [0.25, 0.75]


def test_the_end_is_absorbing_and_free():
    imported = from_gymnasium("FrozenLake-v1", 10, fell_in_a_hole, 0.5)
    transitions = imported.cmdp.layout.dense(imported.cmdp.transitions)
    for k in range(5, 10):
        place = int((imported.states[k] == imported.ended).nonzero())
        successor = int((imported.states[k + 1] == imported.ended).nonzero()) if k < 9 else 0
        assert (transitions[k, place, :, successor] == 1).all()
        assert (imported.cmdp.rewards[k, place] == 0).all() and torch.allclose(
            imported.cmdp.costs[0, k, place], torch.tensor(-0.05).double()
        )


@pytest.mark.parametrize(("name", "cost", "start"), CASES)
def test_the_scaling_is_recorded(name, cost, start):
    imported = from_gymnasium(name, 14, cost, 0.3, start=start)
    rewards = {"FrozenLake-v1": (0, 1), "CliffWalking-v1": (-100, 0), "Taxi-v4": (-10, 20)}
    assert (imported.low, imported.high) == rewards[name]
    assert imported.budgets.tolist() == [0.3] and imported.scales.tolist() == [1.0]
    if name == "CliffWalking-v1":  # thirteen steps along the edge, and one at the goal
        assert float(imported.environment_return(safe_optimum(imported.cmdp).value)) == pytest.approx(-13)


def test_a_budget_is_kept_just_when_the_constraint_is():
    for budget in (0.02, 0.05):
        imported = from_gymnasium("FrozenLake-v1", 20, fell_in_a_hole, budget)
        optimum = safe_optimum(imported.cmdp)
        falls = imported.environment_costs(expected_value(imported.cmdp.costs, optimum.occupancy.sum(-1)))
        assert falls.tolist() == pytest.approx([budget])  # the best safe policy uses it up


def test_large_costs_are_scaled_and_several_have_budgets_of_their_own():
    imported = from_gymnasium("CliffWalking-v1", 5, [fell_off_the_cliff, lambda move: -move.reward], [0.25, 40.0])
    assert imported.scales.tolist() == pytest.approx([1.0, 92.0]) and imported.cmdp.costs.abs().max() <= 1
    steps = uniform_policy(imported.cmdp.layout)
    value, costs = predicted(imported, steps)
    assert costs[1] == pytest.approx(-value)


def test_feedback_has_little_noise_and_the_right_mean():
    imported = from_gymnasium("FrozenLake-v1", 10, fell_in_a_hole, 0.5)
    process = imported.cost_process()
    assert process.low == pytest.approx(-0.05)
    env = Simulator(imported.cmdp, Bernoulli(imported.cmdp.rewards), process, runs=2_000, seed=0)
    policy = uniform_policy(imported.cmdp.layout)
    sums = env.rollout(policy).costs.sum(1)
    expected = expected_value(imported.cmdp.costs, pair_occupancy_of(policy, imported.cmdp.transitions, imported.cmdp.layout))
    assert (sums.mean(0) - expected).abs() <= Z_999 * sums.std(0) / len(sums) ** 0.5


def test_type_and_no_costs():
    imported = from_gymnasium("FrozenLake-v1", 4, dtype=torch.float32)
    assert imported.cmdp.dtype == torch.float32 and imported.cmdp.constraints == 0
    assert imported.cost_process().values.shape[0] == 0


def test_mistakes_get_a_sentence():
    nowhere = SimpleNamespace(unwrapped=SimpleNamespace(P=gym.make("FrozenLake-v1").unwrapped.P))
    for words, call in {
        "CartPoleEnv has no table P": lambda: from_gymnasium("CartPole-v1", 5),
        "budget is -1": lambda: from_gymnasium("FrozenLake-v1", 5, fell_in_a_hole, -1),
        "one for each of 1 costs": lambda: from_gymnasium("FrozenLake-v1", 5, fell_in_a_hole, [1, 2]),
        "start is 16": lambda: from_gymnasium("FrozenLake-v1", 5, start=16),
        "horizon is 0": lambda: from_gymnasium("FrozenLake-v1", 0),
        "pass start=": lambda: from_gymnasium(nowhere, 5),
    }.items():
        with pytest.raises(InvalidInput, match=words):
            call()
