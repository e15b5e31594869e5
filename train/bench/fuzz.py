"""As many random projections as you like, from mild to as degenerate as they come, and how many of them go wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

import torchcmdp as tc
from torchcmdp.projection.torch_multipliers import units
from torchcmdp.solver import BACKENDS

from ..program import Count, Whole, bar, choose, collect, parse

BATCH = 20  # instances of one seed


@dataclass
class Options:
    """Project random instances, degenerate ones among them, and count those neither solved nor rightly called elastic.

    Prints every seed with such an instance; the exit code is 1 if there is one.

    Examples:
      python -m train bench fuzz
      python -m train bench fuzz --instances 1000000 --backend torch
      python -m train bench fuzz --instances 2000 --derivatives
    """

    instances: Count = 20_000  # How many, rounded up to whole seeds of 20.
    first: Whole = 0  # The first seed.
    backend: str = "auto"  # Of the solver: auto, compiled or torch.
    derivatives: bool = False  # Count those whose derivatives are not finite, or differ between forward and reverse mode.


def wild_instances(seed: int, batch: int) -> tuple[Tensor, tc.SafeSet]:
    """Log references and safe sets over all sizes and degenerate shapes: see the branches for what is in the bag."""
    rng = np.random.default_rng(seed)
    layers, actions = rng.integers(1, 6), int(rng.integers(1, 5))
    m = int(rng.choice([0, 1, 2, 3, 6, 20, 50], p=[0.1, 0.3, 0.25, 0.15, 0.1, 0.07, 0.03]))
    layout = tc.Layout((1, *rng.integers(1, 6, size=layers - 1), 1), actions)
    real, pairs = layout.transition_mask().numpy(), layout.pair_mask().numpy()
    shape = (batch, *layout.transition_shape)
    kernel = (rng.gamma(rng.choice([0.05, 0.3, 1.0]), size=shape) + 1e-300) * real
    kernel /= np.where(pairs[..., None], kernel.sum(-1, keepdims=True), 1)
    kind = rng.integers(5)
    room = {0: 0.0, 1: 1.0}.get(kind, rng.choice([1e-6, 0.01, 0.1, 0.5]) * (rng.uniform(size=(*shape[:-1], 1)) if kind > 2 else 1))
    lower, upper = np.clip(kernel - room, 0, 1) * real, np.clip(kernel + room, 0, 1) * real
    kind = rng.integers(6)
    log_reference = rng.normal(size=shape) * [0.1, 1, 5, 30, 1, 1][kind]
    if kind == 4:  # references near 1e-300
        log_reference = np.where(rng.uniform(size=shape) < 0.3, -690.0, log_reference)
    if kind == 5:  # eta * loss up to 1e3
        log_reference = log_reference - 1000 * rng.uniform(size=(*shape[:-1], 1)) * (rng.uniform(size=(*shape[:-1], 1)) < 0.2)
    kind = rng.integers(6)
    costs = rng.uniform(-1, 1, size=(batch, m, *layout.pair_shape))
    if kind == 1:
        costs = costs + rng.uniform(-0.5, 0.8)
    if kind == 2:
        costs = np.sign(costs)
    if kind == 3 and m > 1:  # duplicates
        costs[:, m // 2 :] = costs[:, : m - m // 2]
    if kind == 4 and m > 1:  # opposites
        costs[:, m // 2 :] = -costs[:, : m - m // 2]
    if kind == 5:  # no safe policy, or costs that say nothing
        costs = np.abs(costs) * rng.choice([1, 1e-3, 0])
    costs = np.clip(costs, -1, 1) * pairs
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in (log_reference, lower, upper, costs)]
    return tensors[0], tc.SafeSet(layout, *tensors[1:])


def wrong(seed: int, backend: str, counted: Counter[str]) -> int:
    """How many of a seed's instances go wrong; costs come in units from 1e-12 to 1e6."""
    log_reference, safe_set = wild_instances(seed, BATCH)
    generator = torch.Generator().manual_seed(seed)
    unit = 10 ** (18 * torch.rand(BATCH, safe_set.constraints, 1, 1, 1, generator=generator, dtype=torch.float64) - 12)
    safe_set = tc.SafeSet(safe_set.layout, safe_set.lower, safe_set.upper, safe_set.costs * unit)
    loss = torch.zeros(safe_set.layout.pair_shape, dtype=torch.float64)
    result = tc.project(loss, None, safe_set, 1.0, log_reference=log_reference, solver=tc.Newton(backend=backend))
    counted.update(tc.Status(code).name.lower() for code in result.status.tolist())  # type: ignore[call-arg]
    q = result.occupancy
    used = (safe_set.costs * q.sum(-1).unsqueeze(1)).sum(dim=(2, 3, 4)) / units(safe_set.costs)
    violation = torch.nn.functional.pad(used, (0, 1)).amax(1)
    residual = torch.maximum(tc.flow_residual(q), tc.interval_residual(q, safe_set.lower, safe_set.upper))
    solved, elastic = result.status == tc.Status.SOLVED, result.status == tc.Status.ELASTIC
    right = (solved & (violation <= 1e-9)) | (elastic & (violation > 1e-9))
    right &= (residual <= 1e-9) & q.flatten(1).isfinite().all(1) & ~result.log_occupancy.flatten(1).isnan().any(1)
    return int((~right).sum())


def wild_units(seed: int, batch: int) -> tuple[Tensor, tc.SafeSet]:
    """`wild_instances` with costs of every unit from 1e-12 to 1e6, references to 1e-300 and losses to 1e4."""
    log_reference, safe_set = wild_instances(seed, batch)
    rng = np.random.default_rng(seed)
    unit = 10.0 ** torch.from_numpy(rng.uniform(-12, 6, size=(batch, safe_set.constraints, 1, 1, 1)))
    loss = torch.from_numpy(10.0 ** rng.uniform(-2, 4, size=(batch, 1, 1, 1, 1)) * rng.uniform(size=(*log_reference.shape[:-1], 1)))
    rare = torch.from_numpy(rng.uniform(size=log_reference.shape) < 0.1)
    wild = torch.where(rare, -690.0, log_reference) - loss * (seed % 2)
    return wild, tc.SafeSet(safe_set.layout, safe_set.lower, safe_set.upper, safe_set.costs * unit)


def derivatives_disagree(seed: int, batch: int, backend: str = "auto") -> int:
    """How many of `batch` wild instances have a derivative that is not finite, or that differs between the two modes."""
    log_reference, safe_set = wild_units(seed, batch)
    layout, rng = safe_set.layout, torch.Generator().manual_seed(seed)
    real = layout.transition_mask()
    primals = (log_reference.clamp_min(-700), safe_set.lower, safe_set.upper, safe_set.costs)
    zero = torch.zeros(layout.pair_shape, dtype=torch.float64)

    def function(target: Tensor, lower: Tensor, upper: Tensor, costs: Tensor) -> tc.ProjectionResult:
        return tc.project(
            zero, None, tc.SafeSet(layout, lower, upper, costs), 1.0, log_reference=target, solver=tc.Newton(backend=backend)
        )

    leaves = [x.clone().requires_grad_() for x in primals]
    result = function(*leaves)
    outputs = (result.occupancy, result.log_occupancy)
    # a tangent of a bound or a cost is in units of that bound or cost
    tangents = [torch.randn(x.shape, generator=rng, dtype=torch.float64) * (x.abs() if i else real) for i, x in enumerate(primals)]
    cotangents = [torch.randn(x.shape, generator=rng, dtype=torch.float64) * (x.detach() > -torch.inf) * real for x in outputs]
    pulled = torch.autograd.grad(outputs, leaves, cotangents)
    with forward_ad.dual_level():
        duals = (forward_ad.make_dual(x, d) for x, d in zip(primals, tangents, strict=True))
        moved = function(*duals)
        pushed = [forward_ad.unpack_dual(x).tangent for x in (moved.occupancy, moved.log_occupancy)]
    forward = [(c * d).flatten(1) for c, d in zip(cotangents, pushed, strict=True)]
    reverse = [(g * d).flatten(1) for g, d in zip(pulled, tangents, strict=True)]
    size = sum(part.abs().sum(1) for part in (*forward, *reverse))
    error = sum(part.sum(1) for part in forward) - sum(part.sum(1) for part in reverse)
    # where a policy is pinned to one action, both are what rounding leaves of a multiplier times a moved cost
    priced = (result.multipliers[:, :, None, None, None] * tangents[3]).flatten(1).abs().sum(1)
    rounding = 1e-13 * (1 + priced) * sum(c.flatten(1).abs().sum(1) for c in cotangents)
    return int((~(error.abs() <= 1e-6 * size + rounding)).sum())


def main(arguments: Sequence[str]) -> int:
    """Run the fuzz; returns the exit code: whether anything went wrong."""
    options = parse(Options, arguments, prog="python -m train bench fuzz")
    choose(options.backend, BACKENDS, "--backend")
    counted: Counter[str] = Counter()
    total = 0
    for seed in bar(range(options.first, options.first + -(-options.instances // BATCH)), "fuzzing", leave=False):
        found = derivatives_disagree(seed, BATCH, options.backend) if options.derivatives else wrong(seed, options.backend, counted)
        if found:
            print(f"seed {seed}: {found} of {BATCH} wrong", flush=True)
        total += found
    played = BATCH * -(-options.instances // BATCH)
    collect(["what", "count"], [[name, str(count)] for name, count in {"instances": played, "wrong": total, **counted}.items()])
    listed = ", ".join(f"{count:,} {name}" for name, count in sorted(counted.items()))
    print(f"{played:,} instances, {total} wrong{f': {listed}' if listed else ''}.")
    return int(total > 0)
