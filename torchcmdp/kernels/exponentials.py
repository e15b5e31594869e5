"""exp of many numbers, four at a time: most of the exponentials of an episode, without a call to a library for each."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir as llvm
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from torchcmdp.kernels.options import kernel

FOUR = 4
WORD, HALF, REAL = llvm.IntType(64), llvm.IntType(32), llvm.DoubleType()
# exp(x) = 2^k exp(r) with |r| <= ln(2) / 2; the first part of ln 2 has so few bits that k times it is exact.
LN_2 = (6.93145751953125e-1, 1.42860682030941723212e-6)
# ... where 14 terms of the series leave 1e-17.
TERMS = 14
# Below the first, where numbers lose their precision, there is nothing. The second keeps k in its range; infinity begins before it,
# half a power of two before numbers end, at 709.44.
LEAST, LARGEST = -708.0, 710.0
MANTISSA, BIAS = 52, 1023


def _each(kind: Any, value: Any) -> Any:
    """A vector of one constant."""
    return llvm.Constant(llvm.VectorType(kind, FOUR), [value] * FOUR)


def _exponential(builder: Any, x: Any) -> Any:
    """exp of each number in a vector."""

    def number(value: float) -> Any:
        return _each(REAL, value)

    def call(name: str, *arguments: Any) -> Any:
        kind = llvm.FunctionType(x.type, [x.type] * len(arguments))
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{FOUR}f64"), arguments)

    bounded = builder.select(builder.fcmp_ordered("<", x, number(LARGEST)), x, number(LARGEST))
    bounded = builder.select(builder.fcmp_ordered(">", bounded, number(LEAST)), bounded, number(LEAST))
    k = call("rint", builder.fmul(bounded, number(1.0 / math.log(2.0))))
    r = bounded
    for part in LN_2:
        r = call("fmuladd", k, number(-part), r)
    # neighbouring terms are put together, again and again, which waits for less than one term after the other
    terms = [number(1.0 / math.factorial(term)) for term in range(TERMS)]
    while len(terms) > 1:
        terms = [call("fmuladd", terms[j + 1], r, terms[j]) if j + 1 < len(terms) else terms[j] for j in range(0, len(terms), 2)]
        r = builder.fmul(r, r)
    power = builder.sext(builder.fptosi(k, llvm.VectorType(HALF, FOUR)), llvm.VectorType(WORD, FOUR))
    power = builder.shl(builder.add(power, _each(WORD, BIAS)), _each(WORD, MANTISSA))
    found = builder.fmul(terms[0], builder.bitcast(power, x.type))
    found = builder.select(builder.fcmp_ordered("<", x, number(LEAST)), number(0.0), found)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, found)


def _at_once(whole: bool) -> Any:
    """The intrinsic for four numbers, or for up to four of them."""

    def take(typing_context: Any, source: Any, start: Any, stop: Any, shift: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            start, stop, shift = arguments[1:4]
            source, out = (context.make_array(signature.args[j])(context, builder, arguments[j]).data for j in (0, 4))
            lanes = [llvm.Constant(HALF, lane) for lane in range(FOUR)]
            # behind the end the last one is taken, and written, again
            last = builder.sub(stop, llvm.Constant(WORD, 1))
            places = [builder.add(start, llvm.Constant(WORD, lane)) for lane in range(FOUR)]
            inside = [builder.icmp_signed("<", place, stop) for place in places]
            if not whole:
                places = [builder.select(own, place, last) for own, place in zip(inside, places, strict=True)]
            x = llvm.Constant(llvm.VectorType(REAL, FOUR), llvm.Undefined)
            for lane, place in zip(lanes, places, strict=True):
                x = builder.insert_element(x, builder.fsub(builder.load(builder.gep(source, [place])), shift), lane)
            found = _exponential(builder, x)
            values = [builder.extract_element(found, lane) for lane in lanes]
            for value, place in zip(values, places, strict=True):
                builder.store(value, builder.gep(out, [place]))
            if not whole:
                values = [builder.select(own, value, llvm.Constant(REAL, 0.0)) for own, value in zip(inside, values, strict=True)]
            return builder.fadd(builder.fadd(values[0], values[1]), builder.fadd(values[2], values[3]))

        return types.float64(source, types.intp, types.intp, types.float64, out), generate

    return intrinsic(take)


_four, _fewer = _at_once(True), _at_once(False)


@kernel
def exponentials(source, start, stop, shift, out):
    """out[e] <- exp(source[e] - shift) for start <= e < stop; returns their sum."""
    total = 0.0
    e = start
    while e + 4 <= stop:
        total += _four(source, e, stop, shift, out)
        e += 4
    if e < stop:
        total += _fewer(source, e, stop, shift, out)
    return total


def one_by_one(source, start, stop, shift, out):
    """`exponentials` for compilers that have vectors of their own."""
    total = 0.0
    for e in range(start, stop):
        out[e] = math.exp(source[e] - shift)
        total += out[e]
    return total
