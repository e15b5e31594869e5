"""The same problem on a layout with and without successor lists; and what holds on layouts with lists and masks everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torchcmdp as tc
from tests.helpers import SETTINGS, simulator
from tests.sparse import on_full, random_on, sparse_layout, spelled_out
from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.confidence import CONFIDENCE_KINDS, Intervals, confidence_set, lower_occupancy, upper_occupancy
from torchcmdp.kernels.engine import using
from torchcmdp.learners import LEARNERS
from torchcmdp.occupancy import flow_residual, occupancy_of, policy_of, transitions_of, uniform_occupancy, uniform_policy
from torchcmdp.planning import evaluate, rho, safe_optimum, safest_policy, slater_gap, unconstrained_optimum
from torchcmdp.safe_set import SafeSet

EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
NEWTONS = {"compiled": tc.Newton(), "torch": tc.Newton(backend="torch")}


def counts(cmdp: LayeredCMDP, runs: int = 2) -> tuple[Tensor, Tensor]:
    """Visits that some episodes with the uniform policy leave behind."""
    learner = tc.WCOPS(cmdp.layout, cmdp.constraints, horizon=100, runs=runs)
    env = simulator(cmdp, runs=runs, seed=5)
    for _ in range(30):
        learner.count_visits(*learner.visited(env.rollout(uniform_policy(cmdp.layout))))
    return learner.visits, learner.transition_visits


def spelled(cmdp: LayeredCMDP) -> LayeredCMDP:
    return LayeredCMDP(spelled_out(cmdp.layout), cmdp.transitions, cmdp.rewards, cmdp.costs)


def full_set(cmdp: LayeredCMDP, kind: str = "entrywise") -> SafeSet:
    kernels = confidence_set(kind, *counts(cmdp), cmdp.layout, horizon=100, delta=0.1, radius_scale=0.1)
    return SafeSet(cmdp.layout, kernels.lower, kernels.upper, cmdp.costs)


def target(cmdp: LayeredCMDP, seed: int = 3) -> tuple[Tensor, Tensor]:
    """A loss and a reference that is no occupancy."""
    generator = torch.Generator().manual_seed(seed)
    loss = torch.rand(2, *cmdp.layout.pair_shape, generator=generator, dtype=torch.float64) * cmdp.layout.pair_mask()
    return loss, uniform_occupancy(cmdp.layout)


def test_lists_of_everything_change_no_occupancy_and_no_plan() -> None:
    here = tc.random_cmdp((1, 3, 4, 3, 1), 3, 2, seed=1)
    there = spelled(here)
    policy = tc.random_cmdp((1, 3, 4, 3, 1), 3, 2, seed=2).rewards
    policy = policy / policy.sum(-1, keepdim=True).clamp_min(1e-9)
    one, other = occupancy_of(policy, here.transitions), occupancy_of(policy, there.transitions, there.layout)
    torch.testing.assert_close(other, one, **EXACT)
    torch.testing.assert_close(uniform_occupancy(there.layout), uniform_occupancy(here.layout), **EXACT)
    for function in (safe_optimum, unconstrained_optimum):
        a, b = function(here), function(there)
        torch.testing.assert_close(b.value, a.value, **EXACT)
        torch.testing.assert_close(b.occupancy, a.occupancy, **EXACT)
    for measure in (slater_gap, rho, safest_policy):
        torch.testing.assert_close(measure(there), measure(here), **EXACT)


@pytest.mark.parametrize("solver", ["compiled", "torch"])
def test_lists_of_everything_change_no_projection(solver: str) -> None:
    here = tc.random_cmdp((1, 3, 4, 3, 1), 3, 2, seed=1)
    there = spelled(here)
    a, b = (tc.project(*target(cmdp), full_set(cmdp), 0.5, solver=NEWTONS[solver]) for cmdp in (here, there))
    assert a.status_names == b.status_names
    torch.testing.assert_close(b.occupancy, a.occupancy, **EXACT)
    torch.testing.assert_close(b.multipliers, a.multipliers, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ["compiled", "torch"])
def test_lists_of_everything_change_no_run(engine: str) -> None:
    here = tc.random_cmdp((1, 3, 4, 3, 1), 3, 2, seed=1)
    learners = []
    for cmdp in (here, spelled(here)):
        env = simulator(cmdp, runs=2)
        learners.append(tc.WCOPS.for_env(env, horizon=100, **SETTINGS["wc-ops"]))
        with using(engine):
            result = tc.run(learners[-1], env, episodes=25, log_every=25)
        learners[-1].final = result.regret
    torch.testing.assert_close(learners[1].occupancy, learners[0].occupancy, **EXACT)
    torch.testing.assert_close(learners[1].final, learners[0].final, **EXACT)


@pytest.mark.parametrize("kind", CONFIDENCE_KINDS)
def test_optimism_over_lists_is_that_over_intervals_that_are_closed_elsewhere(kind: str) -> None:
    cmdp = random_on(sparse_layout())
    layout, full = cmdp.layout, cmdp.layout.full
    kernels = confidence_set(kind, *counts(cmdp), layout, horizon=100, delta=0.1, radius_scale=0.2)
    closed = Intervals(layout.dense(kernels.lower), layout.dense(kernels.upper), full)
    policy = uniform_policy(layout).expand(2, -1, -1, -1)
    values = torch.rand(2, layout.layers, layout.width, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    boxed = Intervals(kernels.lower, kernels.upper, layout)
    for maximise in (True, False):
        torch.testing.assert_close(
            boxed.optimistic(values, maximise=maximise), closed.optimistic(values, maximise=maximise), **EXACT
        )
        each = [kernels.optimistic(values[:, k], maximise=maximise, layer=k) for k in range(layout.layers)]
        torch.testing.assert_close(kernels.optimistic(values, maximise=maximise), torch.stack(each, 1), **EXACT)
    torch.testing.assert_close(upper_occupancy(boxed, policy, layout), upper_occupancy(closed, policy, full), **EXACT)
    torch.testing.assert_close(lower_occupancy(boxed, policy, layout), lower_occupancy(closed, policy, full), **EXACT)
    for bound in (kernels.lower, kernels.upper):
        assert (bound[:, ~layout.transition_mask()] == 0).all()
    assert (kernels.optimistic(values)[:, ~layout.pair_mask()] == 0).all()


def test_an_unvisited_pair_is_uniform_over_its_own_successors_and_radii_count_them() -> None:
    layout = sparse_layout()
    nothing = torch.zeros(layout.pair_shape, dtype=torch.float64), torch.zeros(layout.transition_shape, dtype=torch.float64)
    ball = confidence_set("l1", *nothing, layout, horizon=100, delta=0.1)
    assert torch.equal(ball.center, layout.uniform_transitions())  # type: ignore[union-attr]
    once = layout.pair_mask().double(), layout.uniform_transitions()
    ball = confidence_set("l1", *once, layout, horizon=100, delta=0.1)
    ratio = ball.radius[layout.pair_mask()] ** 2 / layout.next_widths()[layout.pair_mask()]  # type: ignore[union-attr]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


def test_an_occupancy_is_conserved_and_gives_back_its_policy_and_kernel() -> None:
    cmdp = random_on(sparse_layout())
    layout = cmdp.layout
    occupancy = occupancy_of(uniform_policy(layout), cmdp.transitions, layout)
    assert flow_residual(occupancy, layout) < 1e-15
    assert flow_residual(uniform_occupancy(layout), layout) < 1e-15
    reached = occupancy.sum(-1) > 0
    torch.testing.assert_close(policy_of(occupancy, layout), uniform_policy(layout))
    torch.testing.assert_close(transitions_of(occupancy, layout)[reached], cmdp.transitions[reached])
    torch.testing.assert_close(layout.dense(occupancy), occupancy_of(uniform_policy(layout), layout.dense(cmdp.transitions)))
    with pytest.raises(tc.InvalidInput, match="pass the layout"):
        occupancy_of(uniform_policy(layout), cmdp.transitions)


@pytest.mark.parametrize("solver", ["compiled", "torch"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_projection_over_lists_is_that_onto_intervals_that_are_closed_elsewhere(solver: str, masked: bool) -> None:
    cmdp = random_on(sparse_layout(masked=masked))
    layout, (loss, reference) = cmdp.layout, target(cmdp)
    safe = full_set(cmdp)
    own = tc.project(loss, reference, safe, 0.5, solver=NEWTONS[solver])
    closed = SafeSet(layout.full, layout.dense(safe.lower), layout.dense(safe.upper), safe.costs)
    other = tc.project(loss, layout.dense(reference), closed, 0.5, solver=NEWTONS[solver])
    assert own.status_names == other.status_names == ["solved"] * 2
    torch.testing.assert_close(layout.dense(own.occupancy), other.occupancy, rtol=0, atol=1e-9)
    assert (own.occupancy[:, ~layout.transition_mask()] == 0).all()
    assert (own.log_occupancy[:, ~layout.transition_mask()] == -torch.inf).all()
    assert flow_residual(own.occupancy, layout).max() < 1e-9


def test_the_two_solvers_and_cvxpy_agree_over_lists() -> None:
    cmdp = random_on(sparse_layout((1, 3, 3, 1), 2, most=2))
    loss, reference = target(cmdp)
    found = [tc.project(loss, reference, full_set(cmdp), 0.5, solver=solver).occupancy for solver in (*NEWTONS.values(), "cvxpy")]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("solver", ["compiled", "torch"])
def test_derivatives_over_lists_are_those_of_differences(solver: str) -> None:
    cmdp = random_on(sparse_layout((1, 3, 3, 1), 2, most=2), seed=1)
    loss, reference = target(cmdp)
    safe = full_set(cmdp)

    def occupancy(loss: Tensor, costs: Tensor) -> Tensor:
        real = cmdp.layout.pair_mask()
        own = SafeSet(cmdp.layout, safe.lower, safe.upper, costs * real)
        return tc.project(loss * real, reference, own, 0.5, solver=NEWTONS[solver]).occupancy

    inputs = (loss.clone().requires_grad_(), cmdp.costs.clone().requires_grad_())
    assert torch.autograd.gradcheck(occupancy, inputs, eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_plans_over_lists_are_those_without(masked: bool) -> None:
    for seed in range(4):
        cmdp = random_on(sparse_layout(seed=seed, masked=masked), seed=seed)
        other = on_full(cmdp)
        for function in (safe_optimum, unconstrained_optimum):
            here, there = function(cmdp), function(other)
            torch.testing.assert_close(here.value, there.value, rtol=0, atol=1e-9)
            assert (here.occupancy[~cmdp.layout.transition_mask()] == 0).all()
            assert evaluate(policy_of(here.occupancy, cmdp.layout), cmdp).value == pytest.approx(float(there.value), abs=1e-9)
        for measure in (slater_gap, rho, safest_policy):
            torch.testing.assert_close(measure(cmdp), measure(other), rtol=0, atol=1e-9)


def test_a_masked_action_is_one_that_nobody_wants() -> None:
    everything = random_on(sparse_layout(masked=False), constraints=0)
    whole = everything.layout
    mask = torch.rand(whole.pair_shape, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[0], mask[..., 0] = True, True
    lists = torch.where(mask[..., None], whole.successors(), -1)
    unlisted = [y for k, n in enumerate(whole.widths[1:]) for y in range(n) if not (lists[k] == y).any()]
    assert not unlisted  # or the draw above needs another seed
    layout = tc.Layout(whole.widths, whole.actions, lists, mask)
    real = layout.pair_mask()
    cmdp = LayeredCMDP(layout, everything.transitions * real[..., None], everything.rewards * real, everything.costs * real)
    worthless = LayeredCMDP(whole, everything.transitions, torch.where(real, everything.rewards, 0.0), everything.costs)
    found = unconstrained_optimum(cmdp)
    assert (policy_of(found.occupancy, layout)[~real] == 0).all()
    least = unconstrained_optimum(LayeredCMDP(whole, everything.transitions, everything.rewards, everything.costs)).value
    assert float(unconstrained_optimum(worthless).value) - 1e-12 <= float(least)
    assert float(found.value) <= float(least) + 1e-12


def test_what_the_only_action_does_is_what_is_planned() -> None:
    """One action everywhere, of reward 1/4 and cost 1/4 or -1/4: the others, masked, would have better costs or rewards."""
    layout = tc.Layout((1, 2, 1), 3, None, (torch.arange(3) == 1).expand(2, 2, 3))
    quarter = 0.25 * layout.pair_mask().double()
    unsafe, safe = (LayeredCMDP(layout, layout.uniform_transitions(), quarter, sign * quarter[None]) for sign in (1, -1))
    assert not safe_optimum(unsafe).feasible and float(slater_gap(unsafe)) == pytest.approx(-0.5)
    assert float(safe_optimum(safe).value) == pytest.approx(0.5) and float(rho(safe)) == pytest.approx(0.25)


def test_the_same_episodes_are_played_on_both_layouts() -> None:
    layout = sparse_layout()
    cmdp = random_on(layout)
    policy = uniform_policy(layout)
    for engine in ("compiled", "torch"):
        with using(engine):
            here, there = (simulator(each, runs=5, seed=3).rollout(policy) for each in (cmdp, on_full(cmdp)))
        for name in ("states", "actions", "next_states", "rewards", "costs"):
            assert torch.equal(getattr(here, name), getattr(there, name)), (engine, name)


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("masked", [False, True])
def test_every_learner_plays_on_lists_and_masks_alike_in_torch_and_compiled(name: str, masked: bool) -> None:
    cmdp = random_on(sparse_layout(masked=masked))
    layout = cmdp.layout
    states = []
    for engine in ("compiled", "torch"):
        env = simulator(cmdp, runs=2, seed=1)
        learner = LEARNERS[name].for_env(env, horizon=100, **SETTINGS[name])
        with using("torch" if engine == "torch" else "auto"):  # not every learner has kernels
            result = tc.run(learner, env, episodes=12, log_every=6)
        states.append({**learner.state_dict(), "policy": learner.policy, "regret": result.regret})
        assert (learner.policy[:, ~layout.pair_mask()] == 0).all()
        torch.testing.assert_close(learner.policy.sum(-1), layout.state_mask().double().expand(2, -1, -1))
        for key, tensor in states[-1].items():
            if tuple(tensor.shape[-4:]) == layout.transition_shape and key != "log_occupancy":
                assert (tensor[..., ~layout.transition_mask()] == 0).all(), key
            elif tuple(tensor.shape[-3:]) == layout.pair_shape:
                assert (tensor[..., ~layout.pair_mask()] == 0).all(), key
        assert learner.transition_visits.sum() == 2 * 12 * layout.layers
    for key in states[0]:
        torch.testing.assert_close(
            states[1][key], states[0][key], rtol=1e-9, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_a_run_on_lists_resumes_and_knows_another_layout(tmp_path: Any) -> None:
    def make(cmdp: LayeredCMDP) -> tuple[tc.Learner, tc.Simulator]:
        env = simulator(cmdp, runs=2)
        return tc.WCOPS.for_env(env, horizon=100, **SETTINGS["wc-ops"]), env

    cmdp, options = random_on(sparse_layout()), {"episodes": 8, "log_every": 4, "checkpoint_episodes": 2}
    whole = tc.run(*make(cmdp), **options)
    learner, env = make(cmdp)
    rollout = env.rollout
    env.rollout = lambda policy: rollout(policy) if env.episode < 5 else 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        tc.run(learner, env, **options, logdir=tmp_path)
    with pytest.raises(tc.TorchCMDPError, match="holds a run"):
        tc.run(*make(on_full(cmdp)), **options, logdir=tmp_path)
    again = tc.run(*make(cmdp), **options, logdir=tmp_path)
    torch.testing.assert_close(again.regret, whole.regret, **EXACT)  # the first part was not played in blocks


@pytest.mark.parametrize("engine", ["compiled", "torch"])
def test_a_successor_that_is_not_listed_is_refused(engine: str) -> None:
    cmdp = random_on(sparse_layout(masked=False))
    env = simulator(cmdp)
    learner = tc.WCOPS.for_env(env, horizon=100)
    seen = env.rollout(learner.policy)
    lists = cmdp.layout.successors()[1, seen.states[0, 1], seen.actions[0, 1]].tolist()
    stranger = next(y for y in range(cmdp.layout.widths[2]) if y not in lists)
    seen.next_states[0, 1] = stranger
    with using(engine), pytest.raises(tc.InvalidInput, match="layout does not"):
        learner.update(seen)


def test_the_layer_stays_on_the_lists() -> None:
    cmdp = random_on(sparse_layout())
    layout = cmdp.layout
    layer = tc.nn.SafeOccupancy(layout, cmdp.constraints, transitions=cmdp.transitions, costs=cmdp.costs)
    logits = torch.zeros(layout.pair_shape, dtype=torch.float64, requires_grad=True)
    output = layer(logits=logits)
    (output.policy * cmdp.rewards).sum().backward()
    assert (output.policy[~layout.pair_mask()] == 0).all() and (output.occupancy[~layout.transition_mask()] == 0).all()
    assert logits.grad is not None and logits.grad.isfinite().all() and (logits.grad[~layout.pair_mask()] == 0).all()
    safe = tc.nn.SafeOccupancy(layout, 0, transitions=cmdp.transitions, costs=cmdp.costs[:0])(logits=logits)
    torch.testing.assert_close(safe.policy.detach(), uniform_policy(layout))
