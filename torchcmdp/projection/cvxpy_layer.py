"""The KL projection as a cvxpylayers problem: slower than Newton and written down independently of it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torchcmdp.errors import InvalidInput, TorchCMDPError, check_kind, choice
from torchcmdp.layout import Layout
from torchcmdp.occupancy import flow_residual, interval_residual, occupancy_of, uniform_policy
from torchcmdp.projection.problem import DEFAULT_CAP, LOG_FLOOR, ProjectionResult, ProjectionSolver, target_fault
from torchcmdp.projection.torch_multipliers import units
from torchcmdp.safe_set import SafeSet, faults, flattened, refuse
from torchcmdp.status import ELASTIC, MAX_ITERATIONS, SOLVED

# The cvxpylayers backends that take exponential cones; MPAX, the fourth, does not.
SOLVERS = ("CUCLARABEL", "DIFFCP", "MOREAU")

# An interior-point occupancy is off by about the square root of its gap, so a tolerance of 1e-8, the usual default, leaves 1e-5.
# CUCLARABEL keeps its own defaults: nobody has measured it here, for want of a GPU.
DEFAULT_SOLVER_ARGS: dict[str, dict[str, Any]] = {
    "CUCLARABEL": {},
    "DIFFCP": {"solve_method": "Clarabel", "tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12},
    "MOREAU": {"ipm_settings": {"tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12}},
}

# Largest safety violation, in its constraint's unit, above which an answer is called elastic.
ELASTIC_VIOLATION = 1e-6

# Parts of the cap that an instance is tried again with where the backend fails, as interior-point methods sometimes do.
RETRY_CAPS = (1 / 8, 1 / 64)

# Above these an answer is not called solved; with a residual above USELESS_RESIDUAL it is not even returned.
SOLVED_RESIDUAL, SOLVED_GAP, USELESS_RESIDUAL = 1e-5, 1e-4, 1e-3

_CACHED_LAYERS = 32


class _Index(NamedTuple):
    """Where the real entries sit in the flattened padded axes."""

    transitions: Tensor
    free: Tensor  # the transitions with more than one possible successor, whose intervals can bind
    pairs: Tensor
    states: Tensor


@dataclass(frozen=True, kw_only=True)
class Cvxpy(ProjectionSolver):
    """The elastic projection by a general cone solver, through cvxpylayers.

    The penalty is exact, so the answer is that of the hard constraints whenever their multipliers stay under the cap, and an empty
    safe set has an answer too. One problem is compiled per layout, number of constraints, cap and solver, and kept. It solves in
    float64, on the CPU unless the backend has CUDA.

    `occupancy` and `log_occupancy` are differentiable (reverse mode only); `potentials` and `multipliers` are the backend's duals,
    detached. cvxpylayers hides the backend's status, so `residual` and `gap` are measured here, the gap by evaluating the dual
    function at those duals.

    An instance the backend cannot solve has status max_iterations and its true residual, safety included. Its occupancy is the
    backend's last point or, where that breaks flow or intervals by more than 1e-3, the uniform policy under transitions inside
    their intervals, with NaN duals, NaN gap and zero gradient.

    Attributes:
        solver: "MOREAU", "DIFFCP" or "CUCLARABEL"; by default MOREAU where it is installed, else DIFFCP.
        solver_args: The backend's own options, over `DEFAULT_SOLVER_ARGS`. For DIFFCP, `{"mode": "lsqr"}` trades accurate gradients
            for less memory; for MOREAU, tolerances go under "ipm_settings".
        multiplier_cap: The penalty per unit of the largest violation, as in `Newton`, but never raised.
    """

    solver: str | None = None
    solver_args: Mapping[str, Any] | None = None
    multiplier_cap: float = DEFAULT_CAP

    def __post_init__(self) -> None:
        self._positive("multiplier_cap")
        check_kind("solver_args", self.solver_args, Mapping | None, "options by name, or None")
        if self.solver is not None:
            object.__setattr__(self, "solver", choice("solver", str(self.solver).upper(), SOLVERS))

    def solve(self, objective: Tensor, safe_set: SafeSet) -> ProjectionResult:
        """Minimise `sum q ln q - q - <objective, q> + multiplier_cap * max_i [<costs_i, q>]_+`; below -700 is read as -700."""
        name = self.solver or ("MOREAU" if _installed("moreau") else "DIFFCP")
        args, cap, layout = merge_args(name, self.solver_args), self.multiplier_cap, safe_set.layout
        batch = _check_inputs(objective, safe_set)
        host = objective.device if objective.is_cuda and _takes_cuda(name) else torch.device("cpu")
        flat = [tensor.to(host) for tensor in (flattened(objective, batch, 4), *safe_set.flat(batch))]
        refuse([target_fault(flat[0], layout), *faults(layout, *flat[1:])])
        target, safe_set = flat[0].clamp_min(LOG_FLOOR), SafeSet(layout, *flat[1:])
        result = _solve_flat(target, safe_set, cap, name, args)
        for smaller in RETRY_CAPS:
            failed = (result.status == MAX_ITERATIONS).nonzero().squeeze(-1)
            if not len(failed):
                break
            # The penalty is exact, so an answer that is safe under a smaller one is the answer, and that is better conditioned.
            again = _solve_flat(target[failed], SafeSet(layout, *(t[failed] for t in flat[1:])), smaller * cap, name, args)
            safe = again.status == SOLVED
            merged = (getattr(result, f.name).index_put((failed[safe],), getattr(again, f.name)[safe]) for f in fields(result))
            result = ProjectionResult(*merged)
        return _restore(result, batch, objective.dtype, objective.device)


def _solve_flat(target: Tensor, flat: SafeSet, cap: float, name: str, args: dict[str, Any]) -> ProjectionResult:
    """Solve a flat batch with one penalty, each constraint in its unit, and certify it."""
    host, scale = target.device, units(flat.costs)
    flat = SafeSet(flat.layout, flat.lower, flat.upper, flat.costs / scale[:, :, None, None, None])
    # Every layer carries mass one, so a constant per layer changes nothing but the solver's conditioning.
    real = flat.layout.transition_mask(host)
    shift = target.masked_fill(~real, -math.inf).amax(dim=(-3, -2, -1)).detach()
    raw, potentials, multipliers, parameters = solve_layer(flat, cap, name, args, target - shift[:, :, None, None, None])
    # Undo the shift: v(x) gains the constants of its own and all later layers.
    potentials = potentials + shift.flip(-1).cumsum(-1).flip(-1).unsqueeze(-1)
    occupancy, useless = _replace_useless(flat, raw, parameters)
    potentials = potentials.masked_fill(useless[:, None, None], math.nan).masked_fill(~flat.layout.state_mask(host), 0)
    multipliers = multipliers.masked_fill(useless[:, None], math.nan)
    result = _certify(flat, cap, target, occupancy, potentials, multipliers)
    return replace(result, multipliers=multipliers / scale)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _takes_cuda(name: str) -> bool:
    return name == "CUCLARABEL" or (name == "MOREAU" and bool(importlib.import_module("moreau").device_available("cuda")))


def _check_inputs(target: Tensor, safe_set: SafeSet) -> torch.Size:
    """The check at the door, before any number is read; returns the broadcast batch shape."""
    safe_set.layout.check_shape("objective", target, kind="transition")
    if not target.is_floating_point():
        raise InvalidInput(f"objective is {target.dtype}; expected a floating-point tensor.")
    if target.device.type == "meta":
        raise InvalidInput("objective is on device meta; the cvxpy projection computes on the host and needs real numbers.")
    return safe_set.batch_with("objective", target.shape[:-4])


def merge_args(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The caller's options over the defaults; a DIFFCP method other than Clarabel gets none of Clarabel's tolerances."""
    defaults, given = DEFAULT_SOLVER_ARGS[name], dict(given or {})
    if name == "DIFFCP" and str(given.get("solve_method", "Clarabel")).lower() != "clarabel":
        defaults = {}
    if name == "MOREAU" and isinstance(given.get("ipm_settings"), Mapping):
        given["ipm_settings"] = {**defaults["ipm_settings"], **given["ipm_settings"]}
    merged = {**defaults, **given}
    if name == "DIFFCP":  # lsqr, its own default, leaves errors of a few percent in the gradients of the intervals
        merged.setdefault("mode", "dense")
    if name == "MOREAU":
        moreau = importlib.import_module("moreau")
        nested = merged["ipm_settings"] if isinstance(merged["ipm_settings"], Mapping) else {}
        unknown = (set(merged) - set(moreau.Settings.model_fields)) | (set(nested) - set(moreau.IPMSettings.model_fields))
        if unknown:  # Moreau would ignore them without a word
            raise InvalidInput(
                f"solver_args has {sorted(unknown)}; expected fields of moreau.Settings, tolerances under ipm_settings."
            )
    return merged


@lru_cache(maxsize=64)
def _index(layout: Layout) -> _Index:
    # cached for good, so never born as inference tensors, which autograd would refuse later
    with torch.inference_mode(False):
        transition = layout.transition_mask()
        several = (layout.next_widths() > 1).unsqueeze(-1)
        masks = (transition, transition & several, layout.pair_mask(), layout.state_mask())
        return _Index(*(mask.flatten().nonzero().squeeze(-1) for mask in masks))


def _incidence(layout: Layout) -> tuple[Any, Any, Any, Any]:
    """Sparse 0/1 maps over real entries: transitions to pairs, pairs to states, transitions to states entered, free to pairs."""
    import numpy as np
    from scipy import sparse

    index = _index(layout)
    _, S, A, K = layout.transition_shape
    transitions, free, pairs, states = (entries.numpy() for entries in index)

    def incidence(rows: Any, among: Any, columns: Any, width: int) -> Any:
        return sparse.csr_array((np.ones(len(rows)), (np.searchsorted(among, rows), columns)), shape=(len(among), width))

    layer, entered = transitions // (S * A * K), layout.successors().flatten().numpy()[transitions]
    inner = np.flatnonzero(layer + 1 < layout.layers)
    return (
        incidence(transitions // K, pairs, np.arange(len(transitions)), len(transitions)),
        incidence(pairs // A, states, np.arange(len(pairs)), len(pairs)),
        incidence(((layer + 1) * S + entered)[inner], states, inner, len(transitions)),
        incidence(free // K, pairs, np.arange(len(free)), len(free)).T.tocsr(),
    )


def build_problem(layout: Layout, m: int, cap: float) -> tuple[Any, list[Any], list[Any]]:
    """The DPP problem, its parameters (log target, lower, upper, costs) and what to read off: occupancy, flow and safety duals."""
    import cvxpy as cp
    import numpy as np

    index = _index(layout)
    to_pair, leaving, entering, free_pair = _incidence(layout)
    nT, nF, nP, nX = (len(entries) for entries in index)
    # The pair occupancy is a variable of its own: with the sum in its place Moreau stops early on some instances, 1e-5 off.
    q, pair = cp.Variable(nT), cp.Variable(nP)
    log_target = cp.Parameter(nT)
    flow = leaving @ pair - entering @ q == np.eye(1, nX)[0]
    constraints, parameters, read = [flow, pair == to_pair @ q], [log_target], [q, flow.dual_variables[0]]
    objective = -cp.sum(cp.entr(q)) - cp.sum(q) - log_target @ q
    if nF:
        lower, upper = cp.Parameter(nF), cp.Parameter(nF)
        free = q[np.searchsorted(index.transitions.numpy(), index.free.numpy())]
        constraints += [cp.multiply(lower, free_pair @ pair) <= free, free <= cp.multiply(upper, free_pair @ pair)]
        parameters += [lower, upper]
    if m:
        costs, slack = cp.Parameter((m, nP)), cp.Variable(1)
        # One constraint on purpose: `slack >= 0` alone becomes a bound that cvxpy hands to Moreau aside and cvxpylayers 1.2 drops.
        safety = cp.hstack([slack, np.ones((m, 1)) @ slack - costs @ pair]) >= 0
        constraints.append(safety)
        parameters.append(costs)
        read.append(safety.dual_variables[0])
        objective += cap * cp.sum(slack)
    return cp.Problem(cp.Minimize(objective), constraints), parameters, read


def _build(layout: Layout, m: int, cap: float, name: str, args: dict[str, Any]) -> Any:
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    problem, parameters, read = build_problem(layout, m, cap)
    try:
        # DIFFCP takes its options at the call, since solving without derivatives refuses those of the derivative.
        layer = CvxpyLayer(problem, parameters, read, solver=name, solver_args={} if name == "DIFFCP" else args)
    except (ImportError, cp.error.SolverError) as error:
        raise InvalidInput(f"solver {name} cannot be used here: {error}; expected one of {', '.join(SOLVERS)}.") from error
    index, dims = _index(layout), cast(Any, layer.ctx.cone_dims)
    written = (len(index.states) + len(index.pairs), 2 * len(index.free) + (m + 1 if m else 0), len(index.transitions))
    compiled = (dims.zero, dims.nonneg, dims.exp)
    if compiled != written:
        raise TorchCMDPError(
            f"the installed cvxpy and cvxpylayers made {compiled} equalities, inequalities and exponential cones for {name} of the "
            f"{written} in the projection; choose another solver."
        )
    return layer


_layers: dict[tuple[Any, ...], Any] = {}


def _layer(layout: Layout, m: int, cap: float, name: str, args: dict[str, Any]) -> Any:
    """The compiled layer, from the cache if one was built for the same problem and options."""
    key = (layout, m, cap, name, "" if name == "DIFFCP" else repr(sorted(args.items(), key=lambda item: item[0])))
    if key not in _layers:
        while len(_layers) >= _CACHED_LAYERS:
            _layers.pop(next(iter(_layers)))
        _layers[key] = _build(layout, m, cap, name, args)
    return _layers[key]


def solve_layer(
    flat: SafeSet, cap: float, name: str, args: dict[str, Any], target: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Solve a flat batch: occupancy `(B x L x S x A x K)`, potentials `(B x L x S)`, multipliers `(B x m)`, and the parameters."""
    layout, m = flat.layout, flat.constraints
    index, batch, host = _index(layout), target.shape[0], target.device
    parameters = [target.flatten(1)[:, index.transitions.to(host)]]
    if len(index.free):
        parameters += [bound.flatten(1)[:, index.free.to(host)] for bound in (flat.lower, flat.upper)]
    if m:
        parameters.append(flat.costs.flatten(2)[:, :, index.pairs.to(host)])
    if batch:
        layer = _layer(layout, m, cap, name, args)
        q, flow, *safety = _call_isolated(layer, parameters, args if name == "DIFFCP" else {})
    else:
        q, flow, safety = parameters[0], target.new_zeros(0, len(index.states)), [target.new_zeros(0, m + 1)]
    occupancy = _scatter(q, index.transitions, layout.transition_shape)
    potentials = _scatter(flow.detach(), index.states, (layout.layers, layout.width))
    multipliers = safety[0].detach()[:, 1:].clamp(0, cap) if m else q.new_zeros(batch, 0)
    return occupancy, potentials, multipliers, parameters


def _scatter(values: Tensor, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    return values.new_zeros(values.shape[0], math.prod(shape)).index_copy(1, index.to(values.device), values).unflatten(1, shape)


def _call_isolated(layer: Any, parameters: list[Tensor], args: dict[str, Any]) -> list[Tensor]:
    """Call the layer on the batch, or on one instance at a time once the batch raises; an instance that still raises is NaN."""
    device = parameters[0].device
    differentiable = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
    if not differentiable:
        args = {key: value for key, value in args.items() if key not in ("mode", "n_jobs_backward", "derivative_kwargs")}

    def call(chosen: list[Tensor]) -> list[Tensor]:
        with torch.set_grad_enabled(differentiable):  # Moreau records a graph whether or not anybody asks for one
            return [out.to(device, torch.float64) for out in layer(*chosen, solver_args=dict(args))]

    try:
        return call(parameters)
    except (TypeError, AttributeError, ImportError):
        raise  # a mistake in solver_args, not a hard instance
    except Exception:
        rows = []
    sizes = [math.prod(recovery.shape) for recovery in layer.ctx.var_recover]
    for i in range(parameters[0].shape[0]):
        try:
            rows.append(call([p[i : i + 1] for p in parameters]))
        except Exception:  # whatever a backend throws at one instance must not reach the others
            rows.append([torch.full((1, size), math.nan, dtype=torch.float64, device=device) for size in sizes])
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def _replace_useless(flat: SafeSet, raw: Tensor, parameters: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Clip tiny negatives, and put a valid occupancy where the answer is far from one: `(B x L x S x A x K)`, `(B)`."""
    occupancy = raw.clamp_min(0)
    with torch.no_grad():
        broken = torch.maximum(flow_residual(occupancy, flat.layout), interval_residual(occupancy, flat.lower, flat.upper))
        useless = ~(broken <= USELESS_RESIDUAL)  # NaN included
        spare = occupancy_of(uniform_policy(flat.layout, device=raw.device), _inner_transitions(flat), flat.layout)
    for parameter in parameters:
        if parameter.requires_grad:  # 0 * NaN in the backend's derivative of a useless answer would reach shared inputs
            parameter.register_hook(lambda grad: torch.where(useless.view(-1, *[1] * (grad.dim() - 1)), 0.0, grad))
    return torch.where(useless[:, None, None, None, None], spare, occupancy), useless


def _certify(
    flat: SafeSet, cap: float, target: Tensor, occupancy: Tensor, potentials: Tensor, multipliers: Tensor
) -> ProjectionResult:
    """Measure every answer and name what it is; all tensors have one flat batch axis `B`."""
    seen = occupancy > 0
    log_occupancy = torch.where(seen, occupancy, 1.0).log().masked_fill(~seen, -math.inf)
    with torch.no_grad():
        values = torch.einsum("bmksa,bksay->bm", flat.costs, occupancy).clamp_min(0)
        unsafe = values.amax(-1) if flat.constraints else values.sum(-1)
        objective = (torch.xlogy(occupancy, occupancy) - occupancy * (1 + target)).flatten(1).sum(-1) + cap * unsafe
        gap = (objective - _dual_value(flat, target, potentials, multipliers)).abs()
        broken = torch.maximum(flow_residual(occupancy, flat.layout), interval_residual(occupancy, flat.lower, flat.upper))
        elastic = unsafe > ELASTIC_VIOLATION
        failed = ~((broken <= SOLVED_RESIDUAL) & (gap <= SOLVED_GAP * (1 + objective.abs())))  # NaN included
        status = torch.where(failed, MAX_ITERATIONS, torch.where(elastic, ELASTIC, SOLVED)).to(torch.int8)
        residual = torch.where(elastic & ~failed, broken, torch.maximum(broken, unsafe))
        iterations = torch.full_like(status, -1, dtype=torch.int64)
    return ProjectionResult(occupancy, log_occupancy, potentials, multipliers, status, residual, gap, iterations)


def _inner_transitions(flat: SafeSet) -> Tensor:
    """Transitions that share out what the lower bounds leave in proportion to the interval widths: `(B x L x S x A x K)`."""
    width = (flat.upper - flat.lower).clamp_min(0)
    total = width.sum(-1, keepdim=True)
    rest = 1 - flat.lower.sum(-1, keepdim=True)
    return (flat.lower + rest * width / torch.where(total > 0, total, 1.0)) * flat.layout.transition_mask(width.device)


def _dual_value(flat: SafeSet, target: Tensor, potentials: Tensor, multipliers: Tensor) -> Tensor:
    """-F(v, lambda) = -sum_{x,a} s(x,a) - v(x_0), a lower bound on the optimum whatever the duals are: `(B)`."""
    mask = flat.layout.transition_mask(target.device)
    after = torch.cat([potentials[:, 1:], torch.zeros_like(potentials[:, :1])], dim=1)
    z = (target + flat.layout.ahead(after)).masked_fill(~mask, 0)
    p = _tilted_transitions(z, flat.lower, flat.upper, mask)
    psi = (torch.xlogy(p, p) - p * z).sum(-1)
    exponent = -psi - potentials.unsqueeze(-1) - torch.einsum("bm,bmksa->bksa", multipliers, flat.costs)
    pair = exponent.exp() * flat.layout.pair_mask(target.device)
    return -pair.flatten(1).sum(-1) - potentials[:, 0, 0]


def _tilted_transitions(z: Tensor, lower: Tensor, upper: Tensor, mask: Tensor) -> Tensor:
    """p = clip(exp(t + z), lower, upper) with t such that p sums to one, by bisection on t: `(B x L x S x A x K)`."""
    low = -torch.where(mask, z, -math.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0) - 750
    high = -torch.where(mask, z, math.inf).amin(-1, keepdim=True).nan_to_num(posinf=0.0)
    for _ in range(64):
        middle = (low + high) / 2
        over = torch.minimum(torch.maximum((middle + z).exp(), lower), upper).sum(-1, keepdim=True) > 1
        low, high = torch.where(over, low, middle), torch.where(over, middle, high)
    return torch.minimum(torch.maximum((high + z).exp(), lower), upper) * mask


def _restore(result: ProjectionResult, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> ProjectionResult:
    """Back to the caller's batch shape, dtype and device."""

    def back(tensor: Tensor) -> Tensor:
        tensor = tensor.reshape((*shape, *tensor.shape[1:]))
        return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)

    return ProjectionResult(*(back(getattr(result, field.name)) for field in fields(ProjectionResult)))
