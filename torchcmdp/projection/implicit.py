"""Derivatives of the projection, from one linear map, its transpose, and one differentiable Newton correction.

With the active bounds frozen, every pair's ln q is a smooth function of theta = (target, lower, upper, costs) and of the duals
x = (potentials, multipliers), and the duals move so that flow and binding costs stay as they are. `push` is the derivative of ln q,
`pull` its transpose; logarithms keep both finite where q underflows. The second derivative is the gradient of `push` in theta, at
duals that one Newton correction with a frozen Hessian makes functions of theta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from torchcmdp.errors import InvalidInput
from torchcmdp.kernels.limits import ACCEPTABLE_RESIDUAL, DEPENDENT, NEVER
from torchcmdp.layout import Layout
from torchcmdp.projection.torch_multipliers import units
from torchcmdp.projection.torch_pairs import batch_last, close_corners, evaluate, factor, make_problem

Duals = tuple[Tensor, Tensor]  # potentials (B x L x S) and multipliers (B x m)


class Answer(NamedTuple):
    """Every pair's answer to the duals."""

    p: Tensor  # (B x L x S x A x K)
    at_lower: Tensor  # (B x L x S x A x K), bool
    at_upper: Tensor
    t: Tensor  # (B x L x S x A), with p = exp(t + target + v(y)) on the free entries
    s: Tensor  # (B x L x S x A)
    v: Tensor  # (B x L x S), the potentials, perhaps shifted so that every layer has mass one


class How(NamedTuple):
    """Which problem, and who answers its pairs and solves its Newton system: `torch_system`, or one with the same signature."""

    layout: Layout
    system: Callable[..., tuple[Answer, Callable[[Tensor], Tensor]]]


class Point(NamedTuple):
    """A solution with its active bounds, and solves with its Newton system."""

    layout: Layout
    costs: Tensor  # (B x m x L x S x A)
    multipliers: Tensor  # (B x m)
    p: Tensor  # (B x L x S x A x K)
    s: Tensor  # (B x L x S x A)
    price: Tensor  # (B x L x S x A x K), what a pair's value changes by when the bound that holds p moves
    free: Tensor  # (B x L x S x A x K), bool: p is strictly between its bounds
    at_lower: Tensor  # (B x L x S x A x K), bool
    at_upper: Tensor
    solve: Callable[[Duals], Duals]

    def moves(self, d_target: Tensor, d_bound: Tensor, d_exponent: Tensor) -> Tensor:
        """The change of ln q at fixed active bounds, of target, of bounds, and of ln s by itself `(B x L x S x A)`."""
        free, total = self._free()
        given = (free * d_target + d_bound).sum(-1, keepdim=True) / total
        giving = self.free | (free.sum(-1, keepdim=True) <= 0)
        own = torch.where(self.free, d_target, d_bound / torch.where(self.p > 0, self.p, 1.0))
        held = own - torch.where(giving, given, 0.0)
        along = (self.p * d_target - self.price * d_bound).sum(-1) + d_exponent
        return torch.where(self.p > 0, held + along.unsqueeze(-1), 0.0)

    def moves_back(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The transpose of `moves`."""
        free, total = self._free()
        grad = torch.where(self.p > 0, grad, 0.0)
        exponent = grad.sum(-1)
        giving = torch.where(self.free, grad, 0.0).sum(-1, keepdim=True)
        closed = free.sum(-1, keepdim=True) <= 0
        given = torch.where(closed, exponent.unsqueeze(-1), giving) / total
        target = torch.where(self.free, grad, 0.0) - free * given + self.p * exponent.unsqueeze(-1)
        bound = grad / torch.where(self.p > 0, self.p, 1.0) - given - self.price * exponent.unsqueeze(-1)
        return target, torch.where(self.free | (self.p <= 0), 0.0, bound), exponent

    def _free(self) -> tuple[Tensor, Tensor]:
        """p where it is free, and its sum: what gives way to a moved bound. Where nothing is free, the whole row does."""
        free = torch.where(self.free, self.p, 0.0)
        total = free.sum(-1, keepdim=True)
        return free, torch.where(total > 0, total, 1.0)

    def constrain(self, flow: Tensor) -> Duals:
        """Outflow - inflow of every state, and the costs, of a flow `(B x L x S x A x K)`."""
        pair, arrivals = flow.sum(-1), self.layout.arrivals(flow)
        net = pair.sum(-1) - torch.cat([torch.zeros_like(arrivals[:, :1]), arrivals[:, :-1]], 1)
        return net, (self.costs * pair.unsqueeze(1)).sum(dim=(2, 3, 4))

    def constrain_back(self, duals: Duals) -> tuple[Tensor, Tensor]:
        """The transpose of `constrain`, as a part for pairs and one for successors: their sum is it."""
        v, m = duals
        pair = v.unsqueeze(-1) + (m[:, :, None, None, None] * self.costs).sum(1)
        return pair, -next_potentials(self.layout, v)


def next_potentials(layout: Layout, v: Tensor) -> Tensor:
    """v(y) of each pair's successors, zero at the terminal layer: `(B x L x S x A x K)`, or `(B x L x 1 x 1 x S)` without lists."""
    return layout.ahead(torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], 1))


def push(point: Point, tangents: tuple[Tensor, ...]) -> Tensor:
    """The tangent of ln q for tangents of target, lower, upper and costs."""
    d_target, d_lower, d_upper, d_costs = tangents
    d_bound = torch.where(point.at_lower, d_lower, torch.where(point.at_upper, d_upper, 0.0)) * (point.p > 0)
    direct = point.moves(d_target, d_bound, -(point.multipliers[:, :, None, None, None] * d_costs).sum(1))
    net, used = point.constrain(point.s.unsqueeze(-1) * point.p * direct)
    duals = point.solve((net, used + (d_costs * point.s.unsqueeze(1)).sum(dim=(2, 3, 4))))
    return direct - _along(point, duals)


def pull(point: Point, grad: Tensor) -> tuple[Tensor, ...]:
    """The transpose of `push`: the cotangent of ln q pulled back to target, lower, upper and costs."""
    v, m = point.solve(point.constrain(point.moves_back(grad)[0]))
    pair, successor = point.constrain_back((-v, -m))
    target, bound, exponent = point.moves_back(grad + point.s.unsqueeze(-1) * point.p * (pair.unsqueeze(-1) + successor))
    costs = -m[:, :, None, None, None] * point.s.unsqueeze(1) - point.multipliers[:, :, None, None, None] * exponent.unsqueeze(1)
    return target, torch.where(point.at_lower, bound, 0.0), torch.where(point.at_upper, bound, 0.0), costs


def cotangent(occupancy: Tensor, of_occupancy: Tensor | None, of_logarithm: Tensor | None) -> Tensor | None:
    """The cotangent of ln q, from those of q and of ln q; None where there is neither."""
    if of_occupancy is None:
        return of_logarithm
    grad = of_occupancy * occupancy
    return grad if of_logarithm is None else grad + of_logarithm


def _along(point: Point, duals: Duals) -> Tensor:
    """The change of -ln q with the duals."""
    pair, successor = point.constrain_back(duals)
    return point.moves(successor.expand_as(point.p), torch.zeros_like(point.p), pair)


def pull_theta(
    point: Point, grad: Tensor, tangents: tuple[Tensor, ...], theta: tuple[Tensor, ...], v: Tensor
) -> tuple[Tensor, ...]:
    """The gradient in theta of <grad, push(tangents)>, through the duals as well: the second derivative."""
    m, size = point.multipliers.shape[1], v[0].numel()
    unit = torch.eye(size + m, dtype=v.dtype, device=v.device)
    columns = [point.solve((row[:size].view_as(v[:1]).expand_as(v), row[size:].expand_as(point.multipliers))) for row in unit]
    inverse = torch.stack([torch.cat([a.flatten(1), b], 1) for a, b in columns], 2)

    def solve(rhs: Duals) -> Duals:
        found = (inverse @ torch.cat([rhs[0].flatten(1), rhs[1]], 1).unsqueeze(-1)).squeeze(-1)
        return found[:, :size].view_as(v), found[:, size:]

    with torch.enable_grad():
        leaves = tuple(tensor.detach().requires_grad_() for tensor in theta)
        here = _respond(point, leaves, v, point.multipliers)
        source = torch.zeros_like(v)
        source[:, 0, 0] = 1
        net, used = here.constrain(here.s.unsqueeze(-1) * here.p)
        dv, dm = solve((net - source, used))
        there = _respond(point, leaves, v + dv, point.multipliers + dm)

        def refine(rhs: Duals) -> Duals:
            """Hessian^-1 rhs, with the derivative of the Hessian by one step of iterative refinement."""
            guess = solve(rhs)
            found = guess[0].detach(), guess[1].detach()
            back = there.constrain(there.s.unsqueeze(-1) * there.p * _along(there, found))
            more = solve((rhs[0] - back[0], rhs[1] - back[1]))
            return found[0] + more[0], found[1] + more[1]

        value = (grad * push(there._replace(solve=refine), tangents)).sum()
        return torch.autograd.grad(value, leaves, materialize_grads=True)


def _respond(point: Point, theta: tuple[Tensor, ...], v: Tensor, multipliers: Tensor) -> Point:
    """The pairs' responses at the active bounds of `point`, as differentiable functions of theta and the duals."""
    target, lower, upper, costs = theta
    real, pairs = point.layout.transition_mask(v.device), point.layout.pair_mask(v.device)
    z = torch.where(real & (point.p > 0), target.clamp_min(0.1 * NEVER) + next_potentials(point.layout, v), 0.0)
    bound = torch.where(point.at_lower, lower, torch.where(point.at_upper, upper, 0.0))
    left = torch.where(point.free.any(-1, keepdim=True), 1 - bound.sum(-1, keepdim=True), 1.0)
    share = torch.where(point.free, z, -torch.inf).masked_fill(~point.free.any(-1, keepdim=True), 0.0).softmax(-1)
    p = torch.where(point.free, left * share, bound)
    score = torch.where(p > 0, torch.where(p > 0, p, 1.0).log() - z, 0.0)
    psi = (p * score).sum(-1)
    penalty = (multipliers[:, :, None, None, None] * costs).sum(1)
    s = torch.where(pairs, (-psi - v.unsqueeze(-1) - penalty).exp(), 0.0)
    mass = torch.where(point.free, p, 0.0).sum(-1)
    t = torch.where(mass > 0, torch.where(point.free, p * score, 0.0).sum(-1) / torch.where(mass > 0, mass, 1.0), psi)
    price = torch.where(point.free | (p <= 0), 0.0, score - t.unsqueeze(-1))
    return point._replace(costs=costs, multipliers=multipliers, p=p, s=s, price=price)


def linearise(theta: tuple[Tensor, ...], duals: Duals, how: How) -> Point:
    """The solution that the duals say, ready for derivatives.

    Args:
        theta: target, lower, upper `(B x L x S x A x K)` and costs `(B x m x L x S x A)`.
        duals: Potentials `(B x L x S)` and multipliers `(B x m)`.
    """
    target, _, _, costs = theta
    multipliers = duals[1]
    real = how.layout.transition_mask(target.device)
    response, solve_potentials = how.system(theta, duals, how.layout)
    p = torch.where(real, response.p, 0.0)
    held, mass = response.at_lower | response.at_upper, p > 0
    z = torch.where(mass, target.clamp_min(0.1 * NEVER) + next_potentials(how.layout, response.v), 0.0)
    price = torch.where(held & mass, torch.where(mass, p, 1.0).log() - z - response.t.unsqueeze(-1), 0.0)
    active = (mass & ~held, response.at_lower & mass, response.at_upper & mass)
    point = Point(how.layout, costs, multipliers, p, response.s, price, *active, lambda rhs: rhs)
    # where the largest violation is positive the cap is used up, and what one multiplier gains another one loses
    scale = units(costs)
    violated = ((costs * response.s.unsqueeze(1)).sum(dim=(2, 3, 4)) > ACCEPTABLE_RESIDUAL * scale).any(1, keepdim=True)
    moving, level = multipliers > 0, torch.where(violated, scale, 0.0)
    return point._replace(solve=_newton_system(point, moving, level, solve_potentials))


def _newton_system(
    point: Point, moving: Tensor, level: Tensor, solve_potentials: Callable[[Tensor], Tensor]
) -> Callable[[Duals], Duals]:
    """Solves with the dual's Hessian over the potentials and the multipliers that can move at level . move = 0.

    Directions in which the multipliers do not matter (constraints that repeat, or oppose, or hold whatever one does) stay put.
    """
    if point.costs.shape[1] == 0:
        return lambda rhs: (solve_potentials(rhs[0].unsqueeze(1)).squeeze(1), rhs[1])
    weighted = point.costs * point.s.unsqueeze(1)
    arrivals = point.layout.arrivals(weighted.unsqueeze(-1) * point.p.unsqueeze(1))
    border = weighted.sum(-1) - torch.cat([torch.zeros_like(arrivals[:, :, :1]), arrivals[:, :, :-1]], 2)
    corner = weighted.flatten(2) @ point.costs.flatten(2).mT
    inner = solve_potentials(border)
    own = corner.diagonal(dim1=-2, dim2=-1)
    root = torch.where(moving & (own > 1e-250), own.clamp_min(1e-250).rsqrt(), 0.0)
    schur = root.unsqueeze(-1) * (corner - border.flatten(2) @ inner.flatten(2).mT) * root.unsqueeze(-2)
    normal = torch.nn.functional.normalize(root * level, dim=1).unsqueeze(-1)
    within = torch.eye(normal.shape[1], dtype=normal.dtype, device=normal.device) - normal @ normal.mT
    values, vectors = torch.linalg.eigh(within @ (0.5 * (schur + schur.mT)) @ within)
    inverse = torch.where(values > DEPENDENT, 1 / values.clamp_min(DEPENDENT), 0.0)

    def solve(rhs: Duals) -> Duals:
        v = solve_potentials(rhs[0].unsqueeze(1)).squeeze(1)
        left = root * (rhs[1] - (border * v.unsqueeze(1)).sum(dim=(2, 3)))
        m = root * (vectors @ (inverse.unsqueeze(-1) * (vectors.mT @ left.unsqueeze(-1)))).squeeze(-1)
        return v - (inner * m[:, :, None, None]).sum(1), m

    return solve


def torch_system(theta: tuple[Tensor, ...], duals: Duals, layout: Layout) -> tuple[Answer, Callable[[Tensor], Tensor]]:
    """The pairs' responses, and a solve with the Hessian of the potentials for columns `(B x C x L x S)`, on any device."""
    target, lower, upper, costs = theta
    problem = make_problem(layout, target, lower, upper, costs, cap=math.inf)
    # no host read keeps the derivative usable in fixed-iteration mode
    response, t = close_corners(problem, evaluate(problem, duals[0].movedim(0, -1), duals[1].mT, fixed=True))
    cholesky, scale = factor(layout, response, fixed=True)
    scale = scale.unsqueeze(1)

    def solve(columns: Tensor) -> Tensor:
        return (scale * torch.cholesky_solve((scale * columns.flatten(2)).mT, cholesky).mT).view_as(columns)

    p, side = batch_last(response.p), batch_last(response.side)
    t, s, v = (tensor.movedim(-1, 0) for tensor in (t, response.s, response.v))
    return Answer(p, side > 0, side < 0, t, s, v), solve


def vmapped(function: type[Function]) -> Callable[..., Any]:
    """`merged`, for an autograd function."""
    return merged(function.apply)


def merged(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of `torch.vmap` for a function of flat batches: one more axis is a larger batch."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        def flat(tensor: Tensor, dim: int | None) -> Tensor:
            moved = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            return moved.flatten(0, 1)

        larger = [flat(x, dim) if isinstance(x, Tensor) else x for x, dim in zip(inputs, in_dims, strict=True)]
        outputs = function(*larger)
        if isinstance(outputs, Tensor):
            return outputs.unflatten(0, (info.batch_size, -1)), 0
        return tuple(output.unflatten(0, (info.batch_size, -1)) for output in outputs), (0,) * len(outputs)

    return rule


class Push(Function):
    """`push` as a function of theta, duals, four tangents and how; the duals move with theta and carry no derivative themselves."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        return push(linearise(inputs[:4], inputs[4:6], inputs[10]), inputs[6:10])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _remember(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        theta, duals, tangents = ctx.saved_tensors[:4], ctx.saved_tensors[4:6], ctx.saved_tensors[6:]
        pulled = Pull.apply(*theta, *duals, grad, ctx.how)
        second = Second.apply(*theta, *duals, grad, *tangents, ctx.how) if any(ctx.needs_input_grad[:4]) else (None,) * 4
        return (*second, None, None, *pulled, None)

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> Tensor:
        if any(move is not None for move in moves[:4]):
            raise InvalidInput(
                "forward mode over forward mode of the projection is not available; use torch.func.hessian, or reverse mode once."
            )
        moved = [torch.zeros_like(x) if d is None else d for x, d in zip(ctx.saved_tensors[6:], moves[6:10], strict=True)]
        return Push.apply(*ctx.saved_tensors[:6], *moved, ctx.how)  # type: ignore[no-any-return]


class Pull(Function):
    """`pull` as a function of theta, duals, a cotangent and how."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return pull(linearise(inputs[:4], inputs[4:6], inputs[7]), inputs[6])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _remember(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        theta, duals, grad = ctx.saved_tensors[:4], ctx.saved_tensors[4:6], ctx.saved_tensors[6]
        second = Second.apply(*theta, *duals, grad, *tangents, ctx.how) if any(ctx.needs_input_grad[:4]) else (None,) * 4
        return (*second, None, None, Push.apply(*theta, *duals, *tangents, ctx.how), None)

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> tuple[Tensor, ...]:
        theta, duals, grad = ctx.saved_tensors[:4], ctx.saved_tensors[4:6], ctx.saved_tensors[6]
        moved = [torch.zeros_like(x) if d is None else d for x, d in zip(ctx.saved_tensors, moves[:7], strict=True)]
        second = Second.apply(*theta, *duals, grad, *moved[:4], ctx.how)
        return tuple(a + b for a, b in zip(second, Pull.apply(*theta, *duals, moved[6], ctx.how), strict=True))


class Second(Function):
    """`pull_theta` as a function of theta, duals, a cotangent, four tangents and how. That is as far as derivatives go."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        theta, duals, how = inputs[:4], inputs[4:6], inputs[11]
        return pull_theta(linearise(theta, duals, how), inputs[6], inputs[7:11], theta, duals[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise InvalidInput(
            "the projection has first and second derivatives only; detach the second ones before differentiating them."
        )

    jvp = backward


def _remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.how = inputs[-1]
    ctx.save_for_backward(*inputs[:-1])
    ctx.save_for_forward(*inputs[:-1])


for _function in (Push, Pull, Second):
    _function.vmap = staticmethod(vmapped(_function))  # type: ignore[method-assign]
