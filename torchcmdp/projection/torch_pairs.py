"""The dual of the projection in batched torch: the pairs' responses, its gradient, its Hessian, and steps along it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchcmdp.layout import Layout

# Stands for ln 0 where arithmetic with -inf would make NaN.
NEVER = -1e30


class Problem(NamedTuple):
    """A batch of instances with harmless padding: padded pairs have free intervals, padded successors no interval at all."""

    layout: Layout
    target: Tensor  # (B x L x S x A x K)
    lower: Tensor  # (B x L x S x A x K)
    upper: Tensor  # (B x L x S x A x K)
    costs: Tensor  # (B x m x L x S x A)
    cap: Tensor  # (B x 1)

    def take(self, index: Tensor) -> Problem:
        """Some of the instances."""
        return Problem(self.layout, *(tensor[index] for tensor in self[1:]))

    def scaled(self, temperature: Tensor) -> Problem:
        """The problem with target and cap divided by a temperature `(B)`."""
        return self._replace(target=self.target / temperature[:, None, None, None, None], cap=self.cap / temperature[:, None])


class Response(NamedTuple):
    """Every pair's answer to potentials and multipliers, with every layer's mass shifted to one."""

    v: Tensor  # (B x L x S), shifted
    value: Tensor  # (B), the dual value v(x_0)
    p: Tensor  # (B x L x S x A x K)
    at_lower: Tensor  # (B x L x S x A x K), bool
    at_upper: Tensor
    t: Tensor  # (B x L x S x A), with p = exp(t + z) on the free entries
    s: Tensor  # (B x L x S x A)

    def take(self, index: Tensor) -> Response:
        """Some of the instances."""
        return Response(*(tensor[index] for tensor in self))

    def where(self, choose: Tensor, other: Response) -> Response:
        """This response where `choose` `(B)`, the other elsewhere."""
        return Response(*(torch.where(choose.reshape(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(self, other, strict=True)))


def make_problem(layout: Layout, target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, cap: float) -> Problem:
    """Put harmless values in the padding."""
    real, pairs = layout.transition_mask(target.device), layout.pair_mask(target.device).unsqueeze(-1)
    return Problem(
        layout,
        torch.where(real, target, torch.where(pairs, NEVER, 0.0).to(target.dtype)),
        torch.where(real, lower, 0.0),
        torch.where(real, upper, torch.where(pairs, 0.0, 1.0).to(target.dtype)),
        torch.where(layout.pair_mask(target.device), costs, 0.0),
        torch.full((target.shape[0], 1), cap, dtype=target.dtype, device=target.device),
    )


def next_potentials(layout: Layout, v: Tensor) -> Tensor:
    """v(y) of each pair's successors, zero at the terminal layer: `(B x L x S x A x K)`, or `(B x L x 1 x 1 x S)` without lists."""
    return layout.ahead(torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], 1))


def respond(problem: Problem, z: Tensor, fixed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """p, at_lower, at_upper, psi and t of every pair: a softmax, and variable fixing where that leaves the interval."""
    lower, upper = problem.lower, problem.upper
    if fixed:
        return fix_variables(z, lower, upper, fixed)
    largest = z.amax(-1, keepdim=True)
    p = (z - largest).exp_()
    total = p.sum(-1, keepdim=True)
    p /= total
    t = -(largest + total.log_()).squeeze(-1)
    held = torch.zeros(2, *z.shape, dtype=torch.bool, device=z.device)
    psi = t.clone()
    rows = (torch.maximum(lower - p, p - upper).amax(-1) > 0).flatten().nonzero().squeeze(-1)
    if len(rows):
        found = fix_variables(z.flatten(0, -2)[rows], lower.flatten(0, -2)[rows], upper.flatten(0, -2)[rows], fixed)
        for whole, part in zip((p, *held), found[:3], strict=True):
            whole.view(-1, z.shape[-1])[rows] = part
        psi.view(-1)[rows], t.view(-1)[rows] = found[3:]
    return p, held[0], held[1], psi, t


def fix_variables(z: Tensor, lower: Tensor, upper: Tensor, fixed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """p, at_lower, at_upper, psi and t of pairs `(... x S)` by variable fixing (see `kernels.pairs.respond_steep`).

    The successors come first inside: sums over a short last axis are slow.
    """
    z, lower, upper = (tensor.movedim(-1, 0).contiguous() for tensor in (z, lower, upper))
    at_lower = at_upper = torch.zeros_like(z, dtype=torch.bool)
    free = ~at_lower
    bound, mass = torch.zeros_like(z), torch.ones_like(z[0])
    for _ in range(len(z) + 1):
        masked = torch.where(free, z, NEVER)
        largest = masked.amax(0)
        share = (masked - largest).exp_()
        total = share.sum(0)
        p = share * (mass / total)
        clipped = torch.minimum(torch.maximum(p, lower), upper)
        off = torch.where(free, clipped - p, 0.0)
        balance = off.sum(0)
        to_lower, to_upper = (off > 0) & (balance >= 0), (off < 0) & (balance <= 0)
        if not fixed and not bool((to_lower | to_upper).any()):
            break
        at_lower, at_upper = at_lower | to_lower, at_upper | to_upper
        bound = torch.where(to_lower | to_upper, clipped, bound)
        free = ~(at_lower | at_upper)
        mass = (1 - bound.sum(0)).clamp_min(0)
    p = torch.where(free, p, bound)
    positive = p > 0
    scored = torch.where(free, 0.0, torch.where(positive, p, 1.0).log() - z)
    # on the free entries ln p - z is t; padded ones may be the only free ones left, and have none of the mass
    open_pair = (mass > 0) & (largest > 0.5 * NEVER)
    t = torch.where(open_pair, mass, 1.0).log() - largest - total.log()
    psi = torch.where(open_pair, mass * t, 0.0) + (p * scored).sum(0)
    t = torch.where(open_pair, t, psi)
    return p.movedim(0, -1), at_lower.movedim(0, -1), at_upper.movedim(0, -1), psi, t


def evaluate(problem: Problem, v: Tensor, lam: Tensor, fixed: bool) -> Response:
    """The pairs' responses at (v, lam), with the potentials shifted so that every layer has mass one."""
    p, at_lower, at_upper, psi, t = respond(problem, problem.target + next_potentials(problem.layout, v), fixed)
    penalty = (lam[:, :, None, None, None] * problem.costs).sum(1)
    pairs = problem.layout.pair_mask(v.device)
    log_s = torch.where(pairs, -psi - v.unsqueeze(-1) - penalty, NEVER)
    log_mass = log_s.flatten(2).logsumexp(-1)
    shift = log_mass.flip(-1).cumsum(-1).flip(-1)
    states = problem.layout.state_mask(v.device)
    shifted = torch.where(states, v + shift.unsqueeze(-1), 0.0)
    t = t - torch.cat([shift[:, 1:], torch.zeros_like(shift[:, :1])], 1)[:, :, None, None]
    s = torch.where(pairs, (log_s - log_mass[:, :, None, None]).exp(), 0.0)
    return Response(shifted, shifted[:, 0, 0], p, at_lower, at_upper, t, s)


def flows(layout: Layout, response: Response) -> tuple[Tensor, Tensor]:
    """Inflow and outflow of every state, `(B x L x S)` each."""
    outflow = response.s.sum(-1)
    arrivals = layout.arrivals(response.s.unsqueeze(-1) * response.p)
    start = torch.zeros_like(outflow[:, :1])
    start[..., 0] = 1
    return torch.cat([start, arrivals[:, :-1]], 1), outflow


def hessian(problem: Problem, response: Response) -> tuple[Tensor, Tensor, Tensor]:
    """The dual's Hessian: potentials `(B x LS x LS)`, border `(B x LS x m)`, multipliers `(B x m x m)`."""
    batch, layers, states, actions = response.s.shape
    size, m, layout = layers * states, problem.costs.shape[1], problem.layout
    held = response.at_lower | response.at_upper
    p, s = layout.dense(response.p).flatten(2, 3), response.s.flatten(2).unsqueeze(-1)
    free = layout.dense(torch.where(held, 0.0, response.p)).flatten(2, 3)
    free_mass = free.sum(-1, keepdim=True)
    normal = free / torch.where(free_mass > 0, free_mass, 1.0)
    arrivals = (s * p).mT @ p - (s * free).mT @ normal + torch.diag_embed((s * free).sum(2))
    full = torch.zeros(batch, layers, states, layers, states, dtype=p.dtype, device=p.device)
    blocks = torch.diagonal(full, dim1=1, dim2=3)  # (B x S x S x L)
    blocks.copy_(torch.diag_embed(response.s.sum(-1)).permute(0, 2, 3, 1))
    if layers > 1:
        blocks[..., 1:] += arrivals[:, :-1].permute(0, 2, 3, 1)
        moves = -(s * p).unflatten(2, (states, actions)).sum(3)[:, :-1].permute(0, 2, 3, 1)  # (B x x x y x L-1)
        torch.diagonal(full, offset=1, dim1=1, dim2=3).copy_(moves)
        torch.diagonal(full, offset=-1, dim1=1, dim2=3).copy_(moves.transpose(1, 2))
    weighted = response.s.unsqueeze(1) * problem.costs
    leaving = weighted.sum(-1).flatten(2)
    entering = torch.zeros_like(leaving).unflatten(2, (layers, states))
    if layers > 1:
        entering[:, :, 1:] = layout.arrivals(weighted.unsqueeze(-1) * response.p.unsqueeze(1))[:, :, :-1]
    border = (leaving - entering.flatten(2)).mT
    corner = weighted.flatten(2) @ problem.costs.flatten(2).mT
    return full.reshape(batch, size, size), border, corner.reshape(batch, m, m)


def factor(matrix: Tensor, border: Tensor, corner: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scale by the diagonal, factor, and eliminate the potentials: (Cholesky, scale, reduced border, Schur complement)."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    negligible = diagonal < 1e-280
    scale = torch.where(negligible, 0.0, diagonal.clamp_min(1e-280).rsqrt())
    scaled = matrix * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    scaled = scaled + torch.diag_embed(torch.where(negligible, 1.0, 1e-15).to(matrix.dtype))
    cholesky, failed = torch.linalg.cholesky_ex(scaled)
    # a failed factorisation (rounding) is replaced by the scaled identity: a plain scaled gradient step
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    cholesky = torch.where((failed > 0)[:, None, None], identity, cholesky)
    reduced = torch.linalg.solve_triangular(cholesky, scale.unsqueeze(-1) * border, upper=False)
    schur = corner - reduced.mT @ reduced
    own = corner.diagonal(dim1=-2, dim2=-1)
    ridge = 1e-13 * own + 1e-250 - schur.diagonal(dim1=-2, dim2=-1).clamp_max(0)
    return cholesky, scale, reduced, schur + torch.diag_embed(ridge)
