from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP, stack_cmdps
from torchcmdp.errors import InvalidInput
from torchcmdp.instances import random_cmdp, single_state_cmdp, two_path_cmdp
from torchcmdp.occupancy import flow_residual, interval_residual, occupancy_of
from torchcmdp.planning import alpha_of, rho, safe_optimum, safest_policy, slater_gap, unconstrained_optimum


def _reward(cmdp: LayeredCMDP, occupancy: Tensor) -> Tensor:
    return (cmdp.rewards * occupancy.sum(-1)).sum(dim=(-1, -2, -3))


def _costs(cmdp: LayeredCMDP, occupancy: Tensor) -> Tensor:
    return (cmdp.costs * occupancy.sum(-1).unsqueeze(-4)).sum(dim=(-1, -2, -3))


def _full_lp(cmdp: LayeredCMDP) -> float:
    """The same optimum by another route: variables q(x,a,y), padding included, and q(x,a,y) = P(y|x,a) q(x,a) as equations."""
    L, S, A, _ = cmdp.layout.transition_shape
    P, index = cmdp.transitions.numpy(), np.arange(L * S * A * S).reshape(L, S, A, S)
    rows, right = [], []
    for k, x, a, y in itertools.product(range(L), range(S), range(A), range(S)):
        row = np.zeros(index.size)
        row[index[k, x, a]] = -P[k, x, a, y]
        row[index[k, x, a, y]] += 1
        rows.append(row)
        right.append(0.0)
    for k, x in itertools.product(range(L), range(S)):
        row = np.zeros(index.size)
        row[index[k, x].ravel()] = 1
        if k:
            row[index[k - 1, :, :, x].ravel()] -= 1
        rows.append(row)
        right.append(float(k == 0 and x == 0))
    spread = np.repeat(cmdp.rewards.numpy()[..., None], S, -1).ravel()
    safety = np.repeat(cmdp.costs.numpy()[..., None], S, -1).reshape(cmdp.constraints, -1)
    result = linprog(-spread, A_ub=safety, b_ub=np.zeros(len(safety)), A_eq=np.array(rows), b_eq=right, method="highs")
    assert result.status == 0
    return -result.fun


@pytest.mark.parametrize("seed", range(6))
def test_safe_optimum_equals_an_independent_program(seed: int) -> None:
    cmdp = random_cmdp((1, 3, 2, 1), actions=2, constraints=1 + seed % 3, seed=seed)
    optimum = safe_optimum(cmdp)
    assert optimum.feasible
    assert optimum.value.item() == pytest.approx(_full_lp(cmdp), abs=1e-8)
    torch.testing.assert_close(optimum.value, _reward(cmdp, optimum.occupancy))
    assert (_costs(cmdp, optimum.occupancy) <= 1e-9).all()
    assert flow_residual(optimum.occupancy) < 1e-14
    assert interval_residual(optimum.occupancy, cmdp.transitions, cmdp.transitions) < 1e-15


def test_two_paths_by_hand() -> None:
    cmdp = two_path_cmdp()
    safe, best = safe_optimum(cmdp), unconstrained_optimum(cmdp)
    assert safe.value.item() == pytest.approx(0.4, abs=1e-12)
    assert safe.occupancy.sum(-1)[0, 0].tolist() == pytest.approx([0.3125, 0.6875], abs=1e-12)
    assert best.value.item() == pytest.approx(0.84, abs=1e-12)
    assert slater_gap(cmdp).item() == pytest.approx(0.2, abs=1e-12)


def test_two_paths_by_brute_force() -> None:
    """No policy on a fine grid over all three choices is safe and better."""
    cmdp = two_path_cmdp()
    grid = torch.linspace(0, 1, 33, dtype=torch.float64)
    p = torch.cartesian_prod(grid, grid, grid)
    policy = torch.zeros(len(p), *cmdp.layout.pair_shape, dtype=torch.float64)
    policy[:, 0, 0, 0], policy[:, 1, 0, 0], policy[:, 1, 1, 0] = p.unbind(1)
    policy[..., 1] = (1 - policy[..., 0]) * cmdp.layout.pair_mask()[..., 1]
    q = occupancy_of(policy, cmdp.transitions)
    safe = _costs(cmdp, q)[:, 0] <= 1e-12
    assert _reward(cmdp, q)[safe].max().item() <= safe_optimum(cmdp).value.item() + 1e-12
    assert (-_costs(cmdp, q)).max().item() == pytest.approx(slater_gap(cmdp).item())


def test_unconstrained_optimum_beats_every_deterministic_policy() -> None:
    cmdp = random_cmdp((1, 2, 2, 1), actions=2, constraints=1, seed=4)
    policies = []
    for choice in itertools.product(range(2), repeat=5):
        policy = torch.zeros(cmdp.layout.pair_shape, dtype=torch.float64)
        for (k, x), a in zip(((0, 0), (1, 0), (1, 1), (2, 0), (2, 1)), choice, strict=True):
            policy[k, x, a] = 1
        policies.append(policy)
    values = _reward(cmdp, occupancy_of(torch.stack(policies), cmdp.transitions))
    optimum = unconstrained_optimum(cmdp)
    torch.testing.assert_close(optimum.value, values.max())
    torch.testing.assert_close(optimum.value, _reward(cmdp, optimum.occupancy))


def test_without_constraints_the_two_optima_agree() -> None:
    cmdp = random_cmdp(constraints=0, seed=1)
    torch.testing.assert_close(safe_optimum(cmdp).value, unconstrained_optimum(cmdp).value)
    assert slater_gap(cmdp).item() == torch.inf


def test_an_empty_safe_set_is_reported_and_does_not_spoil_the_batch() -> None:
    bad, good = single_state_cmdp([0.1, 0.9], [[0.5, 0.2]]), single_state_cmdp([0.1, 0.9], [[-0.5, 0.5]])
    optimum = safe_optimum(stack_cmdps([bad, good]))
    assert optimum.feasible.tolist() == [False, True]
    assert optimum.value[0].isnan() and optimum.occupancy[0].isnan().all()
    assert optimum.value[1].item() == pytest.approx(0.5)
    assert slater_gap(bad).item() == pytest.approx(-0.2)


def test_batches_equal_their_members_whatever_their_shape() -> None:
    members = [random_cmdp((1, 3, 2, 1), seed=s) for s in range(4)]
    flat = stack_cmdps(members)
    square = LayeredCMDP(flat.layout, *(t.reshape(2, 2, *t.shape[1:]) for t in (flat.transitions, flat.rewards, flat.costs)))
    for function in (safe_optimum, unconstrained_optimum):
        optimum = function(square)
        assert optimum.value.shape == optimum.feasible.shape == (2, 2)
        for j, member in enumerate(members):
            single = function(member)
            torch.testing.assert_close(optimum.value[j // 2, j % 2], single.value)
            torch.testing.assert_close(optimum.occupancy[j // 2, j % 2], single.occupancy)
    torch.testing.assert_close(slater_gap(square).flatten(), torch.stack([slater_gap(member) for member in members]))


def test_other_rewards_and_costs_replace_the_cmdps_own(cmdp: LayeredCMDP) -> None:
    other = random_cmdp(cmdp.layout.widths, 3, 2, seed=9)
    mixed = LayeredCMDP(cmdp.layout, cmdp.transitions, other.rewards, other.costs)
    assert torch.equal(safe_optimum(cmdp, other.rewards, other.costs).value, safe_optimum(mixed).value)
    assert torch.equal(unconstrained_optimum(cmdp, other.rewards).value, unconstrained_optimum(mixed).value)
    assert torch.equal(slater_gap(cmdp, other.costs), slater_gap(mixed))
    with pytest.raises(InvalidInput, match="rewards has shape"):
        safe_optimum(cmdp, other.rewards[:-1])
    with pytest.raises(InvalidInput, match="must broadcast"):
        unconstrained_optimum(cmdp, other.rewards.expand(3, -1, -1, -1))
    with pytest.raises(InvalidInput, match="constraint axis"):
        slater_gap(cmdp, other.costs[0])


def test_slater_gap_is_the_shift_at_which_safety_is_lost() -> None:
    cmdp = random_cmdp((1, 3, 2, 1), constraints=2, seed=2, feasibility="strict")
    gap, mask = slater_gap(cmdp), cmdp.layout.pair_mask()
    for factor, feasible in ((0.999, True), (1.001, False)):
        shifted = cmdp.costs + factor * gap / cmdp.layout.layers * mask
        assert bool(safe_optimum(cmdp, costs=shifted).feasible) is feasible


def test_padding_is_exactly_zero(cmdp: LayeredCMDP) -> None:
    hopeless = cmdp.layout.pair_mask().to(cmdp.dtype).expand_as(cmdp.costs)
    for optimum in (safe_optimum(cmdp), unconstrained_optimum(cmdp), safe_optimum(cmdp, costs=hopeless)):
        assert (optimum.occupancy[~cmdp.layout.transition_mask()] == 0).all()


def test_single_precision_and_meta(cmdp: LayeredCMDP) -> None:
    half, meta = cmdp.to(dtype=torch.float32), cmdp.to("meta")
    for function in (safe_optimum, unconstrained_optimum):
        optimum = function(half)
        assert optimum.value.dtype == optimum.occupancy.dtype == torch.float32
        assert optimum.value.item() == pytest.approx(function(cmdp).value.item(), abs=1e-5)
        assert function(meta).occupancy.device.type == "meta"
    assert slater_gap(half).dtype == torch.float32
    assert slater_gap(meta).device.type == "meta"


def _sparse_cmdp(seed: int, constraints: int = 2) -> LayeredCMDP:
    """Three layers of one, two and two states, with about half of the transitions impossible."""
    cmdp = random_cmdp((1, 2, 2, 1), actions=2, constraints=constraints, seed=seed, feasibility="any")
    drop = torch.rand(cmdp.layout.transition_shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    kept = cmdp.transitions * ~drop
    kept = torch.where(kept.sum(-1, keepdim=True) > 0, kept, cmdp.transitions)
    kept = kept / kept.sum(-1, keepdim=True).clamp_min(1e-300)
    return LayeredCMDP(cmdp.layout, kept, cmdp.rewards, cmdp.costs)


def _deterministic_policies(cmdp: LayeredCMDP) -> Tensor:
    states = cmdp.layout.state_mask().nonzero().tolist()
    policies = []
    for choice in itertools.product(range(cmdp.layout.actions), repeat=len(states)):
        policies.append(torch.zeros(cmdp.layout.pair_shape, dtype=torch.float64))
        for (k, x), a in zip(states, choice, strict=True):
            policies[-1][k, x, a] = 1
    return torch.stack(policies)


def _room(cmdp: LayeredCMDP, policies: Tensor) -> Tensor:
    """The smallest -g over constraints and visited pairs, one a policy."""
    visited = occupancy_of(policies, cmdp.transitions).sum(-1) > 0
    return torch.where(visited, -cmdp.costs.amax(-4), torch.inf).amin(dim=(-1, -2, -3))


def test_rho_equals_brute_force_over_deterministic_policies() -> None:
    for seed in range(40):
        cmdp = _sparse_cmdp(seed, constraints=1 + seed % 3)
        rooms = _room(cmdp, _deterministic_policies(cmdp))
        assert torch.equal(rho(cmdp), rooms.max()), seed
        assert torch.equal(_room(cmdp, safest_policy(cmdp)), rho(cmdp)), seed


def test_no_randomised_policy_has_more_room_than_rho() -> None:
    cmdp = _sparse_cmdp(0)
    mixtures = torch.rand(50, *cmdp.layout.pair_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mixtures = mixtures * (mixtures > 0.4) + 1e-9 * (mixtures == mixtures.amax(-1, keepdim=True))
    assert (_room(cmdp, mixtures / mixtures.sum(-1, keepdim=True)) <= rho(cmdp)).all()


@pytest.mark.parametrize(("cost", "alpha"), [(-0.25, 0.2), (-1.0, 0.5), (0.25, 0.0), (0.0, 0.0)])
def test_rho_and_alpha_of_constant_costs(cmdp: LayeredCMDP, cost: float, alpha: float) -> None:
    constant = cost * cmdp.layout.pair_mask().to(cmdp.dtype).expand_as(cmdp.costs)
    assert rho(cmdp, constant).item() == -cost
    assert alpha_of(rho(cmdp, constant)).item() == pytest.approx(alpha)


def test_rho_is_infinite_without_constraints() -> None:
    cmdp = random_cmdp(constraints=0)
    assert rho(cmdp).item() == torch.inf and alpha_of(rho(cmdp)).item() == 1
    assert alpha_of(torch.tensor([-torch.inf, -0.5, 0.0, 1.0, torch.inf])).tolist() == [0, 0, 0, 0.5, 1]


def test_rho_broadcasts_costs_of_runs_over_one_cmdp_and_over_many() -> None:
    cmdps = [_sparse_cmdp(seed) for seed in range(3)]
    costs = torch.stack([cmdp.costs for cmdp in cmdps])
    shared = rho(cmdps[0], costs)
    own = rho(stack_cmdps(cmdps))
    for j, cmdp in enumerate(cmdps):
        assert torch.equal(shared[j], rho(cmdps[0], cmdp.costs)) and torch.equal(own[j], rho(cmdp))
    assert safest_policy(cmdps[0], costs).shape == (3, *cmdps[0].layout.pair_shape)
    assert rho(stack_cmdps(cmdps), cmdps[0].costs).shape == (3,)
    with pytest.raises(InvalidInput, match=r"batch shape \(2,\); it must broadcast with the CMDP's \(3,\)"):
        rho(stack_cmdps(cmdps), costs[:2])
    with pytest.raises(InvalidInput, match="constraint axis"):
        rho(cmdps[0], costs[0, 0])


def test_rho_ignores_padding_follows_types_and_runs_on_meta(cmdp: LayeredCMDP) -> None:
    safe = torch.full_like(cmdp.costs, -0.5)  # in the padding as well, where it must not count
    safe[:, ~cmdp.layout.pair_mask()] = 1
    assert rho(cmdp, safe).item() == 0.5
    assert (safest_policy(cmdp)[~cmdp.layout.pair_mask()] == 0).all()
    assert rho(cmdp.to(dtype=torch.float32)).dtype == torch.float32
    assert rho(cmdp.to("meta")).device.type == safest_policy(cmdp.to("meta")).device.type == "meta"
