"""WC-OPS against a literal implementation, closed forms, and the promises of a learner: batches, state, devices, gradients."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ADAPTIVE, LAYOUT, SMALL, World, play
from literal_wcops import LiteralWCOPS

import torchcmdp as tc
from torchcmdp.confidence import CONFIDENCE_KINDS
from torchcmdp.errors import InvalidInput
from torchcmdp.layout import Layout
from torchcmdp.learners import WCOPS
from torchcmdp.learners.wcops import default_step
from torchcmdp.occupancy import flow_residual, interval_residual
from torchcmdp.projection import DEFAULT_CAP
from torchcmdp.trajectory import Trajectory


def padded(layers: list[np.ndarray], layout: Layout) -> torch.Tensor:
    out = torch.zeros(layout.transition_shape, dtype=torch.float64)
    for k, q in enumerate(layers):
        out[k, : q.shape[0], :, : q.shape[2]] = torch.from_numpy(q)
    return out


def cropped(q: torch.Tensor, layout: Layout) -> list[np.ndarray]:
    return [q[k, :n, :, :after].numpy().copy() for k, (n, after) in enumerate(zip(layout.widths, layout.widths[1:], strict=False))]


def update_both(learner: WCOPS, literal: LiteralWCOPS, trajectory: Trajectory) -> None:
    learner.update(trajectory)
    states, actions = [*trajectory.states[0].tolist(), 0], trajectory.actions[0].tolist()
    literal.update(states, actions, trajectory.rewards[0].numpy(), trajectory.costs[0].numpy())


def compare_with_literal(
    layout: Layout, m: int, seed: int, settings: dict[str, float], penalty: float, episodes: int
) -> LiteralWCOPS:
    """Drive both with the same trajectories and assert that every occupancy agrees."""
    step = default_step(layout, 100, 0.01)
    settings = {"eta": step, "gamma": step, **settings}
    learner = WCOPS(layout, m, 100, solver=tc.Newton(multiplier_cap=penalty), **settings)
    literal = LiteralWCOPS(layout.widths, layout.actions, m, 100, 0.01, penalty=penalty, **settings)
    world = World(layout, m, seed, [0])
    for t in range(episodes):
        update_both(learner, literal, world.rollout(learner.policy))
        difference = (learner.occupancy[0] - padded(literal.q, layout)).abs().max()
        assert difference < 1e-6, f"episode {t}: occupancies differ by {difference:.1e}"
        assert int(learner.diagnostics()["Solver/elastic"]) == int(literal.elastic_now)
        if literal.elastic_seen:  # from an empty set on the literal solver loses small entries, which later episodes would amplify
            literal.q = cropped(learner.occupancy[0], layout)
    assert literal.polished_seen == episodes
    return literal


@pytest.mark.parametrize("widths", [(1, 2, 3, 1), (1, 3, 2, 4, 1), (1, 4, 1)])
class TestAgainstLiteral:
    def test_with_the_papers_constants(self, widths: tuple[int, ...]) -> None:
        literal = compare_with_literal(Layout(widths, 2), 2, 0, {}, 50.0, 30)
        assert literal.excess_seen == 0

    def test_where_safety_binds(self, widths: tuple[int, ...]) -> None:
        literal = compare_with_literal(Layout(widths, 2), 2, 0, SMALL, 50.0, 30)
        assert literal.binding_seen > 0

    def test_where_gamma_reacts_and_safe_sets_run_empty(self, widths: tuple[int, ...]) -> None:
        literal = compare_with_literal(Layout(widths, 2), 2, 0, ADAPTIVE, 2.0, 30)
        assert literal.binding_seen > 0 and literal.excess_seen > 0 and literal.elastic_seen > 0

    def test_each_episode_where_safe_sets_run_empty_at_the_default_penalty(self, widths: tuple[int, ...]) -> None:
        """One step at a time: at this penalty the literal solver loses entries below 1e-6, and over episodes that would grow."""
        layout = Layout(widths, 2)
        learner = WCOPS(layout, 2, 100, **ADAPTIVE)
        literal = LiteralWCOPS(widths, 2, 2, 100, 0.01, penalty=DEFAULT_CAP, **ADAPTIVE)
        world = World(layout, 2, 0, [0])
        for _ in range(30):
            literal.q = cropped(learner.occupancy[0], layout)
            update_both(learner, literal, world.rollout(learner.policy))
            assert (learner.occupancy[0] - padded(literal.q, layout)).abs().max() < 1e-6
            # the solver's tolerance of 1e-11 on each of two constraints, at the price of the cap
            assert literal.objective(cropped(learner.occupancy[0], layout)) < literal.objective(literal.q) + 1e-9
        assert literal.elastic_seen > 0 and literal.excess_seen > 0

    def test_without_constraints_it_is_uob_reps(self, widths: tuple[int, ...]) -> None:
        compare_with_literal(Layout(widths, 2), 0, 0, SMALL, 50.0, 15)


def bandit_projection(target: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """The KL projection of weights onto {q >= 0, sum q = 1, <costs, q> <= 0}: q ~ target exp(-z costs), by bisection on z."""

    def tilt(z: float) -> np.ndarray:
        logits = np.log(target) - z * costs
        q = np.exp(logits - logits.max())
        return q / q.sum()

    if tilt(0.0) @ costs <= 0:
        return tilt(0.0)
    low, high = 0.0, 50.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if tilt(middle) @ costs > 0 else (low, middle)
    return tilt(high)


def test_single_state_is_a_tilted_softmax_and_ends_near_the_safe_set() -> None:
    layout, means = Layout((1, 1), 3), np.array([0.8, 0.2, -0.6])
    learner = WCOPS(layout, 1, 2000, eta=0.05, gamma=0.02, bonus_scale=0.05)
    rng = np.random.default_rng(0)
    bound = False
    for _ in range(400):
        q = learner.policy[0, 0, 0].numpy()
        a = int(rng.choice(3, p=q / q.sum()))
        zero = torch.zeros(1, 1, dtype=torch.int64)
        reward, cost = float(a != 2), 1.0 if rng.random() < (1 + means[a]) / 2 else -1.0
        feedback = torch.tensor([[reward]], dtype=torch.float64), torch.tensor([[[cost]]], dtype=torch.float64)
        learner.update(Trajectory(zero, zero + a, zero, *feedback))
        target = q * np.exp(-0.05 * np.where(np.arange(3) == a, (1 - reward) / (q[a] + 0.02), 0.0))
        costs = learner.safe_set().costs[0, 0, 0, 0].numpy()
        assert np.allclose(learner.policy[0, 0, 0].numpy(), bandit_projection(target, costs), atol=1e-8)
        bound |= (target / target.sum()) @ costs > 0
    assert bound and learner.policy[0, 0, 0].numpy() @ means < 0.15


def test_single_state_without_constraints_is_exp3_ix() -> None:
    layout, eta, gamma = Layout((1, 1), 3), 0.2, 0.05
    learner = WCOPS(layout, 0, 100, runs=2, eta=eta, gamma=gamma)
    world = World(layout, 0, 3, [0, 1])
    losses = np.zeros((2, 3))
    for _ in range(40):
        expected = np.exp(-eta * losses) / np.exp(-eta * losses).sum(1, keepdims=True)
        assert np.allclose(learner.policy[:, 0, 0].numpy(), expected, atol=1e-8)
        trajectory = world.rollout(learner.policy)
        learner.update(trajectory)
        for j in range(2):
            a = int(trajectory.actions[j, 0])
            losses[j, a] += (1 - float(trajectory.rewards[j, 0])) / (expected[j, a] + gamma)


def constant_costs(trajectory: Trajectory, cost: float) -> Trajectory:
    index = (trajectory.states, trajectory.actions, trajectory.next_states)
    return Trajectory(*index, trajectory.rewards, torch.full_like(trajectory.costs, cost))


def test_gamma_stays_zero_with_the_papers_constants_and_reacts_when_scaled() -> None:
    scales = torch.tensor([1.0, 0.0], dtype=torch.float64)
    learner, world = WCOPS(LAYOUT, 1, 100, runs=2, threshold_scale=scales), World(LAYOUT, 1, 0, [0, 1])
    for _ in range(5):
        learner.update(constant_costs(world.rollout(learner.policy), 1.0))
        assert learner.diagnostics()["Learner/gamma_active"].tolist() == [0.0, 1.0]
    assert learner.diagnostics()["Learner/max_beta"][1] == 1.0


def test_empty_safe_set_is_survived_and_reported() -> None:
    layout = Layout((1, 2, 1), 2)
    learner, world = WCOPS(layout, 1, 100, runs=3, bonus_scale=0.01, radius_scale=0.05), World(layout, 1, 0, [0, 1, 2])
    elastic = torch.zeros(3, dtype=torch.float64)
    for t in range(1, 61):
        learner.update(constant_costs(world.rollout(learner.policy), 0.5))
        elastic += learner.diagnostics()["Solver/elastic"]
        assert torch.allclose(learner.path_violation, torch.full((3, 1), 0.5 * 2 * t, dtype=torch.float64))
        assert torch.allclose(learner.policy.sum(-1), layout.state_mask().to(torch.float64))
    assert (elastic > 20).all() and (learner.diagnostics()["Solver/elastic"] == 1).all()
    safe_set = learner.safe_set()
    violation = (safe_set.costs[:, 0] * learner.occupancy.sum(-1)).sum((-1, -2, -3))
    # the least violation any occupancy can have is L (0.5 - b) with the largest bonus, and the most is 0.5 L
    assert (violation > 0.8).all() and (violation < 1.0).all()


def test_occupancies_stay_in_the_safe_set_and_padding_stays_zero() -> None:
    learner, world = WCOPS(LAYOUT, 2, 100, runs=4, **SMALL), World(LAYOUT, 2, 0, [0, 1, 2, 3])
    mask, pairs = LAYOUT.transition_mask(), LAYOUT.pair_mask()
    for _ in range(12):
        play(learner, world, 1)
        q, safe_set = learner.occupancy, learner.safe_set()
        assert (q[:, ~mask] == 0).all() and (learner.policy[:, ~pairs] == 0).all()
        assert (learner.visits[:, ~pairs] == 0).all() and (learner.transition_visits[:, ~mask] == 0).all()
        assert (learner.cost_estimate[..., ~pairs] == 0).all() and (safe_set.costs[..., ~pairs] == 0).all()
        assert torch.allclose(learner.policy.sum(-1), LAYOUT.state_mask().to(q.dtype))
        assert flow_residual(q).max() < 1e-9 and interval_residual(q, safe_set.lower, safe_set.upper).max() < 1e-9
        violation = (safe_set.costs * q.sum(-1).unsqueeze(1)).sum((-1, -2, -3))
        elastic = learner.diagnostics()["Solver/elastic"] == 1
        assert (violation[~elastic] < 1e-8).all()
        assert learner.cost_estimate.abs().max() <= 1
    assert (learner.visits.sum((-1, -2)) == 12).all() and int(learner.episode) == 12


@pytest.mark.parametrize("confidence", CONFIDENCE_KINDS)
def test_a_run_does_not_depend_on_its_batch(confidence: str) -> None:
    rng = np.random.default_rng(5)
    names = ("eta", "gamma", "bonus_scale", "radius_scale", "threshold_scale", "cap_scale")
    values = {name: torch.tensor(rng.uniform(0.02, 0.2, 16)) for name in names}
    values["threshold_scale"] = values["threshold_scale"] / 100
    together = WCOPS(LAYOUT, 2, 100, runs=16, confidence=confidence, **values)
    play(together, World(LAYOUT, 2, 1, list(range(16))), 8)
    for j in (0, 3, 15):
        alone = WCOPS(LAYOUT, 2, 100, confidence=confidence, **{name: value[j : j + 1] for name, value in values.items()})
        play(alone, World(LAYOUT, 2, 1, [j]), 8)
        assert (alone.occupancy[0] - together.occupancy[j]).abs().max() < 1e-9
        assert torch.equal(alone.visits[0], together.visits[j])


def test_same_trajectories_same_bits() -> None:
    first, second = (WCOPS(LAYOUT, 2, 100, runs=3, **SMALL) for _ in range(2))
    for trajectory in play(first, World(LAYOUT, 2, 0, [0, 1, 2]), 6):
        second.update(trajectory)
        assert second.policy is second.policy  # looking must not change anything
    assert torch.equal(first.log_occupancy, second.log_occupancy) and torch.equal(first.policy, second.policy)


@pytest.mark.parametrize("confidence", CONFIDENCE_KINDS)
def test_state_dict_continues_bit_for_bit(confidence: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**ADAPTIVE, "runs": 3, "confidence": confidence}
    original = WCOPS(LAYOUT, 2, 100, **settings)
    world = World(LAYOUT, 2, 2, [0, 1, 2])
    play(original, world, 5)
    torch.save(original.state_dict(), tmp_path / "state.pt")
    restored = WCOPS(LAYOUT, 2, 100, **{**settings, "eta": 0.1})
    play(restored, World(LAYOUT, 2, 9, [0, 1, 2]), 2)  # whatever it had computed before must be forgotten
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(original.policy, restored.policy)
    for trajectory in play(original, world, 5):
        restored.update(trajectory)
    state, other = original.state_dict(), restored.state_dict()
    assert state.keys() == other.keys() and all(torch.equal(state[key], other[key]) for key in state)


def test_loading_a_state_leaves_the_callers_tensors_alone() -> None:
    eta = torch.tensor([0.1, 0.2], dtype=torch.float64)
    learner = WCOPS(LAYOUT, 1, 100, runs=2, eta=eta)
    learner.load_state_dict(WCOPS(LAYOUT, 1, 100, runs=2, eta=0.7).state_dict())
    assert eta.tolist() == [0.1, 0.2] and learner.eta.tolist() == [0.7, 0.7]


def test_update_reads_nothing_back_from_the_device() -> None:
    for m in (0, 2):  # two iterations take the same path as eight, which would cost the test twenty seconds
        learner = WCOPS(LAYOUT, m, 100, runs=3, device="meta", solver=tc.Newton(backend="torch", fixed_iterations=2))
        index = torch.zeros(3, 3, dtype=torch.int64, device="meta")
        feedback = torch.zeros(3, 3, dtype=torch.float64, device="meta"), torch.zeros(3, 3, m, dtype=torch.float64, device="meta")
        for _ in range(2):
            learner.update(Trajectory(index, index, index, *feedback))
        assert learner.policy.device.type == "meta" and learner.policy.shape == (3, *LAYOUT.pair_shape)
        assert {value.shape for value in learner.diagnostics().values()} == {(3,)}


def test_intervals_without_width_survive_float32() -> None:
    """Rows of averages that sum to one up to float32 are one kernel, and no empty interval."""
    learner = WCOPS(LAYOUT, 1, 100, runs=4, radius_scale=0.0, dtype=torch.float32)
    play(learner, World(LAYOUT, 1, 0, [0, 1, 2, 3]), 30)
    assert learner.policy.isfinite().all()


def test_what_a_solver_did_not_manage_is_reported() -> None:
    learner = WCOPS(LAYOUT, 1, 100, runs=2, solver=tc.Newton(max_iterations=1), **{**SMALL, "eta": 3.0})
    play(learner, World(LAYOUT, 1, 0, [0, 1]), 5)
    assert learner.diagnostics()["Solver/max_iterations"].any()
    expected = {"multiplier_cap": 200.0, "tolerance": 1e-11, "max_iterations": 1, "backend": "auto", "fixed_iterations": None}
    assert learner.config()["solver"] == {"name": "Newton", **expected}


def test_float32_follows_float64() -> None:
    exact, single = (WCOPS(LAYOUT, 2, 100, runs=2, dtype=dtype, **SMALL) for dtype in (torch.float64, torch.float32))
    for trajectory in play(exact, World(LAYOUT, 2, 0, [0, 1]), 8):
        single.update(trajectory)  # feedback in the other type is converted
    assert all(
        value.dtype == torch.float32 for value in (single.policy, single.occupancy, single.log_occupancy, single.cost_estimate)
    )
    assert (single.occupancy - exact.occupancy).abs().max() < 1e-3


HYPERPARAMETERS = ("eta", "gamma", "bonus_scale", "radius_scale", "threshold_scale")


def final_reward(values: torch.Tensor, trajectories: list[Trajectory]) -> torch.Tensor:
    """A smooth function of where recorded trajectories lead the learner, as a function of its hyperparameters `(5 x runs)`."""
    learner = WCOPS(LAYOUT, 1, 100, runs=2, **dict(zip(HYPERPARAMETERS, values, strict=True)))
    for trajectory in trajectories:
        learner.update(trajectory)
    weights = torch.linspace(0, 1, LAYOUT.transition_mask().numel(), dtype=torch.float64).view(LAYOUT.transition_shape)
    return (learner.occupancy * weights).sum((-1, -2, -3, -4))


def test_gradients_flow_through_episodes_in_both_modes() -> None:
    start = torch.tensor([[0.3, 0.2], [0.1, 0.2], [0.02, 0.04], [0.03, 0.02], [0.0007, 0.0008]], dtype=torch.float64)
    recorder = WCOPS(LAYOUT, 1, 100, runs=2, **dict(zip(HYPERPARAMETERS, start, strict=True)))
    trajectories = play(recorder, World(LAYOUT, 1, 4, [0, 1], low=0.0, high=0.9), 10)
    values = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(final_reward(values, trajectories).sum(), values)
    for i in range(len(start)):
        for j in range(2):
            h = 1e-5 * float(start[i, j])
            moved = torch.zeros_like(start)
            moved[i, j] = h
            above, below = (float(final_reward(start + s * moved, trajectories)[j]) for s in (1, -1))
            assert math.isclose(float(gradient[i, j]), (above - below) / (2 * h), rel_tol=1e-3, abs_tol=1e-6)
    assert (gradient.abs().amax(1) > 1e-6).all(), "every hyperparameter must matter in this scenario"
    with torch.autograd.forward_ad.dual_level():
        tangent = torch.ones_like(start)
        dual = torch.autograd.forward_ad.make_dual(start, tangent)
        forward = torch.autograd.forward_ad.unpack_dual(final_reward(dual, trajectories)).tangent
    assert forward is not None
    assert torch.allclose(forward, (gradient * tangent).sum(0), rtol=1e-6, atol=1e-9)


def test_a_parameter_is_kept_and_receives_its_gradient() -> None:
    eta = torch.nn.Parameter(torch.tensor(0.3))  # float32 and without a run axis, as people write it
    learner = WCOPS(LAYOUT, 1, 100, runs=2, gamma=0.1, eta=eta)
    play(learner, World(LAYOUT, 1, 0, [0, 1]), 3)
    learner.occupancy.pow(2).sum().backward()
    assert list(learner.parameters())[0] is eta and eta.grad is not None and eta.grad != 0


def test_cvxpy_projection_gives_the_same_run() -> None:
    newton, cvxpy = (WCOPS(LAYOUT, 2, 100, runs=2, solver=name, **SMALL) for name in ("newton", "cvxpy"))
    for trajectory in play(newton, World(LAYOUT, 2, 0, [0, 1]), 4):
        cvxpy.update(trajectory)
    assert (newton.occupancy - cvxpy.occupancy).abs().max() < 1e-4


def test_config_is_json_and_says_what_was_set() -> None:
    learner = WCOPS(LAYOUT, 2, 100, runs=2, eta=torch.tensor([0.1, 0.2]), gamma=0.5, confidence="l1", dtype=torch.float32)
    config = json.loads(json.dumps(learner.config()))
    assert config["name"] == "WC-OPS" and config["widths"] == [1, 2, 3, 1] and config["gamma"] == 0.5
    assert np.allclose(config["eta"], [0.1, 0.2]) and config["confidence"] == "l1" and config["dtype"] == "float32"
    assert config["horizon"] == 100 and config["delta"] == 0.01 and config["constraints"] == 2
    paper = math.sqrt(3 * math.log(3 * 7 * 2 / 0.01) / (100 * 7 * 2))
    assert math.isclose(WCOPS(LAYOUT, 2, 100).config()["eta"], paper, rel_tol=1e-12)


def test_diagnostics_have_one_number_a_run() -> None:
    learner = WCOPS(LAYOUT, 0, 100, runs=3)
    assert not learner.diagnostics()
    play(learner, World(LAYOUT, 0, 0, [0, 1, 2]), 1)
    ends = ("Solver/elastic", "Solver/max_iterations", "Solver/invalid")
    tags = {"Solver/iterations", "Solver/residual", *ends, "Learner/gamma_active", "Learner/max_beta"}
    assert learner.diagnostics().keys() == tags and all(value.shape == (3,) for value in learner.diagnostics().values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"horizon": 0}, "horizon is 0; it must be a whole number of at least 1"),
        ({"runs": 0}, "runs is 0"),
        ({"constraints": -1}, "constraints is -1"),
        ({"delta": 1.0}, "delta is 1.0; it must be a number that lies strictly between 0 and 1"),
        ({"confidence": "bernstien"}, "did you mean 'bernstein'"),
        ({"solver": "newtn"}, "did you mean 'newton'"),
        ({"solver": tc.ColumnGeneration()}, "must be 'newton', 'cvxpy' or an instance of ProjectionSolver"),
        ({"dtype": torch.int64}, "dtype is torch.int64"),
        ({"layout": (1, 2, 1)}, "layout is .*of type tuple"),
        ({"runs": 2, "eta": torch.ones(3)}, r"eta has shape \(3,\); .* each of 2 runs"),
        ({"gamma": -0.1}, "gamma contains -0.1"),
        ({"bonus_scale": float("nan")}, "bonus_scale contains nan"),
        ({"radius_scale": torch.tensor([0.1, math.inf]), "runs": 2}, "radius_scale contains inf"),
    ],
)
def test_bad_arguments_get_a_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        WCOPS(**{"layout": LAYOUT, "constraints": 1, "horizon": 100, **settings})


def test_foreign_trajectories_get_a_sentence() -> None:
    learner = WCOPS(LAYOUT, 1, 100, runs=2)
    good = World(LAYOUT, 1, 0, [0, 1]).rollout(learner.policy)
    index = (good.states, good.actions, good.next_states)
    with pytest.raises(InvalidInput, match=r"trajectory.states has shape \(1, 3\); .* \(runs x L\) = \(2, 3\)"):
        learner.update(Trajectory(good.states[:1], good.actions, good.next_states, good.rewards, good.costs))
    with pytest.raises(InvalidInput, match=r"trajectory.costs has shape \(2, 3, 2\); .* \(runs x L x m\) = \(2, 3, 1\)"):
        learner.update(Trajectory(*index, good.rewards, good.costs.expand(-1, -1, 2)))
    assert int(learner.episode) == 0
