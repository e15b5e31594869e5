"""The dual of the projection in batched torch: the pairs' responses, its gradient and its Hessian.

Successors are the first axis and the batch is the last one: a sum over a short axis is then one of long vectors, which is up to
three times as fast.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchcmdp.kernels.limits import LEFT_BY_ROUNDING, NEVER
from torchcmdp.layout import Layout


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """tensor[..., index], in a quarter of the time."""
    rows = math.prod(tensor.shape[:-1])
    return tensor.reshape(rows, tensor.shape[-1]).gather(1, index.expand(rows, -1)).view(*tensor.shape[:-1], len(index))


def put(tensor: Tensor, index: Tensor, part: Tensor) -> None:
    """tensor[..., index] = part, likewise."""
    rows = math.prod(tensor.shape[:-1])
    tensor.view(rows, tensor.shape[-1]).scatter_(1, index.expand(rows, -1), part.reshape(rows, len(index)))


class Problem(NamedTuple):
    """A batch of instances with harmless padding: padded pairs have free intervals, padded successors no interval at all."""

    layout: Layout
    target: Tensor  # (K x L x S x A x B)
    lower: Tensor  # (K x L x S x A x B)
    upper: Tensor  # (K x L x S x A x B)
    costs: Tensor  # (L x S x A x m x B)
    cap: Tensor  # (B)

    def take(self, index: Tensor) -> Problem:
        """Some of the instances."""
        return Problem(self.layout, *(take(tensor, index) for tensor in self[1:]))

    def scaled(self, temperature: Tensor) -> Problem:
        """The problem with target and cap divided by a temperature `(B)`."""
        return self._replace(target=self.target / temperature, cap=self.cap / temperature)


class Response(NamedTuple):
    """Every pair's answer to potentials and multipliers, with every layer's mass shifted to one."""

    v: Tensor  # (L x S x B), shifted
    p: Tensor  # (K x L x S x A x B)
    side: Tensor  # (K x L x S x A x B), one where p is held at its lower end, minus one at its upper end, zero where it is free
    s: Tensor  # (L x S x A x B)
    inflow: Tensor  # (L x S x B)
    outflow: Tensor  # (L x S x B)
    used: Tensor  # (m x B), what is spent of each constraint

    @property
    def value(self) -> Tensor:
        """The dual value v(x_0): `(B)`."""
        return self.v[0, 0]

    def take(self, index: Tensor) -> Response:
        """Some of the instances."""
        return Response(*(take(tensor, index) for tensor in self))

    def put(self, index: Tensor, part: Response) -> None:
        """Overwrite some of the instances."""
        for whole, tensor in zip(self, part, strict=True):
            put(whole, index, tensor)

    def where(self, choose: Tensor, other: Response) -> Response:
        """This response where `choose` `(B)`, the other elsewhere."""
        return Response(*(torch.where(choose, a, b) for a, b in zip(self, other, strict=True)))


def batch_last(tensor: Tensor) -> Tensor:
    """`(B x L x S x A x K)` as `(K x L x S x A x B)`, and the other way round."""
    return tensor.transpose(0, -1).contiguous()


def make_problem(layout: Layout, target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor, cap: float) -> Problem:
    """Put harmless values in the padding, and the batch last.

    Args:
        layout: Of all instances.
        target, lower, upper: `(B x L x S x A x K)`.
        costs: `(B x m x L x S x A)`.
        cap: On the sum of the multipliers.
    """
    real, pairs = layout.transition_mask(target.device), layout.pair_mask(target.device)
    outside = torch.where(pairs, 0.0, 1.0).to(target.dtype).unsqueeze(-1)
    return Problem(
        layout,
        # no real successor is as far from possible as padding
        batch_last(torch.where(real, target.clamp_min(0.1 * NEVER), NEVER * (1 - outside))),
        batch_last(torch.where(real, lower, 0.0)),
        batch_last(torch.where(real, upper, outside)),
        torch.where(pairs, costs, 0.0).permute(2, 3, 4, 1, 0).contiguous(),
        torch.full(target.shape[:1], cap, dtype=target.dtype, device=target.device),
    )


@lru_cache(maxsize=256)
def next_states(layout: Layout, device: torch.device) -> Tensor:
    """The state that each slot belongs to, numbered through all layers, `(K x L x S x A)`; of lists only."""
    layer = torch.arange(1, layout.layers + 1, device=device)[:, None, None, None]
    with torch.inference_mode(False):
        return (layer * layout.width + layout.successors(device).clamp_min(0)).movedim(-1, 0).contiguous()


def ahead(layout: Layout, v: Tensor) -> Tensor:
    """v(y) of each pair's successors, zero at the terminal layer: `(K x L x S x A x B)`, or `(S x L x 1 x 1 x B)` without lists."""
    if layout.lists is None:
        return torch.cat([v[1:], torch.zeros_like(v[:1])]).transpose(0, 1)[:, :, None, None]
    return torch.cat([v, torch.zeros_like(v[:1])]).flatten(0, 1)[next_states(layout, v.device)]


def arrivals(layout: Layout, flow: Tensor) -> Tensor:
    """What arrives in every state, zero in the first layer: `(L x S x ...)`, of a flow `(K x L-1 x S x A x ...)`."""
    found: Tensor = flow.new_zeros(layout.layers, layout.width, *flow.shape[4:])
    if layout.lists is None:
        # no matrix product: that of a batch may round a sum by its place in the batch, and an instance must not know its place
        torch.sum(flow, (2, 3), out=found[1:].transpose(0, 1))
    else:
        places = next_states(layout, flow.device)[:, :-1]
        found.flatten(0, 1).index_add_(0, places.flatten(), flow.flatten(0, 3))
    return found


def arrivals_at(layout: Layout, flow: Tensor, layer: int) -> Tensor:
    """`arrivals` in one layer but the first: `(S x B)`, of a flow `(K x L x S x A x B)`."""
    before = flow[:, layer - 1]
    if layout.lists is None:
        return before.sum((1, 2))
    places = next_states(layout, flow.device)[:, layer - 1] % layout.width
    return flow.new_zeros(layout.width, flow.shape[-1]).index_add_(0, places.flatten(), before.flatten(0, 2))


def exponential(x: Tensor) -> Tensor:
    """e^x, in place. Where the power of two is zero it is as fast as anywhere, and `exp` takes four times as long."""
    return x.mul_(1 / math.log(2)).exp2_()


def respond(problem: Problem, z: Tensor, fixed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """p, side and psi of every pair: a softmax, and variable fixing where that leaves the interval."""
    lower, upper = problem.lower, problem.upper
    largest = z.amax(0)
    p = exponential(z - largest)
    total = p.sum(0)
    p /= total
    if fixed:
        return fix_variables(z, p, lower, upper, fixed)
    psi = largest.add_(total.log_()).neg_()
    side = torch.zeros_like(p)
    rows = (p.clamp(lower, upper).sub_(p).abs_().amax(0) > 0).flatten().nonzero().squeeze(-1)
    if len(rows):
        part_z, part_p, part_lower, part_upper = (take(tensor.flatten(1), rows) for tensor in (z, p, lower, upper))
        found = fix_variables(part_z, part_p, part_lower, part_upper, fixed)
        for whole, part in zip((p.flatten(1), side.flatten(1), psi.flatten()), found, strict=True):
            put(whole, rows, part)
    return p, side, psi


def fix_variables(z: Tensor, p: Tensor, lower: Tensor, upper: Tensor, fixed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """p, side and psi of pairs `(K x ...)` with softmax p, by variable fixing (see `kernels.pairs.fix_all`).

    Masks are numbers here: a `where` that no processor can predict takes four times as long as a product.
    """
    side, one = torch.zeros_like(z), torch.ones_like(z[0])
    for _ in range(len(z)):
        clipped = p.clamp(lower, upper)
        off = clipped - p  # zero where p is held
        # those below their interval are fixed where it takes more mass to lift them than the others give, else those above
        towards = torch.copysign(one, off.sum(0))
        fix = off.mul_(towards).sign_().clamp_min_(0)
        if not fixed and not bool(fix.amax()):
            break
        held = side.addcmul_(fix, towards).abs()
        bound = clipped.mul_(held)
        # anew each time: shares taken over from before have lost the digits of rare successors
        masked = torch.add(z, held, alpha=NEVER)
        # padded entries may be the only free ones left, and have none of the mass
        largest = masked.amax(0).clamp_min_(0.5 * NEVER)
        mass = torch.sub(1, bound.sum(0)).clamp_min_(0)
        p = exponential(masked.sub_(largest))
        total = p.sum(0).clamp_min_(1)
        p.mul_(mass / total).add_(bound)
    # ln p - z of the free entries; the logarithm of a zero takes ten times as long
    t = (mass / total).clamp_min_(1e-300).log_().sub_(largest).mul_(largest > 0.5 * NEVER)
    psi = bound.clamp_min(1e-300).log_().sub_(z).mul_(bound).sum(0).addcmul_(mass, t)
    return p, side, psi


def evaluate(problem: Problem, v: Tensor, lam: Tensor, fixed: bool) -> Response:
    """The pairs' responses at (v, lam), with the potentials shifted so that every layer has mass one."""
    p, side, psi = respond(problem, problem.target + ahead(problem.layout, v), fixed)
    pairs = problem.layout.pair_mask(v.device).unsqueeze(-1)
    log_s = torch.where(pairs, psi.add_(v.unsqueeze(2)).add_((lam * problem.costs).sum(3)).neg_(), NEVER)
    largest = log_s.amax((1, 2), keepdim=True)
    s = exponential(log_s - largest)
    total = s.sum((1, 2), keepdim=True)
    s /= total
    shift = (largest + total.log_()).squeeze(2).flip(0).cumsum(0).flip(0)
    return answered(problem, v + shift, p, side, s)


def answered(problem: Problem, v: Tensor, p: Tensor, side: Tensor, s: Tensor) -> Response:
    """A response with its flows."""
    inflow = arrivals(problem.layout, s[:-1] * p[:, :-1])
    inflow[0, 0] = 1
    v = torch.where(problem.layout.state_mask(v.device).unsqueeze(-1), v, 0.0)
    return Response(v, p, side, s, inflow, s.sum(2), (problem.costs * s.unsqueeze(3)).sum((0, 1, 2)))


def close_corners(problem: Problem, response: Response) -> tuple[Response, Tensor]:
    """The response with what rounding has left to free entries taken from them (see `kernels.pull.close_corners`).

    Returns:
        Also ln p - z of the free entries, psi where there are none: `(L x S x A x B)`.
    """
    free = response.side == 0
    left = torch.where(free, response.p, 0.0).sum(0)
    corner = (left > 0) & (left <= LEFT_BY_ROUNDING)
    p = torch.where(free & corner, problem.lower, response.p)
    side = torch.where(free & corner, 1.0, response.side)
    z = problem.target + ahead(problem.layout, response.v)
    psi = torch.where(p > 0, p * (p.log() - z), 0.0).sum(0)
    t = torch.where(left > LEFT_BY_ROUNDING, left.log() - torch.where(free, z, NEVER).logsumexp(0), psi)
    return response._replace(p=p, side=side), t


def cholesky(matrix: Tensor, fixed: bool) -> Tensor:
    """Lower factors `(B x n x n)`; the identity where rounding has left none: a plain scaled gradient step."""
    lower: Tensor
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if fixed or bool(failed.any()):
        identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        lower = torch.where((failed > 0)[:, None, None], identity, lower)
    return lower


def factor(layout: Layout, response: Response, fixed: bool) -> tuple[Tensor, Tensor]:
    """The dual's Hessian in the potentials, scaled to a diagonal of ones.

    Returns:
        Its Cholesky factor `(B x LS x LS)` and the scale `(B x LS)`.
    """
    batch, size = response.v.shape[-1], layout.layers * layout.width
    p, side, s = response.p[:, :-1], response.side[:, :-1], response.s[:-1]
    free = torch.addcmul(p, p * side, side, value=-1)
    mass = free.sum(0)
    if layout.lists is not None:
        p, free = (_dense(layout, tensor) for tensor in (p, free))
    flow, taken = s * p, s / mass.clamp_min(1e-300) * free
    # a Cholesky factorisation reads the lower triangle only, so no more of it is worked out
    met = p.new_zeros(layout.width, *flow.shape[:2], batch)
    for y, (to, off) in enumerate(zip(flow, taken, strict=True), 1):
        torch.sum(torch.addcmul(p[:y] * to, free[:y], off, value=-1), (2, 3), out=met[y - 1, :y])
    met.diagonal().add_((s * free).sum((2, 3)).permute(1, 2, 0))
    full = torch.zeros(batch, layout.layers, layout.width, layout.layers, layout.width, dtype=p.dtype, device=p.device)
    torch.diagonal(full, dim1=1, dim2=3)[..., 1:] = met.permute(3, 0, 1, 2)
    torch.diagonal(full, offset=-1, dim1=1, dim2=3).copy_(-flow.sum(3).permute(3, 0, 2, 1))
    matrix = full.view(batch, size, size)
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    diagonal += response.outflow.flatten(0, 1).mT
    negligible = diagonal < 1e-280
    scale = torch.where(negligible, 0.0, diagonal.clamp_min(1e-280).rsqrt())
    matrix *= scale.unsqueeze(2)
    matrix *= scale.unsqueeze(1)
    diagonal += torch.where(negligible, 1.0, 1e-15)
    return cholesky(matrix, fixed), scale


def _dense(layout: Layout, tensor: Tensor) -> Tensor:
    """Slots of all layers but the last one, `(K x L-1 x S x A x B)`, spread over the states of the next layer."""
    places = next_states(layout, tensor.device)[:, :-1, ..., None].expand_as(tensor) % layout.width
    return tensor.new_zeros(layout.width, *tensor.shape[1:]).scatter_add_(0, places, tensor)
