"""Small things that many tests need."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.instances import random_cmdp
from torchcmdp.layout import Layout
from torchcmdp.occupancy import uniform_occupancy
from torchcmdp.optimistic import optimistic_optimum
from torchcmdp.projection import Newton, ProjectionResult, SafeSet, project

RAGGED = (1, 3, 2, 4, 1)  # every layer but the widest has padding


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "where the tests that take a device run: cpu, cuda, or simulator, which is numba's in place of a GPU; cpu by default"
    parser.addoption("--device", default="cpu", help=told)


def device_of(name: str) -> torch.device:
    """The device that --device names, or one sentence; the simulator works on tensors of the CPU."""
    if name == "simulator":
        if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
            raise pytest.UsageError("--device simulator needs the environment variable NUMBA_ENABLE_CUDASIM=1.")
        return torch.device("cpu")
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError):
        raise pytest.UsageError(f"--device {name}: PyTorch finds no such device here.") from None


def pytest_configure(config: pytest.Config) -> None:
    device_of(config.getoption("--device"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels before there are workers: two that compile at once may overwrite each other's files in numba's cache."""
    if hasattr(session.config, "workerinput") or not getattr(session.config.option, "numprocesses", None):
        return
    cmdp = random_cmdp((1, 2, 1), actions=2, constraints=1)
    safe_set = SafeSet(cmdp.layout, cmdp.transitions, cmdp.transitions, cmdp.costs)
    optimistic_optimum(cmdp.rewards, safe_set)
    reference = uniform_occupancy(cmdp.layout)
    project(cmdp.rewards.clone().requires_grad_(), reference, safe_set, 1.0).occupancy.sum().backward()
    with forward_ad.dual_level():
        project(forward_ad.make_dual(cmdp.rewards, cmdp.rewards), reference, safe_set, 1.0)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of --device."""
    return device_of(request.config.getoption("--device"))


def project_on(device: torch.device) -> Callable[..., ProjectionResult]:
    """`project` there, of tensors that come from the CPU and go back to it; what would be compiled goes to the kernels of a GPU."""
    from torchcmdp.kernels import cuda

    backend = "auto" if cuda.obstacle(device) else "cuda"

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) and value.device.type == "cpu" else value

    def moved(loss: Any, reference: Any, safe_set: SafeSet, eta: Any, *, solver: Any = "newton", **rest: Any) -> ProjectionResult:
        solver = Newton() if solver == "newton" else solver
        if type(solver) is Newton and solver.backend in ("auto", "compiled") and solver.fixed_iterations is None:
            solver = replace(solver, backend=backend)
        safe_set = SafeSet(safe_set.layout, *map(there, (safe_set.lower, safe_set.upper, safe_set.costs)))
        rest = {name: there(value) for name, value in rest.items()}
        found = project(there(loss), there(reference), safe_set, there(eta), solver=solver, **rest)
        tensors = (getattr(found, name) for name in found.__dataclass_fields__)
        return ProjectionResult(*(tensor.cpu() if tensor.device == device else tensor for tensor in tensors))

    return moved


@pytest.fixture(autouse=True)
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --device, a test that projects does so there."""
    name = request.config.getoption("--device")
    if name == "cpu" or getattr(request.module, "project", None) is not project:
        return
    there = project_on(device_of(name))
    monkeypatch.setattr(request.module, "project", there)
    monkeypatch.setattr("train.bench.fuzz.project", there)


@pytest.fixture
def layout() -> Layout:
    return Layout(RAGGED, 3)


@pytest.fixture
def cmdp() -> LayeredCMDP:
    """A feasible random CMDP with padding in most layers and two constraints."""
    return random_cmdp(RAGGED, actions=3, constraints=2, seed=3)


@pytest.fixture
def random_policy() -> Callable[..., Tensor]:
    """`random_policy(layout, *batch, seed=0)`: positive policies, `(*batch x L x S x A)`."""

    def make(layout: Layout, *batch: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        weights = torch.rand(*batch, *layout.pair_shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1e-3
        return (weights / weights.sum(-1, keepdim=True) * layout.pair_mask()).to(dtype)

    return make
