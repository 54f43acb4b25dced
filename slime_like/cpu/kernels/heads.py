"""Operations on one head as vector instructions, since its loops are too short for automatic vectorisation.

Arrays are contiguous float32, of any number of axes; where a head lies (``..._at``) counts from their beginning,
unchecked. A head has D elements, a multiple of ``2 * LANES``; element d is rotated with element d + D / 2, by cosines
and sines of which D / 2 lie from ``turn_at`` on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
_AT, _FLOAT = types.int64, types.float32


@intrinsic
def copy(typing_context: Any, a: Any, a_at: Any, out: Any, out_at: Any, width: Any) -> Any:
    """``out = a``."""
    return types.void(a, _AT, out, _AT, _AT), _generate_copy


@intrinsic
def product(typing_context: Any, a: Any, a_at: Any, b: Any, b_at: Any, width: Any) -> Any:
    """``sum(a * b)``."""
    return _FLOAT(a, _AT, b, _AT, _AT), _generate_product


@intrinsic
def turn(
    typing_context: Any,
    a: Any,
    a_at: Any,
    weight: Any,
    factor: Any,
    cos: Any,
    sin: Any,
    turn_at: Any,
    out: Any,
    out_at: Any,
    width: Any,
) -> Any:
    """``out = rotated(a * factor * weight)``, of a weight (D,)."""
    return types.void(a, _AT, weight, _FLOAT, cos, sin, _AT, out, _AT, _AT), _generate_turn


@intrinsic
def turn_back(
    typing_context: Any,
    a: Any,
    a_at: Any,
    factor: Any,
    cos: Any,
    sin: Any,
    turn_at: Any,
    out: Any,
    out_at: Any,
    width: Any,
) -> Any:
    """``out = a * factor``, rotated the other way; ``out`` may be ``a``."""
    return types.void(a, _AT, _FLOAT, cos, sin, _AT, out, _AT, _AT), _generate_turn_back


@intrinsic
def norm_back(
    typing_context: Any,
    grad: Any,
    grad_at: Any,
    x: Any,
    x_at: Any,
    weight: Any,
    rstd: Any,
    weight_grad: Any,
    width: Any,
) -> Any:
    """Overwrite ``x`` with its gradient from that of its norm, and add ``weight_grad += grad * x * rstd``.

    See ``rms_norm.backward``.
    """
    return types.void(grad, _AT, x, _AT, weight, _FLOAT, weight_grad, _AT), _generate_norm_back


def _generate_copy(*given: Any) -> Any:
    code = _Code(*given)
    a, a_at, out, out_at, width = code.values
    with code.pieces(width) as d:
        code.store(code.load(a, a_at, d), out, out_at, d)
    return code.nothing


def _generate_product(*given: Any) -> Any:
    code = _Code(*given)
    a, a_at, b, b_at, width = code.values
    total = code.accumulator()
    with code.pieces(width) as d:
        code.accumulate(total, code.load(a, a_at, d), code.load(b, b_at, d))
    return code.sum_of(total)


def _generate_turn(*given: Any) -> Any:
    code = _Code(*given)
    a, a_at, weight, factor, cos, sin, turn_at, out, out_at, width = code.values
    half, factors = code.half(width), code.splat(factor)
    with code.pieces(half) as d:
        low = code.times(code.times(code.load(a, a_at, d), factors), code.load(weight, d))
        high = code.times(code.times(code.load(a, a_at, half, d), factors), code.load(weight, half, d))
        straight, across = code.load(cos, turn_at, d), code.load(sin, turn_at, d)
        code.store(code.minus(code.times(low, straight), code.times(high, across)), out, out_at, d)
        code.store(code.plus(code.times(high, straight), code.times(low, across)), out, out_at, half, d)
    return code.nothing


def _generate_turn_back(*given: Any) -> Any:
    code = _Code(*given)
    a, a_at, factor, cos, sin, turn_at, out, out_at, width = code.values
    half, factors = code.half(width), code.splat(factor)
    with code.pieces(half) as d:
        low, high = (code.times(code.load(a, a_at, *at), factors) for at in ((d,), (half, d)))
        straight, across = code.load(cos, turn_at, d), code.load(sin, turn_at, d)
        code.store(code.plus(code.times(low, straight), code.times(high, across)), out, out_at, d)
        code.store(code.minus(code.times(high, straight), code.times(low, across)), out, out_at, half, d)
    return code.nothing


def _generate_norm_back(*given: Any) -> Any:
    code = _Code(*given)
    grad, grad_at, x, x_at, weight, rstd, weight_grad, width = code.values
    factors, projection = code.splat(rstd), code.accumulator()
    with code.pieces(width) as d:
        slope = code.times(code.load(grad, grad_at, d), code.load(x, x_at, d))
        code.store(code.plus(code.times(slope, factors), code.load(weight_grad, d)), weight_grad, d)
        code.accumulate(projection, slope, code.load(weight, d))
    total = code.times(code.times(code.sum_of(projection), code.times(rstd, rstd)), code.inverse(width))
    shares = code.splat(total)
    with code.pieces(width) as d:
        term = code.times(code.load(grad, grad_at, d), code.load(weight, d))
        term = code.minus(term, code.times(code.load(x, x_at, d), shares))
        code.store(code.times(term, factors), x, x_at, d)
    return code.nothing


class _Code:
    """Code generation of an intrinsic: its arguments, array addresses, and vector operations."""

    _vector = ir.VectorType(ir.FloatType(), LANES)

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self._builder = builder
        self.nothing = context.get_dummy_value()
        self.values = [
            context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        ]

    def load(self, array: Any, *offsets: Any) -> Any:
        return self._builder.load(self._place(array, offsets), align=4)

    def store(self, value: Any, array: Any, *offsets: Any) -> None:
        self._builder.store(value, self._place(array, offsets), align=4)

    def _place(self, array: Any, offsets: Any) -> Any:
        index = offsets[0]
        for offset in offsets[1:]:
            index = self._builder.add(index, offset)
        return self._builder.bitcast(self._builder.gep(array, [index]), self._vector.as_pointer())

    @contextmanager
    def pieces(self, width: Any) -> Iterator[Any]:
        """What is generated inside runs for every piece of ``LANES`` elements: the offset of its first."""
        lanes = ir.Constant(width.type, LANES)
        with cgutils.for_range(self._builder, self._builder.udiv(width, lanes)) as loop:
            yield self._builder.mul(loop.index, lanes)

    def half(self, width: Any) -> Any:
        return self._builder.udiv(width, ir.Constant(width.type, 2))

    def inverse(self, width: Any) -> Any:
        return self._builder.fdiv(ir.Constant(ir.FloatType(), 1.0), self._builder.uitofp(width, ir.FloatType()))

    def times(self, a: Any, b: Any) -> Any:
        return self._builder.fmul(a, b, flags=("contract",))

    def plus(self, a: Any, b: Any) -> Any:
        return self._builder.fadd(a, b, flags=("contract",))

    def minus(self, a: Any, b: Any) -> Any:
        return self._builder.fsub(a, b, flags=("contract",))

    def splat(self, value: Any) -> Any:
        """A float in every lane."""
        undefined, first = ir.Constant(self._vector, ir.Undefined), ir.Constant(ir.IntType(32), 0)
        mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return self._builder.shuffle_vector(self._builder.insert_element(undefined, value, first), undefined, mask)

    def accumulator(self) -> Any:
        """Zeros, for ``accumulate`` and ``sum_of``."""
        return cgutils.alloca_once_value(self._builder, ir.Constant(self._vector, [0.0] * LANES))

    def accumulate(self, total: Any, a: Any, b: Any) -> None:
        """``total += a * b``, lane by lane."""
        self._builder.store(self.plus(self._builder.load(total), self.times(a, b)), total)

    def sum_of(self, total: Any) -> Any:
        """Sum over all lanes."""
        lanes, width = self._builder.load(total), LANES
        while width > 1:
            width //= 2
            upper = [width + place if place < width else 0 for place in range(LANES)]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), upper)
            lanes = self.plus(self._builder.shuffle_vector(lanes, lanes, mask), lanes)
        return self._builder.extract_element(lanes, ir.Constant(ir.IntType(32), 0))
