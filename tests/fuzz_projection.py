"""As many random projections as you like: `python -m tests.fuzz_projection 1000000 [first seed] [compiled|torch]`.

Prints every seed with an instance that is neither solved nor rightly called elastic, and ends with the number of them.
"""

from __future__ import annotations

import sys
from collections import Counter

import torch

from tests.projection_instances import wild_instances
from torchcmdp.occupancy import flow_residual, interval_residual
from torchcmdp.projection import Newton, project
from torchcmdp.projection.torch_multipliers import units
from torchcmdp.safe_set import SafeSet
from torchcmdp.status import Status

BATCH = 20


def faults(seed: int, backend: str, counted: Counter[str]) -> int:
    """How many of a seed's instances go wrong; costs come in units from 1e-12 to 1e6."""
    log_reference, safe_set = wild_instances(seed, BATCH)
    generator = torch.Generator().manual_seed(seed)
    unit = 10 ** (18 * torch.rand(BATCH, safe_set.constraints, 1, 1, 1, generator=generator, dtype=torch.float64) - 12)
    safe_set = SafeSet(safe_set.layout, safe_set.lower, safe_set.upper, safe_set.costs * unit)
    loss = torch.zeros(safe_set.layout.pair_shape, dtype=torch.float64)
    result = project(loss, None, safe_set, 1.0, log_reference=log_reference, solver=Newton(backend=backend))
    counted.update(Status(code).name for code in result.status.tolist())
    q = result.occupancy
    used = (safe_set.costs * q.sum(-1).unsqueeze(1)).sum(dim=(2, 3, 4)) / units(safe_set.costs)
    violation = torch.nn.functional.pad(used, (0, 1)).amax(1)
    residual = torch.maximum(flow_residual(q), interval_residual(q, safe_set.lower, safe_set.upper))
    solved, elastic = result.status == Status.SOLVED, result.status == Status.ELASTIC
    right = (solved & (violation <= 1e-9)) | (elastic & (violation > 1e-9))
    right &= (residual <= 1e-9) & q.flatten(1).isfinite().all(1) & ~result.log_occupancy.flatten(1).isnan().any(1)
    return int((~right).sum())


def main(instances: int, first: int, backend: str) -> int:
    """Returns the exit code: whether anything went wrong."""
    counted: Counter[str] = Counter()
    wrong = 0
    for seed in range(first, first + -(-instances // BATCH)):
        found = faults(seed, backend, counted)
        if found:
            print(f"seed {seed}: {found} of {BATCH}", flush=True)
        wrong += found
    print(f"{sum(counted.values()):,} instances, {wrong} wrong; {dict(counted)}")
    return int(wrong > 0)


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(int(given[0]), int(given[1]) if given[1:] else 0, given[2] if given[2:] else "compiled"))
