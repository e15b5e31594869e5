"""Compiled kernels do what their Python source does: with records, arrays and indices of every kind that kernels use."""

from __future__ import annotations

import ast
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

import numpy as np
import pytest
from numba.core.errors import NumbaError

from torchcmdp import kernels
from torchcmdp.kernels.cpu import compiled, exposed


class Inner(NamedTuple):
    row: np.ndarray
    flag: bool
    codes: np.ndarray


class Outer(NamedTuple):
    inner: Inner
    number: float
    table: np.ndarray
    count: int


class Alike(NamedTuple):
    one: np.ndarray
    other: np.ndarray


def outer() -> Outer:
    codes = np.array([3, -4, 5], np.int8)
    return Outer(Inner(np.arange(1.0, 6.0), True, codes), 2.5, np.arange(12.0).reshape(3, 4), 7)


@compiled
def made(record, number):
    """Records that are made here, one in the other, outlive the frame they were made in."""
    inner = Inner(record.table[1], number > 0.0, record.inner.codes[1:])
    return Outer(inner, number, record.table, record.count + 1), 4


@compiled
def weigh(record, flag, scale):
    """Members in several blocks, of records in records; shapes, and constant indices from the end."""
    inner = record.inner
    total = 0.0
    for x in range(record.table.shape[0]):
        for y in range(record.table.shape[1]):
            total += record.table[x, y] * scale if flag else record.table[x, -1] / scale
    for e in range(len(inner.codes)):
        if inner.codes[e] < 0 or not inner.flag:
            continue
        total += inner.row[inner.codes[e] - 2] * inner.codes[-1] ** 2
    return total + record.number


def everything(record, alike, out):
    for position in range(-2, 2):
        out[position + 2] = weigh(record, position % 2 == 0, 1.0 + position * position)
    other, four = made(record, out[0])
    again = made(other, -1.0)[0]
    out[-1] = four + weigh(other, other.inner.flag, 3.0) + weigh(again, again.inner.flag, 4)
    one, another = alike
    out[-2] = one[0] // 2.0 + another[1] % 2.0 + alike[1][2] + other.count + again.count
    out[-3] += record.table[np.uint64(1), np.int8(2)] + alike.one[0] ** 3
    alike.other[0] = -1.0
    record.table[2, -1] += another[0]


def test_a_compiled_kernel_finds_what_its_source_finds() -> None:
    found, expected = [], []
    for function, results in ((everything, expected), (exposed(everything), found)):
        record, alike, out = outer(), Alike(np.arange(3.0) + 5.5, np.arange(3.0) + 2.5), np.zeros(9)
        if function is everything:
            with_source(record, alike, out)
        else:
            function(record, alike, out)
        results += [record.table, alike.other, out]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-14)


def with_source(record: Outer, alike: Alike, out: np.ndarray) -> None:
    """`everything`, and the kernels it calls, as Python."""
    kernels = {"weigh": weigh.py_func, "made": made.py_func}
    FunctionType(everything.__code__, {**everything.__globals__, **kernels})(record, alike, out)


def test_a_record_made_in_a_loop_is_refused() -> None:
    def in_a_loop(first, count):
        last = first
        for _ in range(count):
            last = Alike(last.other, last.one)
        return last.one.shape[0]

    with pytest.raises(NumbaError, match="in_a_loop makes a record in a loop"):
        exposed(in_a_loop)(Alike(np.zeros(1), np.zeros(2)), 3)


def test_a_kernel_is_compiled_once_for_all_constants() -> None:
    @compiled
    def scaled(number, twice, power):
        return number * power if twice else number - power

    def several(number):
        x = 0
        for i in range(3):
            x += i
        return scaled(number, True, 1) + scaled(number, False, x) + scaled(number, number > 1.0, 2)

    assert exposed(several)(2.0) == 2.0 - 1.0 + 4.0
    assert len(scaled.overloads) == 1


def test_machine_code_does_not_ask_whether_an_index_counts_from_the_end() -> None:
    def pick(values, table, at):
        return values[at] + table[at, at]

    own = exposed(pick)
    assert own(np.arange(5.0), np.eye(4), 3) == 4.0
    (overload,) = own.overloads.values()
    assert "icmp slt i64" not in overload.library.get_llvm_str()


def test_no_kernel_counts_from_the_end_by_a_variable() -> None:
    """`values[-j]` would read what lies in front of an array."""
    for path in Path(kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.UnaryOp) and isinstance(node.slice.op, ast.USub):
                assert isinstance(node.slice.operand, ast.Constant), f"{path.name}:{node.lineno}"
