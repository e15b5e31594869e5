"""Visit counts, sets of plausible transition kernels, and the exact optimistic expectations and occupancies over them.

Throughout, `visits` are N(x,a), `(... x L x S x A)`, `transition_visits` M(x,a,y), `(... x L x S x A x K)`, and a `policy` is
pi(a|x), `(... x L x S x A)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, first
from torchcmdp.hyperparameters import PerRun
from torchcmdp.layout import Layout

if TYPE_CHECKING:
    from torchcmdp.trajectory import Trajectory

CONFIDENCE_KINDS = ("entrywise", "l1", "bernstein", "efroni", "luo")


def visited_transitions(trajectory: Trajectory, layout: Layout, dtype: torch.dtype) -> Tensor:
    """One at the transitions an episode went through, zero elsewhere: `(runs x L x S x A x K)`."""
    _, S, A, K = layout.transition_shape
    pair, slot = trajectory.states * A + trajectory.actions, slots_of(trajectory, layout)
    counts = torch.zeros(*pair.shape, S * A * K, dtype=dtype, device=pair.device)
    return counts.scatter_(-1, (pair * K + slot).unsqueeze(-1), 1.0).view(*pair.shape, S, A, K)


def slots_of(trajectory: Trajectory, layout: Layout) -> Tensor:
    """The slots of the successors that an episode met, `(runs x L)`; on the CPU refused where the layout lists one of them not."""
    if layout.lists is None:
        return trajectory.next_states
    states, actions = trajectory.states, trajectory.actions
    steps = torch.arange(layout.layers, device=states.device)
    met = layout.successors(states.device)[steps, states, actions] == trajectory.next_states.unsqueeze(-1)
    if met.device.type == "cpu" and (place := first(~met.any(-1))):
        run, k = place
        x, a, y = (int(part[run, k]) for part in (states, actions, trajectory.next_states))
        raise InvalidInput(
            f"run {run} moved from state {x} with action {a} to state {y} in layer {k}, where the layout does not list it."
        )
    return met.to(torch.int8).argmax(-1)


def empirical_kernel(visits: Tensor, transition_visits: Tensor, layout: Layout) -> Tensor:
    """M / N, and uniform over the possible successors where a pair was never visited (D4): `(... x L x S x A x K)`."""
    visits = visits.unsqueeze(-1)
    seen = torch.where(visits > 0, visits, 1.0)  # not a clamp: the visits that a policy leads one to expect may be below one
    return torch.where(visits > 0, transition_visits / seen, _uniform_kernel(layout, visits.dtype, visits.device))


@lru_cache(maxsize=256)
def _uniform_kernel(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    # cached for good, so never born as an inference tensor, which autograd would refuse later
    with torch.inference_mode(False):
        return layout.uniform_transitions(dtype, device)


@dataclass(frozen=True, eq=False)
class Intervals:
    """Kernels whose rows lie in a box: lower <= p <= upper and sum p = 1, independently for every pair.

    Attributes:
        lower, upper: `(... x L x S x A x K)`, zero in the padding.
        layout: Needed where it has successor lists; without one the K = S slots are the states of the next layer.
    """

    lower: Tensor
    upper: Tensor
    layout: Layout | None = None

    @cached_property
    def _weights(self) -> Tensor:
        """What multiplies relu(f_y - f_j), relu(f_j - f_y) and f_j in the row problem's dual: `(... x L x S A x (2K + 1))`."""
        real = (self.upper.amax(-1, keepdim=True) > 0).to(self.upper.dtype)
        return torch.cat([self.upper, -self.lower, real], dim=-1).flatten(-3, -2)

    def optimistic(self, values: Tensor, *, maximise: bool = True, layer: int | None = None) -> Tensor:
        """The exact max (or min) over the set of sum_y p(y) f(y), for every pair and every column f.

        The row problem max {<p, f> : lower <= p <= upper, sum p = 1} is a linear programme with one coupling constraint, so its
        dual min_c c + sum_y upper relu(f_y - c) - lower relu(c - f_y) has its minimum at some c = f_j: no sort is needed. Where
        values tie the maximum has a kink, and the gradient in `values` is shared evenly among the tied ones.

        Columns `(... x L x S x Z)` over the states of the next layer become `(... x L x S x A x Z)`, zero in the padding; with
        `layer`, that of the kernels which are meant, `(... x S x Z)` becomes `(... x S x A x Z)`.
        """
        if not maximise:
            return -self.optimistic(-values, layer=layer)
        weights = self._weights if layer is None else self._weights[..., layer, :, :]
        values = _at_slots(values, self.layout, layer)
        rises = torch.relu(values.unsqueeze(-2) - values.unsqueeze(-3))
        terms = torch.cat([rises, rises.transpose(-3, -2), values.unsqueeze(-3)], dim=-3)
        return _contract(weights, terms, self.upper.shape[-2], self.layout).amin(-2)


@dataclass(frozen=True, eq=False)
class L1Ball:
    """Kernels whose rows lie in |p - center|_1 <= radius, p >= 0 and sum p = 1, independently for every pair.

    Attributes:
        center: `(... x L x S x A x K)`, rows summing to one, zero in the padding.
        radius: `(... x L x S x A)`, zero in the padding; two or more admits every kernel.
        layout: Layer widths and actions, to tell successors from padding.
    """

    center: Tensor
    radius: Tensor
    layout: Layout

    @cached_property
    def lower(self) -> Tensor:
        """The lower face of the tightest box around the ball: an entry can only fall by what the others rise, half the radius."""
        return (self.center - 0.5 * self.radius.unsqueeze(-1)).clamp_min(0)

    @cached_property
    def upper(self) -> Tensor:
        """The upper face of the tightest box around the ball."""
        return (self.center + 0.5 * self.radius.unsqueeze(-1)).clamp_max(1) * self.layout.transition_mask(self.center.device)

    @cached_property
    def _weights(self) -> Tensor:
        """What multiplies relu(f_j - f_y), f_max - f_j in the dual of the row problem: `(... x L x S A x (S + 1))`."""
        return torch.cat([self.center, 0.5 * self.radius.unsqueeze(-1)], dim=-1).flatten(-3, -2)

    def optimistic(self, values: Tensor, *, maximise: bool = True, layer: int | None = None) -> Tensor:
        """The exact max (or min) over the set of sum_y p(y) f(y), for every pair and every column f: shapes as in `Intervals`.

        Mass of at most radius / 2 moves from the worst successors to the best one (UCRL2's inner maximisation). Its gain is a
        fractional knapsack with the dual min_c (f_max - c) radius / 2 + sum_y center relu(c - f_y), again minimal at some c = f_j.
        """
        if not maximise:
            return -self.optimistic(-values, layer=layer)
        support, weights = _support(self.layout, str(values.device)), self._weights
        if layer is not None:
            support, weights = support[layer], weights[..., layer, :, :]
        values = _at_slots(values, self.layout, layer)
        best = values.masked_fill(~support.unsqueeze(-1), -math.inf).amax(-2, keepdim=True)
        falls = torch.relu(values.unsqueeze(-3) - values.unsqueeze(-2))
        # padded columns may exceed f_max: without the clamp they would not be dual feasible
        terms = torch.cat([falls, torch.relu(best - values).unsqueeze(-3)], dim=-3)
        size = (self.center.shape[-2], self.layout)
        return _contract(weights, terms, *size).amin(-2) + _contract(weights[..., :-1], values.unsqueeze(-2), *size).squeeze(-2)


KernelSet = Intervals | L1Ball


def _at_slots(values: Tensor, layout: Layout | None, layer: int | None) -> Tensor:
    """Columns over the states of the next layer `(... x S x Z)`, as they are or, with successor lists, `(... x S A x K x Z)`."""
    if layout is None or layout.lists is None:
        return values
    if layer is None:  # the columns go before the layers
        return layout.ahead(values.movedim(-1, -3)).flatten(-3, -2).movedim(-4, -1)
    return layout.ahead(values.mT, layer).flatten(-3, -2).movedim(-3, -1)


@lru_cache(maxsize=256)
def _support(layout: Layout, device: str) -> Tensor:
    """Which values of `_at_slots` count: `(L x S)`, or `(L x S A x K)` with successor lists."""
    with torch.inference_mode(False):
        mask = layout.transition_mask(device)
        return mask.flatten(1, 2).any(1) if layout.lists is None else mask.flatten(1, 2).contiguous()


def _contract(weights: Tensor, terms: Tensor, actions: int, layout: Layout | None) -> Tensor:
    """sum_w weights(x,a,w) terms(w,j,z): `(... x S A x W)` with `(... x W x J x Z)` gives `(... x S x A x J x Z)`.

    With successor lists every pair has terms of its own, `(... x S A x W x J x Z)`.
    """
    if layout is None or layout.lists is None:
        product = weights @ terms.flatten(-2)
    else:
        product = (weights.unsqueeze(-2) @ terms.flatten(-2)).squeeze(-2)
    return product.view(*product.shape[:-2], -1, actions, *terms.shape[-2:])


def transition_log_term(layout: Layout, horizon: int, delta: float) -> float:
    """ln(T |X| |A| / delta), the logarithm in every transition radius (D7)."""
    return math.log(horizon * layout.total_states * layout.actions / delta)


def transition_radius(
    kind: str, visits: Tensor, transition_visits: Tensor, layout: Layout, *, horizon: int, delta: float, radius_scale: PerRun = 1.0
) -> Tensor:
    """How far a transition probability may lie from M / N for each successor: `(... x L x S x A x K)`, zero in the padding.

    The arguments are those of `confidence_set`, and so are the kinds, but for "l1", which has one radius for a whole row. A pair
    that was never visited has radius one, whatever the scale.
    """
    center = empirical_kernel(visits, transition_visits, layout)
    radius = _entry_radius(kind, center, visits, layout, transition_log_term(layout, horizon, delta), radius_scale)
    return radius * layout.transition_mask(visits.device)


def _entry_radius(kind: str, center: Tensor, visits: Tensor, layout: Layout, iota: float, radius_scale: PerRun) -> Tensor:
    """The radii of `transition_radius` around the center, whatever in the padding: `(... x L x S x A x K)` or `(... x 1)`."""
    samples = visits.clamp_min(1).unsqueeze(-1)
    if kind == "entrywise":
        radius = ((2 * iota) * layout.next_widths(visits.device).to(visits.dtype).unsqueeze(-1) / samples).sqrt()
    elif kind == "bernstein":
        samples = (visits - 1).clamp_min(1).unsqueeze(-1)
        radius = 2 * (center * (iota / samples)).sqrt() + (14 * iota / 3) / samples
    elif kind == "efroni":
        iota += math.log(6)
        radius = 2 * (center * (1 - center) * (iota / samples)).sqrt() + (14 * iota / 3) / samples
    elif kind == "luo":
        radius = 4 * (center * (iota / samples)).sqrt() + (28 * iota / 3) / samples
    else:
        raise InvalidInput(f"confidence is {kind!r}; it must be one of {', '.join(map(repr, CONFIDENCE_KINDS))}.")
    if isinstance(radius_scale, Tensor):
        radius_scale = radius_scale[..., None, None, None, None]
    return torch.where((visits > 0).unsqueeze(-1), radius_scale * radius, 1.0)


def confidence_set(
    kind: str, visits: Tensor, transition_visits: Tensor, layout: Layout, *, horizon: int, delta: float, radius_scale: PerRun = 1.0
) -> KernelSet:
    """The transition kernels that the visits so far leave plausible (line 8; the first three kinds are those of D7).

    A pair that was never visited admits every row, whatever the scale, a float or `(...)`, which multiplies every radius. With iota
    = ln(T |X| |A| / delta) and N = max(1, visits):

    - "entrywise", the paper's set: |p - M/N| <= sqrt(2 n_{k+1} iota / N) for each successor;
    - "l1", the L1 ball with the same number as its radius;
    - "bernstein", UOB-REPS's: |p - M/N| <= 2 sqrt(M/N iota / (N-1)) + 14 iota / (3 (N-1));
    - "efroni", OptCMDP's: |p - M/N| <= 2 sqrt(M/N (1 - M/N) iota' / N) + 14 iota' / (3 N) with iota' = iota + ln 6;
    - "luo", of policy optimisation with dilated bonuses: |p - M/N| <= 4 sqrt(M/N iota / N) + 28 iota / (3 N).
    """
    center, iota = empirical_kernel(visits, transition_visits, layout), transition_log_term(layout, horizon, delta)
    radius = _entry_radius("entrywise" if kind == "l1" else kind, center, visits, layout, iota, radius_scale)
    if kind == "l1":
        everything = 2.0 * layout.pair_mask(visits.device).to(visits.dtype)
        return L1Ball(center, torch.where(visits > 0, radius.squeeze(-1), everything), layout)
    upper = (center + radius).clamp_max(1) * layout.transition_mask(center.device)
    return Intervals((center - radius).clamp_min(0), upper, layout)


def _reach(kernels: KernelSet, policy: Tensor, targets: Tensor, maximise: bool) -> Tensor:
    """The best (or worst) probability of reaching target states from x_0, by the backward recursion of COMP-UOB: `(... x L x C)`.

    Indicators of the C targets of each layer are `(... x L x S x C)`.
    """
    layers, columns = policy.shape[-3], targets.shape[-1]
    policies, indicators = policy.unsqueeze(-1).unbind(-4), targets.unbind(-3)
    values = indicators[-1]
    for k in range(layers - 2, -1, -1):
        # only the targets of deeper layers have a column here, so the work shrinks towards the end of the episode
        expected = kernels.optimistic(values, maximise=maximise, layer=k)
        values = (policies[k] * expected).sum(-2)
        values = torch.cat([indicators[k].expand(*values.shape[:-1], columns), values], dim=-1)
    return torch.unflatten(values[..., 0, :], -1, (layers, columns))


def _all_pairs(kernels: KernelSet, policy: Tensor, layout: Layout, maximise: bool) -> Tensor:
    layout.check_shape("policy", policy, kind="pair")
    targets = torch.eye(layout.width, dtype=policy.dtype, device=policy.device).expand(layout.layers, -1, -1)
    return policy * _reach(kernels, policy, targets, maximise).unsqueeze(-1)


def upper_occupancy(kernels: KernelSet, policy: Tensor, layout: Layout) -> Tensor:
    """max over the set of q^{P,pi}(x,a), for every pair (COMP-UOB): `(... x L x S x A)`, as the policy."""
    return _all_pairs(kernels, policy, layout, maximise=True)


def lower_occupancy(kernels: KernelSet, policy: Tensor, layout: Layout) -> Tensor:
    """min over the set of q^{P,pi}(x,a), for every pair: `(... x L x S x A)`, as the policy."""
    return _all_pairs(kernels, policy, layout, maximise=False)


def upper_occupancy_visited(kernels: KernelSet, policy: Tensor, layout: Layout, states: Tensor, actions: Tensor) -> Tensor:
    """u_t: the upper occupancy of the pairs one episode visited, `(runs x L)`, and of no others (for line 5): `(runs x L)`."""
    targets = torch.zeros(*states.shape, layout.width, 1, dtype=policy.dtype, device=policy.device)
    targets.scatter_(-2, states[..., None, None], 1.0)
    chosen = policy.flatten(-2).gather(-1, (states * layout.actions + actions).unsqueeze(-1))
    return (chosen * _reach(kernels, policy, targets, maximise=True)).squeeze(-1)


def worst_value(kernels: KernelSet, policy: Tensor, values: Tensor, *, maximise: bool = True) -> Tensor:
    """max over the set of <values_i, q^{P,pi}>, or min: the most that a policy may cost, exactly, `(... x m)`.

    The set is a product over pairs and every pair is met at most once an episode, so one kernel attains the maximum everywhere, by
    a backward recursion; each i, of values `(... x m x L x S x A)`, has a kernel of its own. Batch shapes broadcast.
    """
    columns = values.movedim(-4, -1)  # (... x L x S x A x m)
    chosen = policy.unsqueeze(-1)
    value = (chosen[..., -1, :, :, :] * columns[..., -1, :, :, :]).sum(-2)
    if not values.shape[-4]:
        return value[..., 0, :]
    for k in range(policy.shape[-3] - 2, -1, -1):
        ahead = kernels.optimistic(value, maximise=maximise, layer=k)
        value = (chosen[..., k, :, :, :] * (columns[..., k, :, :, :] + ahead)).sum(-2)
    return value[..., 0, :]
