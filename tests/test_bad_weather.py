"""Whatever CMDP it meets, a learner keeps playing valid policies with finite numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import NEEDED, SETTINGS, simulator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchcmdp as tc
from torchcmdp.learners import LEARNERS
from torchcmdp.testing import check_policy

EPISODES, RUNS = 50, 2
TRANSITIONS = ("dirichlet", "deterministic", "unreachable")
REWARDS = ("uniform", "zero", "one", "equal")
COSTS = ("uniform", "plus one", "minus one", "zero", "duplicated")


def one_hot(layout: tc.Layout, index: Tensor) -> Tensor:
    """Transitions that lead from pair (x, a) of layer k to successor `index[k, x, a]`, taken modulo the next width."""
    target = index % layout.next_widths().to(torch.int64)
    return torch.nn.functional.one_hot(target, layout.width).to(torch.float64) * layout.transition_mask()


def make(
    widths: tuple[int, ...] = (1, 3, 2, 1),
    actions: int = 2,
    constraints: int = 2,
    transitions: str = "dirichlet",
    rewards: str = "uniform",
    costs: str = "uniform",
    seed: int = 0,
) -> tc.LayeredCMDP:
    """A CMDP of one of the odd kinds."""
    plain = tc.random_cmdp(widths, actions, constraints, seed, feasibility="any")
    layout, real = plain.layout, plain.layout.pair_mask()
    index = torch.randint(0, 4, layout.pair_shape, generator=torch.Generator().manual_seed(seed))
    # "unreachable": every pair leads to state 0 of the next layer, the others are never seen
    kernel = plain.transitions if transitions == "dirichlet" else one_hot(layout, index * (transitions == "deterministic"))
    all_rewards = {
        "uniform": plain.rewards,
        "zero": torch.zeros_like(plain.rewards),
        "one": torch.ones_like(plain.rewards),
        "equal": torch.full_like(plain.rewards, 0.3),
    }
    all_costs = {
        "uniform": plain.costs,
        "plus one": torch.ones_like(plain.costs),
        "minus one": -torch.ones_like(plain.costs),
        "zero": torch.zeros_like(plain.costs),
        "duplicated": plain.costs[:1].expand_as(plain.costs),
    }
    return tc.LayeredCMDP(layout, kernel, all_rewards[rewards] * real, all_costs[costs] * real)


NAMED = {
    "widths of one": make(widths=(1, 1, 1, 1)),
    "one step": make(widths=(1, 1)),
    "one action": make(actions=1),
    "no constraints": make(constraints=0),
    "dozens of constraints": make(constraints=36),
    "deterministic": make(transitions="deterministic"),
    "unreachable states": make(transitions="unreachable"),
    "equal rewards": make(rewards="equal"),
    "no safe policy": make(costs="plus one"),
    "everything safe": make(costs="minus one"),
    "repeated constraints": make(constraints=5, costs="duplicated"),
}


@st.composite
def cmdps(draw: st.DrawFn) -> tc.LayeredCMDP:
    """Small CMDPs of every odd kind: inner widths from 1, actions from 1, constraints from 0 to dozens."""
    return make(
        (1, *draw(st.lists(st.integers(1, 4), max_size=3)), 1),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([0, 1, 2, 24])),
        draw(st.sampled_from(TRANSITIONS)),
        draw(st.sampled_from(REWARDS)),
        draw(st.sampled_from(COSTS)),
        draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("key", LEARNERS)
def test_every_learner_survives_every_named_kind(key: str, kind: str) -> None:
    survive(key, NAMED[kind], SETTINGS[key])


@pytest.mark.parametrize("key", LEARNERS)
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(cmdp=cmdps(), small=st.booleans())
def test_every_learner_survives_every_cmdp(key: str, small: bool, cmdp: tc.LayeredCMDP) -> None:
    """With the settings that the learner comes with, and with small confidence widths, where constraints bind early."""
    survive(key, cmdp, SETTINGS[key] if small else NEEDED.get(key, {}))


def survive(key: str, cmdp: tc.LayeredCMDP, options: dict[str, Any]) -> None:
    """Play some episodes, and look at every number."""
    learner, env = LEARNERS[key](cmdp.layout, cmdp.constraints, EPISODES, runs=RUNS, **options), simulator(cmdp, RUNS)
    tracker = tc.Tracker(env)
    for _ in range(EPISODES):
        policy = learner.policy
        check_policy(policy, cmdp.layout, RUNS, tolerance=1e-9)
        trajectory = env.rollout(policy)
        tracker.update(policy, trajectory)
        learner.update(trajectory)
        assert all(value.isfinite().all() for value in learner.diagnostics().values())
    check_policy(learner.policy, cmdp.layout, RUNS, tolerance=1e-9)
    assert all(value.isfinite().all() for value in learner.state_dict().values())
    tracker.record()
    assert tracker.violation.isfinite().all() and tracker.positive_violation.isfinite().all()
    assert (tracker.regret.isfinite() == tracker.feasible[:, None]).all()
    assert learner.diagnostics().get("Solver/residual", torch.zeros(1)).max() < 1e-6


@pytest.mark.parametrize("key", LEARNERS)
@pytest.mark.parametrize("cost", [1.0, -1.0])
def test_costs_at_either_end(key: str, cost: float) -> None:
    """All +1: nothing is safe, and what was violated is counted in full. All -1: everything is safe, and nothing was."""
    constraints = 30
    plain = tc.random_cmdp((1, 3, 2, 1), 2, constraints, seed=1, feasibility="any")
    costs = torch.full_like(plain.costs, cost) * plain.layout.pair_mask()
    cmdp = tc.LayeredCMDP(plain.layout, plain.transitions, plain.rewards, costs)
    learner, env = LEARNERS[key](cmdp.layout, constraints, EPISODES, runs=RUNS, **SETTINGS[key]), simulator(cmdp, RUNS)
    result = tc.run(learner, env, EPISODES, progress=False)
    assert result.violation[:, -1].tolist() == pytest.approx([cost * 3 * EPISODES] * RUNS)
    assert result.positive_violation[:, -1].tolist() == pytest.approx([max(cost, 0) * 3 * EPISODES] * RUNS)
    assert result.regret.isfinite().all() == (cost < 0)
    check_policy(learner.policy, cmdp.layout, RUNS, tolerance=1e-9)
