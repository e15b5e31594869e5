"""Small things that many tests need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.instances import random_cmdp
from torchcmdp.layout import Layout
from torchcmdp.occupancy import uniform_occupancy
from torchcmdp.optimistic import optimistic_optimum
from torchcmdp.projection import SafeSet, project

RAGGED = (1, 3, 2, 4, 1)  # every layer but the widest has padding


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tests that take a device run, such as cuda; cpu by default")


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
    """The device of --device; its tests are skipped where this machine lacks it."""
    name = request.config.getoption("--device")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        pytest.skip(f"--device {name}: PyTorch finds no such device here.")
    return device


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
