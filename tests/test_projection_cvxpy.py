"""The cvxpylayers projection against plain cvxpy with Clarabel, and what it promises about batches, failures and derivatives."""

from __future__ import annotations

import math
from typing import Any

import cvxpy as cp
import pytest
import torch
from torch import Tensor

from tests.projection_instances import one, random_problem, solve_cvxpy
from torchcmdp.errors import InvalidInput
from torchcmdp.layout import Layout
from torchcmdp.occupancy import occupancy_of, uniform_policy
from torchcmdp.projection import cvxpy_layer
from torchcmdp.projection.problem import DEFAULT_CAP, LOG_FLOOR
from torchcmdp.safe_set import SafeSet
from torchcmdp.status import ELASTIC, MAX_ITERATIONS, SOLVED

SOLVERS = [pytest.param("MOREAU", marks=pytest.mark.skipif(not cvxpy_layer._installed("moreau"), reason="no moreau")), "DIFFCP"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:cvxpylayers", "ignore::UserWarning")
TINY = Layout((1, 2, 2, 1), 2)
LAYOUTS = [Layout((1, 1), 3), TINY, Layout((1, 3, 1, 2, 1), 2), Layout((1, 2, 4, 1), 2)]


def clarabel(target: Tensor, safe: SafeSet) -> Tensor:
    """One instance with hard constraints, written layer by layer in plain cvxpy and solved as tightly as Clarabel can."""
    layout, widths = safe.layout, safe.layout.widths
    q = [[cp.Variable((layout.actions, widths[k + 1])) for _ in range(widths[k])] for k in range(layout.layers)]
    objective, constraints, safety = 0, [], [0] * safe.constraints
    for k in range(layout.layers):
        for x in range(widths[k]):
            n, block = widths[k + 1], q[k][x]
            objective += cp.sum(-cp.entr(block)) - cp.sum(block) - cp.sum(cp.multiply(target[k, x, :, :n].numpy(), block))
            pair = cp.sum(block, axis=1)
            spread = cp.vstack([pair] * n).T
            constraints.append(cp.multiply(safe.lower[k, x, :, :n].numpy(), spread) <= block)
            constraints.append(block <= cp.multiply(safe.upper[k, x, :, :n].numpy(), spread))
            arriving = 1 if k == 0 else sum(cp.sum(q[k - 1][w][:, x]) for w in range(widths[k - 1]))
            constraints.append(cp.sum(block) == arriving)
            safety = [total + safe.costs[i, k, x].numpy() @ pair for i, total in enumerate(safety)]
    problem = cp.Problem(cp.Minimize(objective), constraints + [total <= 0 for total in safety])
    problem.solve(solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12, max_iter=400)
    answer = torch.zeros(layout.transition_shape, dtype=torch.float64)
    for k in range(layout.layers):
        for x in range(widths[k]):
            answer[k, x, :, : widths[k + 1]] = torch.as_tensor(q[k][x].value)
    return answer


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("m", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.widths)))
def test_agrees_with_plain_cvxpy(layout: Layout, m: int, solver: str) -> None:
    target, safe = random_problem(layout, m, (2,), seed=m)
    result = solve_cvxpy(target, safe, solver=solver)
    for j in range(2):
        expected = clarabel(target[j], one(safe, j))
        # both stop at a gap of about 1e-12, and the occupancy is as accurate as the square root of that
        assert (result.occupancy[j] - expected).abs().max() < 5e-6
    assert result.status.tolist() == [SOLVED, SOLVED]
    assert result.residual.max() < 1e-8 and result.gap.max() < 1e-7
    assert (result.iterations == -1).all()
    if m:
        assert (result.multipliers.amax(-1) > 1e-3).all(), "the instances are meant to bind"


@pytest.mark.parametrize("solver", SOLVERS)
def test_duals_are_those_of_the_closed_form(solver: str) -> None:
    # with free intervals q(x,a,y) = exp(log_target + v(y) - v(x) - lambda.costs(x,a)) at the optimum
    target, safe = random_problem(TINY, 1, (), seed=3)
    mask = TINY.transition_mask()
    safe = SafeSet(TINY, torch.zeros_like(safe.lower), mask.to(torch.float64), safe.costs)
    result = solve_cvxpy(target - 7.0 * mask, safe, solver=solver)
    v = result.potentials
    after = torch.cat([v[1:], torch.zeros_like(v[:1])])
    prices = v[:, :, None] + torch.einsum("m,mksa->ksa", result.multipliers, safe.costs)
    expected = (target - 7.0 + after[:, None, None, :] - prices[..., None]).exp() * mask
    assert (result.occupancy - expected).abs().max() < 1e-5


@pytest.mark.parametrize("batch", [(), (3,), (2, 2), (0,)], ids=str)
def test_batch_shapes_and_exact_padding(batch: tuple[int, ...]) -> None:
    layout = Layout((1, 3, 1, 2, 1), 2)
    target, safe = random_problem(layout, 2, batch, seed=1)
    result = solve_cvxpy(target, safe)
    assert result.occupancy.shape == (*batch, *layout.transition_shape)
    assert result.log_occupancy.shape == result.occupancy.shape
    assert result.potentials.shape == (*batch, layout.layers, layout.width)
    assert result.multipliers.shape == (*batch, 2)
    for certificate in (result.status, result.residual, result.gap, result.iterations):
        assert certificate.shape == batch
    padding = ~layout.transition_mask()
    assert (result.occupancy[..., padding] == 0).all() and (result.potentials[..., ~layout.state_mask()] == 0).all()
    assert (result.log_occupancy[..., padding] == -math.inf).all()
    reached = result.occupancy > 0
    assert torch.allclose(result.log_occupancy[reached].exp(), result.occupancy[reached])
    assert (result.occupancy >= 0).all() and not result.occupancy.requires_grad


def test_an_instance_does_not_depend_on_its_batch() -> None:
    target, safe = random_problem(TINY, 2, (2, 2), seed=2)
    whole = solve_cvxpy(target, safe)
    single = solve_cvxpy(target[1, 0], SafeSet(TINY, safe.lower[1, 0], safe.upper[1, 0], safe.costs[1, 0]))
    assert (whole.occupancy[1, 0] - single.occupancy).abs().max() < 1e-7


def test_batch_shapes_broadcast() -> None:
    target, safe = random_problem(TINY, 1, (3,), seed=4)
    result = solve_cvxpy(target, shared := one(safe, 0))
    for j in range(3):
        assert (result.occupancy[j] - solve_cvxpy(target[j], shared).occupancy).abs().max() < 1e-7


@pytest.mark.parametrize("solver", SOLVERS)
def test_float32_in_float32_out(solver: str) -> None:
    target, safe = random_problem(TINY, 1, (2,), seed=0)
    small = SafeSet(TINY, safe.lower.float(), safe.upper.float(), safe.costs.float())
    result = solve_cvxpy(target.float(), small, solver=solver)
    assert {result.occupancy.dtype, result.log_occupancy.dtype, result.potentials.dtype, result.gap.dtype} == {torch.float32}
    assert (result.occupancy.double() - solve_cvxpy(target, safe, solver=solver).occupancy).abs().max() < 1e-5
    assert result.status.tolist() == [SOLVED, SOLVED]


@pytest.mark.parametrize("factor", [1 + 5e-6, 1 - 5e-6])
def test_a_known_model_is_not_infeasible_by_rounding(factor: float) -> None:
    _, safe = random_problem(Layout((1, 4, 4, 1), 2), 0, (4,), seed=6)
    model = (safe.lower + safe.upper) / (safe.lower + safe.upper).sum(-1, keepdim=True).clamp_min(1e-300)
    occupancy = occupancy_of(uniform_policy(safe.layout), model)
    result = solve_cvxpy(occupancy.log(), SafeSet(safe.layout, factor * model, factor * model, safe.costs))
    assert (result.status == SOLVED).all() and result.residual.max() < 1e-8
    assert (result.occupancy - occupancy).abs().max() < 5e-6


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_empty_safe_set_is_elastic_and_leaves_its_neighbours_alone(solver: str) -> None:
    target, safe = random_problem(TINY, 1, (3,), seed=5)
    costs = safe.costs.clone()
    costs[1] = 0.5 * TINY.pair_mask()
    result = solve_cvxpy(target, SafeSet(TINY, safe.lower, safe.upper, costs), solver=solver)
    assert result.status.tolist() == [SOLVED, ELASTIC, SOLVED]
    value = (costs[1] * result.occupancy[1].sum(-1)).sum()
    assert abs(value - 0.5 * TINY.layers) < 1e-8
    assert abs(0.5 * result.multipliers[1] - DEFAULT_CAP) < 1e-6  # the unit of its costs is a half
    assert result.residual.max() < 1e-8
    alone = solve_cvxpy(target[[0, 2]], SafeSet(TINY, safe.lower[[0, 2]], safe.upper[[0, 2]], safe.costs[[0, 2]]), solver=solver)
    assert (result.occupancy[[0, 2]] - alone.occupancy).abs().max() < 1e-7


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_cap_bounds_the_multipliers(solver: str) -> None:
    target, safe = random_problem(TINY, 1, (), seed=1)
    free = solve_cvxpy(target, safe, solver=solver)
    capped = solve_cvxpy(target, safe, solver=solver, multiplier_cap=0.25 * float(free.multipliers))
    assert capped.status.item() == ELASTIC
    assert abs(capped.multipliers.item() - 0.25 * float(free.multipliers)) < 1e-6
    # at the cap the answer is the unconstrained projection of the target penalised by cap * costs
    penalised = target - capped.multipliers * safe.costs[0].unsqueeze(-1) * TINY.transition_mask()
    unconstrained = solve_cvxpy(penalised, SafeSet(TINY, safe.lower, safe.upper, safe.costs[:0]), solver=solver)
    assert (capped.occupancy - unconstrained.occupancy).abs().max() < 5e-6


def test_a_zero_reference_is_read_as_the_floor() -> None:
    target, safe = random_problem(TINY, 1, (), seed=7)
    zero, floor = target.clone(), target.clone()
    zero[0, 0, 1], floor[0, 0, 1] = -math.inf, LOG_FLOOR
    floor[~TINY.transition_mask()] = 5.0  # padding is not read
    assert torch.equal(solve_cvxpy(zero, safe).occupancy, solve_cvxpy(floor, safe).occupancy)
    assert solve_cvxpy(zero, safe).occupancy[0, 0, 1].max() < 1e-6
    # one state and one action: q = 1, so the potential of the start is the log target itself
    only = Layout((1, 1), 1)
    ones = torch.ones(only.transition_shape, dtype=torch.float64)
    result = solve_cvxpy(-math.inf * ones, SafeSet(only, ones, ones, ones[None, ..., 0][:0]))
    assert abs(result.potentials.item() - LOG_FLOOR) < 1e-6


def weighted(tensors: list[Tensor], solver: str, layout: Layout = TINY) -> Tensor:
    result = solve_cvxpy(tensors[0], SafeSet(layout, *tensors[1:]), solver=solver)
    weights = torch.randn(layout.transition_shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (result.occupancy * weights).flatten(-4).sum(-1)


@pytest.mark.parametrize("solver", SOLVERS)
def test_gradients_match_central_differences(solver: str) -> None:
    target, safe = random_problem(TINY, 1, (), seed=8)
    point = [target, safe.lower, safe.upper, safe.costs]
    leaves = [tensor.clone().requires_grad_() for tensor in point]
    gradients = torch.autograd.grad(weighted(leaves, solver), leaves)
    several = (TINY.next_widths() > 1).unsqueeze(-1) & TINY.transition_mask()
    # a bound at 0 or 1 has no two-sided derivative
    checked = [TINY.transition_mask(), several & (safe.lower > 0), several & (safe.upper < 1), TINY.pair_mask().unsqueeze(0)]
    step = 3e-3  # the answer is noisy at 1e-6, so the quotient is at 1e-3 and no finer
    for which, (gradient, mask) in enumerate(zip(gradients, checked, strict=True)):
        moves = torch.zeros(int(mask.sum()), *mask.shape, dtype=torch.float64)
        moves[:, mask] = torch.eye(int(mask.sum()), dtype=torch.float64)
        ends = []
        for sign in (1, -1):
            moved = list(point)
            moved[which] = moved[which] + sign * step * moves
            ends.append(weighted(moved, solver))
        quotient = (ends[0] - ends[1]) / (2 * step)
        assert quotient.abs().max() > 0.02
        assert (gradient[mask] - quotient).abs().max() < 2e-3


@pytest.mark.skipif(not cvxpy_layer._installed("moreau"), reason="no moreau")
def test_the_backends_agree_on_the_gradients() -> None:
    layout = Layout((1, 3, 3, 1), 2)  # DIFFCP's own default derivative is off by 3e-2 on this instance
    target, safe = random_problem(layout, 2, (), seed=5)
    leaves = [tensor.clone().requires_grad_() for tensor in (target, safe.lower, safe.upper, safe.costs)]
    gradients = [torch.autograd.grad(weighted(leaves, solver, layout), leaves) for solver in ("MOREAU", "DIFFCP")]
    for first, second in zip(*gradients, strict=True):
        assert first.abs().max() > 0.1 and (first - second).abs().max() < 2e-3


@pytest.mark.parametrize("solver", SOLVERS)
def test_backward_after_another_solve_is_the_same(solver: str) -> None:
    # the compiled layer is shared, so a later call with another batch must not overwrite what an earlier backward needs
    target, safe = random_problem(TINY, 1, (3,), seed=9)
    other, elsewhere = random_problem(TINY, 1, (2,), seed=10)
    found = []
    for disturb in (False, True):
        leaf = target.clone().requires_grad_()
        value = weighted([leaf, safe.lower, safe.upper, safe.costs], solver).sum()
        if disturb:
            weighted([other.requires_grad_(), elsewhere.lower, elsewhere.upper, elsewhere.costs], solver)
        found.append(torch.autograd.grad(value, leaf)[0])
    assert torch.allclose(found[0], found[1], atol=1e-9)


def test_a_feasible_but_suboptimal_answer_is_not_called_solved() -> None:
    target, safe = random_problem(TINY, 1, (), seed=13)
    result = solve_cvxpy(target, safe, solver="DIFFCP", solver_args={"solve_method": "SCS", "max_iters": 20})
    assert result.status.item() == MAX_ITERATIONS
    exact = solve_cvxpy(target, safe, solver="DIFFCP", solver_args={"solve_method": "SCS", "eps": 1e-9})
    assert exact.status.item() == SOLVED


def test_derivative_options_are_accepted_with_and_without_gradients() -> None:
    target, safe = random_problem(TINY, 1, (2,), seed=14)
    for needed in (False, True):
        result = solve_cvxpy(target.clone().requires_grad_(needed), safe, solver="DIFFCP", solver_args={"mode": "lsqr"})
        assert result.occupancy.requires_grad is needed


def test_runs_in_inference_mode_and_still_differentiates_afterwards() -> None:
    layout = Layout((1, 2, 1), 3)
    target, safe = random_problem(layout, 1, (2,), seed=15)
    with torch.inference_mode():
        assert (solve_cvxpy(target, safe).status == SOLVED).all()
    leaf = target.clone().requires_grad_()
    weighted([leaf, safe.lower, safe.upper, safe.costs], "DIFFCP", layout).sum().backward()
    assert leaf.grad is not None


@pytest.mark.parametrize(
    ("name", "told"),
    [("log_target", "reference or eta"), ("lower", "lower or upper"), ("upper", "lower or upper"), ("costs", "costs")],
)
def test_nan_is_refused_by_name_and_instance(name: str, told: str) -> None:
    target, safe = random_problem(TINY, 1, (2, 2), seed=0)
    tensors = {"log_target": target, "lower": safe.lower, "upper": safe.upper, "costs": safe.costs}
    tensors[name][1, 0, 0, 0, 0, 0] = math.nan
    with pytest.raises(InvalidInput, match=f"{told} cannot be used at instance 2, layer 0, state 0, action 0"):
        solve_cvxpy(target, SafeSet(TINY, tensors["lower"], tensors["upper"], tensors["costs"]))


def test_bad_arguments_get_a_sentence() -> None:
    target, safe = random_problem(TINY, 1, (2,), seed=0)
    with pytest.raises(InvalidInput, match="'CUCLARABEL', 'DIFFCP', 'MOREAU'"):
        solve_cvxpy(target, safe, solver="GUROBI")
    with pytest.raises(InvalidInput, match="multiplier_cap is -1"):
        solve_cvxpy(target, safe, multiplier_cap=-1.0)
    with pytest.raises(InvalidInput, match="do not broadcast"):
        solve_cvxpy(target[:1].expand(3, *target.shape[1:]), safe)
    with pytest.raises(InvalidInput, match="last axes must be"):
        solve_cvxpy(target[..., :1], safe)
    with pytest.raises(InvalidInput, match="device meta"):
        solve_cvxpy(target.to("meta"), safe)
    with pytest.raises(AttributeError):
        solve_cvxpy(target, safe, solver="DIFFCP", solver_args={"no_such_setting": 1})


@pytest.mark.skipif(not cvxpy_layer._installed("moreau"), reason="no moreau")
def test_moreau_options_are_merged_and_unknown_ones_refused() -> None:
    target, safe = random_problem(TINY, 1, (2,), seed=0)
    with pytest.raises(InvalidInput, match="tol_feas"):
        solve_cvxpy(target, safe, solver="MOREAU", solver_args={"tol_feas": 1e-3})
    with pytest.raises(InvalidInput, match="'tol_gap'"):
        solve_cvxpy(target, safe, solver="MOREAU", solver_args={"ipm_settings": {"tol_gap": 1e-3}})
    merged = cvxpy_layer.merge_args("MOREAU", {"ipm_settings": {"tol_feas": 1e-6}})
    assert merged["ipm_settings"]["tol_feas"] == 1e-6 and merged["ipm_settings"]["tol_gap_abs"] == 1e-12
    assert (solve_cvxpy(target, safe, solver="MOREAU", solver_args={"max_iter": 3}).status == MAX_ITERATIONS).all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_layer_is_compiled_for_one_problem(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built, real = [], cvxpy_layer._build

    def build(*key: Any) -> Any:
        built.append(key)
        return real(*key)

    monkeypatch.setattr(cvxpy_layer, "_build", build)
    monkeypatch.setattr(cvxpy_layer, "_layers", {})
    for seed in (0, 1):
        for batch in ((), (2,)):
            solve_cvxpy(*random_problem(TINY, 1, batch, seed), solver=solver)
    assert len(built) == 1
    solve_cvxpy(*random_problem(TINY, 1, (), 0), solver=solver, multiplier_cap=7.0)
    solve_cvxpy(*random_problem(TINY, 2, (), 0), solver=solver)
    assert len(built) == 3
