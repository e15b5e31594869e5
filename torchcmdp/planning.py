"""Exact optima of a known CMDP: the best safe policy, the best policy, the safest, and how much room the constraints leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from scipy.optimize import OptimizeResult, linprog
from scipy.sparse import coo_array, csr_array, hstack
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.errors import InvalidInput, TorchCMDPError
from torchcmdp.layout import Layout
from torchcmdp.occupancy import occupancy_of, policy_of

LP_TOLERANCE = 1e-10  # the tightest that HiGHS accepts


@dataclass(frozen=True, eq=False)
class Optimum:
    """The best policy of every CMDP of a batch.

    Attributes:
        value: Expected reward of an episode, `(...)`; NaN where no policy is feasible.
        occupancy: The occupancy q(x,a,y) that attains it, `(... x L x S x A x S)`; NaN at real transitions where none is feasible.
        feasible: `(...)` bool.
    """

    value: Tensor
    occupancy: Tensor
    feasible: Tensor


def safe_optimum(cmdp: LayeredCMDP, rewards: Tensor | None = None, costs: Tensor | None = None) -> Optimum:
    """OPT_G: max <r, q> over occupancies of the true transitions with <g_i, q> <= 0 for every i (ALGORITHMS section h).

    An exact linear program in q(x,a), solved by HiGHS one CMDP after the other.

    Args:
        cmdp: One CMDP or a batch.
        rewards: Used in place of the CMDP's own, `(... x L x S x A)`.
        costs: Used in place of the CMDP's own, `(... x m x L x S x A)`.
    """
    layout = cmdp.layout
    rewards, costs = _rewards(cmdp, rewards), _costs(cmdp, costs)
    if cmdp.device.type == "meta":
        return _on_meta(cmdp)
    pairs, feasible = [], []
    for transitions, reward, cost in _instances(cmdp, rewards, costs):
        solution = _solve(-reward, _flow_rows(layout, transitions), csr_array(cost), np.zeros(len(cost)))
        feasible.append(solution is not None)
        pairs.append(np.full(len(reward), np.nan) if solution is None else solution.x.clip(min=0))
    pair = torch.zeros(len(pairs), *layout.pair_shape, dtype=torch.float64)
    pair[:, layout.pair_mask()] = torch.from_numpy(np.stack(pairs))
    pair = pair.reshape(*cmdp.batch_shape, *layout.pair_shape).to(cmdp.device, cmdp.dtype)
    # read the policy off the solution and roll it out again, which removes the solver's rounding from the flow
    policy = torch.where(pair.isnan(), pair, policy_of(pair.unsqueeze(-1), layout))
    occupancy = torch.where(layout.transition_mask(cmdp.device), occupancy_of(policy, cmdp.transitions), 0)
    value = (occupancy.sum(-1) * rewards).sum(dim=(-1, -2, -3))
    return Optimum(value, occupancy, torch.tensor(feasible, device=cmdp.device).reshape(cmdp.batch_shape))


def unconstrained_optimum(cmdp: LayeredCMDP, rewards: Tensor | None = None) -> Optimum:
    """OPT: max <r, q> over all occupancies of the true transitions, by backward induction; ties go to the lowest action.

    Args:
        cmdp: One CMDP or a batch.
        rewards: Used in place of the CMDP's own, `(... x L x S x A)`.
    """
    rewards = _rewards(cmdp, rewards)
    value = rewards.new_zeros(*cmdp.batch_shape, cmdp.layout.states)
    choices = []
    for k in reversed(range(cmdp.layout.layers)):
        action_value = rewards[..., k, :, :] + (cmdp.transitions[..., k, :, :, :] @ value[..., None, :, None]).squeeze(-1)
        value, best = action_value.max(-1)
        choices.append(best)
    policy = _deterministic(cmdp, torch.stack(choices[::-1], dim=-2))
    feasible = torch.ones(cmdp.batch_shape, dtype=torch.bool, device=cmdp.device)
    return Optimum(value[..., 0], occupancy_of(policy, cmdp.transitions), feasible)


def slater_gap(cmdp: LayeredCMDP, costs: Tensor | None = None) -> Tensor:
    """max_q min_i -<g_i, q>: positive if some policy is strictly safe, negative if none is safe; +inf without constraints.

    Args:
        cmdp: One CMDP or a batch.
        costs: Used in place of the CMDP's own, `(... x m x L x S x A)`.

    Returns:
        `(...)`.
    """
    costs = _costs(cmdp, costs)
    if costs.shape[-4] == 0 or cmdp.device.type == "meta":
        return torch.full(cmdp.batch_shape, torch.inf, dtype=cmdp.dtype, device=cmdp.device)
    gaps = []
    for transitions, reward, cost in _instances(cmdp, _rewards(cmdp, None), costs):
        flow = _flow_rows(cmdp.layout, transitions)
        flow = hstack([flow, csr_array((flow.shape[0], 1))], format="csr")
        safety = csr_array(np.concatenate([cost, np.ones((len(cost), 1))], axis=1))
        objective = np.append(np.zeros(len(reward)), -1.0)
        solution = _solve(objective, flow, safety, np.zeros(len(cost)), free_last=True)
        if solution is None:
            raise TorchCMDPError("HiGHS called the program of the Slater gap infeasible, although every policy is feasible for it.")
        gaps.append(-solution.fun)
    return torch.tensor(gaps, dtype=cmdp.dtype, device=cmdp.device).reshape(cmdp.batch_shape)


def rho(cmdp: LayeredCMDP, worst_costs: Tensor | None = None) -> Tensor:
    """By how much the safest policy keeps every cost below zero in every pair it may visit (ALGORITHMS section h).

    rho = max_q min over pairs with q(x,a) > 0 and constraints i of -g_i(x,a), by a bottleneck recursion over the layers: negative
    if every policy may meet a positive cost, +inf without constraints. A successor is possible where its probability is not zero.

    Args:
        cmdp: One CMDP or a batch; only its transitions count.
        worst_costs: The largest cost of every pair over all episodes, `(... x m x L x S x A)`, its batch shape broadcast with the
            CMDP's; by default the CMDP's own costs.

    Returns:
        `(...)`.
    """
    return _bottleneck(cmdp, worst_costs)[0]


def safest_policy(cmdp: LayeredCMDP, worst_costs: Tensor | None = None) -> Tensor:
    """A deterministic policy that attains `rho`; ties go to the lowest action.

    Args:
        cmdp, worst_costs: As for `rho`.

    Returns:
        `(... x L x S x A)`.
    """
    return _bottleneck(cmdp, worst_costs)[1]


def alpha_of(rho: Tensor) -> Tensor:
    """rho^+ / (1 + rho^+), the share of the best reward that can be promised against adversarial costs; one where rho is +inf."""
    room = rho.clamp_min(0)
    return torch.where(room.isinf(), torch.ones_like(room), room / (1 + room))


def _bottleneck(cmdp: LayeredCMDP, costs: Tensor | None) -> tuple[Tensor, Tensor]:
    """W(x_0) = rho `(...)`, by W(x) = max_a min(s(x,a), min over possible successors y of W(y)), and the policy of its maxima."""
    layout = cmdp.layout
    costs = cmdp.costs if costs is None else _with_constraints(layout, costs).to(cmdp.transitions)
    try:
        batch = torch.broadcast_shapes(cmdp.batch_shape, costs.shape[:-4])
    except RuntimeError:
        raise InvalidInput(
            f"costs has batch shape {tuple(costs.shape[:-4])}; it must broadcast with the CMDP's {tuple(cmdp.batch_shape)}."
        ) from None
    # without constraints every pair has infinite room
    room = 0 - costs.amax(-4) if costs.shape[-4] else costs.new_full((*costs.shape[:-4], *layout.pair_shape), torch.inf)
    value = room.new_full((*batch, layout.states), torch.inf)
    choices = []
    for k in reversed(range(layout.layers)):
        ahead = torch.where(cmdp.transitions[..., k, :, :, :] > 0, value[..., None, None, :], torch.inf).amin(-1)
        value, best = torch.minimum(room[..., k, :, :], ahead).max(-1)
        choices.append(best)
    return value[..., 0], _deterministic(cmdp, torch.stack(choices[::-1], dim=-2))


def _deterministic(cmdp: LayeredCMDP, choices: Tensor) -> Tensor:
    """The policy that takes the actions `choices`, `(... x L x S)`: `(... x L x S x A)`."""
    taken = choices.unsqueeze(-1) == torch.arange(cmdp.layout.actions, device=choices.device)
    return (taken & cmdp.layout.pair_mask(choices.device)).to(cmdp.dtype)


def _rewards(cmdp: LayeredCMDP, rewards: Tensor | None) -> Tensor:
    if rewards is None:
        return cmdp.rewards
    cmdp.layout.check_shape("rewards", rewards, kind="pair")
    return _to_batch(cmdp, "rewards", rewards, 3)


def _costs(cmdp: LayeredCMDP, costs: Tensor | None) -> Tensor:
    if costs is None:
        return cmdp.costs
    return _to_batch(cmdp, "costs", _with_constraints(cmdp.layout, costs), 4)


def _with_constraints(layout: Layout, costs: Tensor) -> Tensor:
    """The costs, refused if they do not end in (m x L x S x A)."""
    layout.check_shape("costs", costs, kind="pair")
    if costs.dim() < 4:
        raise InvalidInput(f"costs has shape {tuple(costs.shape)}; it needs a constraint axis before (L x S x A).")
    return costs


def _to_batch(cmdp: LayeredCMDP, name: str, tensor: Tensor, axes: int) -> Tensor:
    """Give a tensor the CMDP's batch shape."""
    try:
        return tensor.to(cmdp.transitions).expand(*cmdp.batch_shape, *tensor.shape[-axes:])
    except RuntimeError:
        raise InvalidInput(
            f"{name} has batch shape {tuple(tensor.shape[:-axes])}; it must broadcast to the CMDP's {tuple(cmdp.batch_shape)}."
        ) from None


def _instances(cmdp: LayeredCMDP, rewards: Tensor, costs: Tensor) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Each CMDP of the batch as float64 arrays over real entries: transitions `(L x S x A x S)`, rewards `(n)`, costs `(m x n)`."""
    mask = cmdp.layout.pair_mask(cmdp.device)
    size = cmdp.batch_shape.numel()
    flat = (
        cmdp.transitions.reshape(size, *cmdp.layout.transition_shape),
        rewards[..., mask].reshape(size, int(mask.sum())),
        costs[..., mask].reshape(size, costs.shape[-4], int(mask.sum())),
    )
    arrays = [tensor.detach().to("cpu", torch.float64).numpy() for tensor in flat]
    yield from zip(*arrays, strict=True)


@lru_cache(maxsize=64)
def _flow_pattern(layout: Layout) -> tuple[np.ndarray, ...]:
    """Where the flow equations have entries: (rows, columns) of the outflow, then (rows, columns) of the inflow and their mask."""
    state, pair, transition = (mask.numpy() for mask in (layout.state_mask(), layout.pair_mask(), layout.transition_mask()))
    row = np.full(state.shape, -1)
    row[state] = np.arange(state.sum())
    column = np.full(pair.shape, -1)
    column[pair] = np.arange(pair.sum())
    inner = transition.copy()
    inner[-1] = False  # what flows into the terminal state needs no equation
    k, x, a, y = inner.nonzero()
    return np.broadcast_to(row[:, :, None], pair.shape)[pair], column[pair], row[(k + 1) % layout.layers, y], column[k, x, a], inner


def _flow_rows(layout: Layout, transitions: np.ndarray) -> csr_array:
    """One row a state of layers 0 to L-1: outflow minus inflow. Equal to one at x_0, row 0, and zero elsewhere."""
    out_row, out_column, in_row, in_column, inner = _flow_pattern(layout)
    entries = np.concatenate([np.ones(len(out_row)), -transitions[inner]])
    index = (np.concatenate([out_row, in_row]), np.concatenate([out_column, in_column]))
    return coo_array((entries, index), shape=(out_row.max() + 1, len(out_column))).tocsr()


def _solve(
    objective: np.ndarray, flow: csr_array, safety: csr_array, limits: np.ndarray, free_last: bool = False
) -> OptimizeResult | None:
    """Minimise over q >= 0 with the flow equations and safety @ q <= limits; None if there is no such q."""
    source = np.zeros(flow.shape[0])
    source[0] = 1
    bounds = np.tile((0.0, np.inf), (len(objective), 1))
    if free_last:
        bounds[-1, 0] = -np.inf
    tight = {"primal_feasibility_tolerance": LP_TOLERANCE, "dual_feasibility_tolerance": LP_TOLERANCE}
    # an ill-conditioned program can defeat presolve or the tight tolerances, never all of these
    for options in (tight, {**tight, "presolve": False}, {}):
        result = linprog(
            objective, A_ub=safety, b_ub=limits, A_eq=flow, b_eq=source, bounds=bounds, method="highs", options=options
        )
        if result.status == 0:
            return result
        if result.status == 2:
            return None
    raise TorchCMDPError(f"HiGHS could not solve the linear program of a CMDP: {result.message}")


def _on_meta(cmdp: LayeredCMDP) -> Optimum:
    """Shapes without values, so that a whole experiment can be traced on the meta device."""
    value = cmdp.rewards.new_zeros(cmdp.batch_shape)
    return Optimum(value, torch.zeros_like(cmdp.transitions), value.bool())
