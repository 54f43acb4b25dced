"""The innermost loops of attention: products of four rows by sixteen columns in registers, and exponentials."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from slime_like.cpu.kernels.elementary import (
    EXPONENT_BIAS,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOWEST,
    MANTISSA_BITS,
    POLYNOMIAL,
)
from slime_like.cpu.kernels.vectors import ARRAY, FLOAT, INT, Vectors, vector_code

ROWS, LANES = 4, 16


@vector_code(LANES, types.void, ARRAY, INT, INT, INT, ARRAY, INT, INT, INT, ARRAY, INT, INT, types.boolean)
def add_product(code: Vectors, a: Any, a_first: Any, a_row: Any, a_step: Any, *rest: Any) -> None:
    """``out[r, l] (+)= sum over k < count of a[r, k] * b[k, l]`` for ``ROWS`` r and ``LANES`` l.

    Args:
        a_first, a_row, a_step: a[r, k] lies at ``a_first + r * a_row + k * a_step``.
        rest: b, b_first, b_step, count, out, out_first, out_row, adds. b[k, l] lies at ``b_first + k * b_step + l``,
            out[r, l] at ``out_first + r * out_row + l``; ``adds`` to what is there, which else does not matter.
    """
    b, b_first, b_step, count, out, out_first, out_row, adds = rest
    builder = code.builder

    def place(first: Any, step: Any, number: int) -> Any:
        return builder.add(first, builder.mul(step, ir.Constant(step.type, number)))

    places = [place(out_first, out_row, row) for row in range(ROWS)]
    sums = [cgutils.alloca_once(builder, code.kind) for _ in range(ROWS)]
    with builder.if_else(builder.icmp_unsigned("!=", adds, ir.Constant(adds.type, 0))) as (then, otherwise):
        with then:
            for row in range(ROWS):
                builder.store(code.load(out, places[row]), sums[row])
        with otherwise:
            for row in range(ROWS):
                builder.store(code.constant(0.0), sums[row])
    with cgutils.for_range(builder, count) as loop:
        columns = code.load(b, builder.add(b_first, builder.mul(loop.index, b_step)))
        first = builder.add(a_first, builder.mul(loop.index, a_step))
        for row in range(ROWS):
            factor = builder.load(builder.gep(a, [place(first, a_row, row)]))
            code.accumulate(sums[row], code.splat(factor), columns)
    for row in range(ROWS):
        code.store(builder.load(sums[row]), out, places[row])


@vector_code(LANES, types.UniTuple(FLOAT, 2), ARRAY, INT, INT, INT)
def exponentials(code: Vectors, array: Any, first: Any, count: Any, seen: Any) -> tuple[Any, Any]:
    """In place: ``e^(x - m)`` of the first ``seen`` of ``count`` elements that lie one behind the other, 0 of the rest.

    What is below e^-87 becomes 0, NaN stays NaN.

    Args:
        count: a positive multiple of ``LANES``.
        seen: more than ``count - LANES``.

    Returns:
        The largest, m, passing over NaN, and the sum of the results.
    """
    builder = code.builder
    last = builder.sub(count, ir.Constant(count.type, LANES))

    def larger(a: Any, b: Any) -> Any:
        """``b`` where ``a`` is NaN."""
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    # What is not seen lies in the last block alone.
    numbers, seen_last = ir.Constant(code.integers, list(range(LANES))), builder.sub(seen, last)
    inside = builder.icmp_signed("<", numbers, code.splat(builder.trunc(seen_last, ir.IntType(32))))
    masked = builder.select(inside, code.load(array, first, last), code.constant(float("-inf")))
    found = cgutils.alloca_once_value(builder, masked)
    with code.pieces(last) as offset:
        builder.store(larger(code.load(array, first, offset), builder.load(found)), found)
    largest = code.folded(builder.load(found), larger)
    shift = code.splat(largest)

    ended = _exp(code, builder.fsub(masked, shift))
    code.store(ended, array, first, last)
    total = cgutils.alloca_once_value(builder, ended)
    with code.pieces(last) as offset:
        result = _exp(code, builder.fsub(code.load(array, first, offset), shift))
        code.store(result, array, first, offset)
        builder.store(builder.fadd(builder.load(total), result), total)
    return largest, code.folded(builder.load(total), builder.fadd)


def _exp(code: Vectors, x: Any) -> Any:
    """As ``elementary.exp`` for what is not above 0, but 0 where that stops at its lowest."""
    builder, zero = code.builder, code.constant(0.0)

    def multiply_add(a: Any, b: Any, c: Any) -> Any:
        return code.plus(code.times(a, b), c)

    below = builder.fcmp_ordered("<", x, code.constant(LOWEST))
    kind = ir.FunctionType(code.kind, [code.kind])
    floor = cgutils.get_or_insert_function(builder.module, kind, f"llvm.floor.v{LANES}f32")
    n = builder.call(floor, [multiply_add(x, code.constant(LOG2_E), code.constant(0.5))])
    r = multiply_add(n, code.constant(-LN2_HIGH), x)
    r = multiply_add(n, code.constant(-LN2_LOW), r)
    p = code.constant(POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        p = multiply_add(p, r, code.constant(coefficient))
    p = multiply_add(builder.fmul(p, r), r, r)
    p = builder.fadd(p, code.constant(1.0))
    power = builder.fptosi(builder.select(below, zero, n), code.integers)
    biased = builder.add(power, ir.Constant(code.integers, [EXPONENT_BIAS] * LANES))
    bits = builder.shl(biased, ir.Constant(code.integers, [MANTISSA_BITS] * LANES))
    return builder.select(below, zero, builder.fmul(p, builder.bitcast(bits, code.kind)))
