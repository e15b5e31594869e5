"""What machine code of kernels leaves out, and that nothing else of numba changes."""

import ast
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from torchcmdp import kernels
from torchcmdp.kernels.cpu import exposed


def pick(values, at):
    return values[at]


def last(values):
    return values[-1] + values[1:][-1]


def asks(dispatcher):
    """Whether the code of its only overload looks at the sign of an index."""
    (overload,) = dispatcher.overloads.values()
    return "icmp slt i64" in overload.library.get_llvm_str()


@pytest.mark.parametrize("module, from_the_end", [("torchcmdp.kernels.any", False), ("somebody.elses", True)])
def test_only_kernels_take_an_index_as_it_is(monkeypatch, module, from_the_end):
    monkeypatch.setattr(pick, "__module__", module)
    own = exposed(pick, nogil=True) if not from_the_end else njit(pick)
    values = np.arange(5.0)
    assert own(values, 3) == 3.0
    assert asks(own) == from_the_end
    if from_the_end:
        assert own(values, -1) == 4.0


def test_a_constant_index_counts_from_the_end_in_a_kernel(monkeypatch):
    monkeypatch.setattr(last, "__module__", "torchcmdp.kernels.any")
    assert exposed(last)(np.arange(5.0)) == 8.0


def test_no_kernel_counts_from_the_end_by_a_variable():
    """`values[-j]` would read what lies in front of an array."""
    for path in Path(kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.UnaryOp) and isinstance(node.slice.op, ast.USub):
                assert isinstance(node.slice.operand, ast.Constant), f"{path.name}:{node.lineno}"
