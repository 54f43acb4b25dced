"""The innermost loop of every product: four rows by sixteen columns in a processor's registers.

Numba leaves it to LLVM to find vector instructions in scalar loops, which it does where loops are long. A sequence's
are short; here they are written down.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slime_like.cpu.kernels.elementary import (
    EXPONENT_BIAS,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOWEST,
    MANTISSA_BITS,
    POLYNOMIAL,
)

ROWS, LANES = 4, 16


@intrinsic
def add_product(
    typing_context: Any,
    a: Any,
    a_first: Any,
    a_row: Any,
    a_step: Any,
    b: Any,
    b_first: Any,
    b_step: Any,
    count: Any,
    out: Any,
    out_first: Any,
    out_row: Any,
    adds: Any,
) -> Any:
    """``out[r, l] (+)= sum over k < count of a[r, k] * b[k, l]`` for ``ROWS`` r and ``LANES`` l, in float32.

    Arrays are contiguous, of any number of axes; where an element lies counts from their beginning, unchecked.

    Args:
        a_first, a_row, a_step: a[r, k] lies at ``a_first + r * a_row + k * a_step``.
        b_first, b_step: b[k, l] lies at ``b_first + k * b_step + l``.
        out_first, out_row: out[r, l] lies at ``out_first + r * out_row + l``.
        adds: to what is there; else what is there does not matter.
    """
    signature = types.void(a, *[types.int64] * 3, b, *[types.int64] * 3, out, types.int64, types.int64, types.boolean)
    return signature, _generate


def _generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    a, a_first, a_row, a_step, b, b_first, b_step, count, out, out_first, out_row, adds = arguments
    vector = ir.VectorType(ir.FloatType(), LANES)
    a_data, b_data, out_data = (
        context.make_array(signature.args[place])(context, builder, value).data
        for place, value in ((0, a), (4, b), (8, out))
    )

    def at(data: Any, index: Any) -> Any:
        return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())

    def out_at(row: int) -> Any:
        return at(out_data, builder.add(out_first, builder.mul(out_row, ir.Constant(out_row.type, row))))

    zero = ir.Constant(vector, [0.0] * LANES)
    sums = [cgutils.alloca_once(builder, vector) for _ in range(ROWS)]
    with builder.if_else(builder.icmp_unsigned("!=", adds, ir.Constant(adds.type, 0))) as (then, otherwise):
        with then:
            for row in range(ROWS):
                builder.store(builder.load(out_at(row), align=4), sums[row])
        with otherwise:
            for row in range(ROWS):
                builder.store(zero, sums[row])
    with cgutils.for_range(builder, count) as loop:
        columns = builder.load(at(b_data, builder.add(b_first, builder.mul(loop.index, b_step))), align=4)
        place = builder.add(a_first, builder.mul(loop.index, a_step))
        for row in range(ROWS):
            index = builder.add(place, builder.mul(a_row, ir.Constant(a_row.type, row)))
            factor = builder.load(builder.gep(a_data, [index]))
            lane = builder.insert_element(ir.Constant(vector, ir.Undefined), factor, ir.Constant(ir.IntType(32), 0))
            mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
            splat = builder.shuffle_vector(lane, ir.Constant(vector, ir.Undefined), mask)
            product = builder.fmul(splat, columns, flags=("contract",))
            builder.store(builder.fadd(builder.load(sums[row]), product, flags=("contract",)), sums[row])
    for row in range(ROWS):
        builder.store(builder.load(sums[row]), out_at(row), align=4)
    return context.get_dummy_value()


@intrinsic
def exponentials(typing_context: Any, a: Any, first: Any, count: Any, seen: Any) -> Any:
    """In place: ``e^(x - m)`` of the first ``seen`` of ``count`` elements that lie one behind the other, 0 of the rest.

    What is below e^-87 becomes 0, NaN stays NaN.

    Args:
        count: a positive multiple of ``LANES``.
        seen: more than ``count - LANES``.

    Returns:
        The largest, m, passing over NaN, and the sum of the results.
    """
    signature = types.UniTuple(types.float32, 2)(a, types.int64, types.int64, types.int64)
    return signature, _generate_exponentials


def _generate_exponentials(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array, first, count, seen = arguments
    lanes = _Lanes(builder)
    data = context.make_array(signature.args[0])(context, builder, array).data
    step = ir.Constant(count.type, LANES)
    last = builder.sub(count, step)

    def place(offset: Any) -> Any:
        return builder.bitcast(builder.gep(data, [builder.add(first, offset)]), lanes.vector.as_pointer())

    # What is not seen lies in the last block alone.
    inside = builder.icmp_signed("<", lanes.numbers, lanes.splat(builder.trunc(builder.sub(seen, last), lanes.integer)))
    masked = builder.select(inside, builder.load(place(last), align=4), lanes.constant(float("-inf")))
    found = cgutils.alloca_once_value(builder, masked)
    with cgutils.for_range(builder, builder.udiv(last, step)) as loop:
        given = builder.load(place(builder.mul(loop.index, step)), align=4)
        builder.store(lanes.larger(given, builder.load(found)), found)
    largest = lanes.folded(builder.load(found), lanes.larger)
    shift = lanes.splat(largest)

    ended = lanes.exp(builder.fsub(masked, shift))
    builder.store(ended, place(last), align=4)
    total = cgutils.alloca_once_value(builder, ended)
    with cgutils.for_range(builder, builder.udiv(last, step)) as loop:
        where = place(builder.mul(loop.index, step))
        result = lanes.exp(builder.fsub(builder.load(where, align=4), shift))
        builder.store(result, where, align=4)
        builder.store(builder.fadd(builder.load(total), result), total)
    sums = lanes.folded(builder.load(total), builder.fadd)
    return context.make_tuple(builder, signature.return_type, (largest, sums))


class _Lanes:
    """``LANES`` float32 side by side."""

    vector = ir.VectorType(ir.FloatType(), LANES)
    integer = ir.IntType(32)
    integers = ir.VectorType(ir.IntType(32), LANES)
    numbers = ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(range(LANES)))

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def constant(self, value: Any) -> Any:
        return ir.Constant(self.vector, [float(value)] * LANES)

    def splat(self, value: Any) -> Any:
        """A float or a 32-bit integer, in every lane."""
        several = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        one = self._builder.insert_element(several, value, ir.Constant(self.integer, 0))
        return self._builder.shuffle_vector(one, several, ir.Constant(self.integers, [0] * LANES))

    def larger(self, a: Any, b: Any) -> Any:
        """``b`` where ``a`` is NaN."""
        return self._builder.select(self._builder.fcmp_ordered(">", a, b), a, b)

    def folded(self, lanes: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All lanes combined into one float."""
        width = LANES
        while width > 1:
            width //= 2
            upper = [width + place if place < width else 0 for place in range(LANES)]
            mask = ir.Constant(self.integers, upper)
            lanes = combine(self._builder.shuffle_vector(lanes, lanes, mask), lanes)
        return self._builder.extract_element(lanes, ir.Constant(self.integer, 0))

    def exp(self, x: Any) -> Any:
        """As ``elementary.exp`` for what is not above 0, but 0 where that stops at its lowest."""
        builder = self._builder
        below = builder.fcmp_ordered("<", x, self.constant(LOWEST))
        kind = ir.FunctionType(self.vector, [self.vector])
        floor = cgutils.get_or_insert_function(builder.module, kind, f"llvm.floor.v{LANES}f32")
        n = builder.call(floor, [self._multiply_add(x, LOG2_E, self.constant(0.5))])
        r = self._multiply_add(n, -LN2_HIGH, x)
        r = self._multiply_add(n, -LN2_LOW, r)
        p = self.constant(POLYNOMIAL[0])
        for coefficient in POLYNOMIAL[1:]:
            p = self._multiply_add(p, r, self.constant(coefficient))
        p = self._multiply_add(builder.fmul(p, r), r, r)
        p = builder.fadd(p, self.constant(1.0))
        power = builder.fptosi(builder.select(below, self.constant(0.0), n), self.integers)
        bits = builder.shl(
            builder.add(power, ir.Constant(self.integers, [EXPONENT_BIAS] * LANES)),
            ir.Constant(self.integers, [MANTISSA_BITS] * LANES),
        )
        return builder.select(below, self.constant(0.0), builder.fmul(p, builder.bitcast(bits, self.vector)))

    def _multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        factor = b if isinstance(b, ir.Value) else self.constant(b)
        return self._builder.fadd(self._builder.fmul(a, factor, flags=("contract",)), c, flags=("contract",))
