"""What a learner is told: tied layers, known rewards, known costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hedge import interrupt
from helpers import NEEDED

import torchcmdp as tc
from torchcmdp.learners import LEARNERS

PROBLEM = tc.problems.make("alwayssafe/simple", horizon=4, budget=2.0)
CMDP = PROBLEM.cmdp


@pytest.mark.parametrize("key", LEARNERS)
def test_counts_of_tied_layers_are_sums_over_them(key: str) -> None:
    env = PROBLEM.simulator(2)
    learner = LEARNERS[key].for_env(env, horizon=20, tied_layers=True, **NEEDED.get(key, {}))
    seen = torch.zeros_like(learner.visits)
    for _ in range(6):
        trajectory = env.rollout(learner.policy)
        own = replace(trajectory, costs=trajectory.costs[..., : learner.constraints])
        seen = seen + learner.visited(own)[0]
        learner.update(own)
    ties, last = CMDP.origin.ties, CMDP.layout.layers - 1
    for k, x in (ties >= 0).nonzero().tolist():
        alike = [(j, y) for j, y in (ties == ties[k, x]).nonzero().tolist() if j < last or k == last]
        assert torch.equal(learner.visits[:, k, x], sum(seen[:, j, y] for j, y in alike))
    assert torch.equal(learner.transition_visits.sum(-1), learner.visits) and "tied_layers" in learner.config()
    if hasattr(learner, "reward_mean"):  # feedback without noise: every mean is the truth, in all layers
        met = learner.visits > 0
        torch.testing.assert_close(learner.reward_mean[met], CMDP.rewards.expand_as(met)[met])
    if hasattr(learner, "cost_estimate") and learner.constraints:
        met = (learner.visits > 0).unsqueeze(1)
        torch.testing.assert_close(learner.cost_estimate[met], CMDP.costs.expand(2, -1, -1, -1, -1)[met])


@pytest.mark.parametrize("key", LEARNERS)
def test_what_is_known_takes_the_place_of_estimates_or_is_refused(key: str) -> None:
    kind = LEARNERS[key]
    for name, value in (("known_rewards", CMDP.rewards), ("known_costs", CMDP.costs)):
        if name not in kind.uses:
            with pytest.raises(tc.InvalidInput, match=f"{name} is given, for which"):
                kind(CMDP.layout, 1, 10, **NEEDED.get(key, {}), **{name: value})
            continue
        env = PROBLEM.simulator(2)
        learner = kind.for_env(env, horizon=20, **NEEDED.get(key, {}), **{name: value})
        tc.run(learner, env, 5, progress=False)
        assert name in learner.config()
        if key in ("opt-cmdp", "greedy"):
            rewards, safe_set = learner.program()
            found = rewards if name == "known_rewards" else safe_set.costs
            assert torch.equal(found[0], value)
        elif key == "wc-ops" and name == "known_costs":
            assert torch.equal(learner.safe_set().costs[0], value)
        elif key in ("wc-ops", "uob-reps"):
            loss = learner.observe(env.rollout(learner.policy)).loss[0]
            assert torch.equal(loss, (1 - value) * CMDP.layout.pair_mask())


def told() -> tuple[tc.OptCMDP, tc.Simulator]:
    env = PROBLEM.simulator(2)
    return tc.OptCMDP.for_env(env, horizon=8, tied_layers=True, known_costs=CMDP.costs), env


def test_torch_plays_what_kernels_do_not_know() -> None:
    with pytest.raises(tc.InvalidInput, match="has tied layers, known rewards or known costs, of which kernels know nothing"):
        tc.run(*told(), 2, progress=False, engine="compiled")


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path) -> None:
    whole = tc.run(*told(), 8, progress=False)
    learner, env = told()
    update = learner.update

    def interrupted(trajectory: tc.Trajectory) -> None:
        update(trajectory)
        if int(learner.episode) == 5:
            interrupt()

    learner.update = interrupted
    assert not tc.run(learner, env, 8, tmp_path, 1, progress=False, images=False).completed
    resumed = tc.run(*told(), 8, tmp_path, 1, progress=False, images=False)
    assert torch.equal(resumed.regret[:, -1], whole.regret[:, -1]) and torch.equal(resumed.violation[:, -1], whole.violation[:, -1])


@pytest.mark.parametrize("name", ["known_costs", "known_rewards"])
def test_what_is_known_is_named_where_a_folder_holds_something_else(tmp_path, name) -> None:
    def play(factor: float) -> None:
        env, value = PROBLEM.simulator(1), {"known_costs": CMDP.costs, "known_rewards": CMDP.rewards}[name]
        learner = tc.OptCMDP.for_env(env, horizon=2, **{name: factor * value})
        tc.run(learner, env, 2, tmp_path, progress=False, images=False)

    play(1.0)
    with pytest.raises(tc.TorchCMDPError, match=name) as refused:
        play(0.5)
    assert not {"cost_low", "reward_high"} & set(str(refused.value).replace(".", " ").split())


def test_mistakes_get_a_sentence() -> None:
    made = tc.random_cmdp((1, 2, 1), actions=2, constraints=1, seed=0)
    env = tc.Simulator(made, made.rewards, made.costs)
    for words, call in {
        "not unrolled from stationary": lambda: tc.WCOPS.for_env(env, horizon=5, tied_layers=True),
        "must be True in for_env": lambda: tc.WCOPS(CMDP.layout, 1, 5, tied_layers=True),
        "a number twice in layer 1": lambda: tc.WCOPS(CMDP.layout, 1, 5, tied_layers=torch.zeros_like(CMDP.origin.states)),
        "known_rewards goes from -1": lambda: tc.WCOPS(CMDP.layout, 1, 5, known_rewards=-1.0),
        "leave one of them out": lambda: tc.WCOPS(CMDP.layout, 1, 5, known_costs=CMDP.costs, costs=tc.PriorCosts()),
    }.items():
        with pytest.raises(tc.InvalidInput, match=words):
            call()
