"""Small things that many tests need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchcmdp.cmdp import LayeredCMDP
from torchcmdp.instances import random_cmdp
from torchcmdp.layout import Layout

RAGGED = (1, 3, 2, 4, 1)  # every layer but the widest has padding


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tests that take a device run, such as cuda; cpu by default")


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
