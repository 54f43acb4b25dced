"""Operations on one head: D elements, a multiple of ``2 * LANES``, from a place (``..._at``) in an array on.

Element d is rotated with element d + D / 2, by cosines and sines of which D / 2 lie from ``turn_at`` on.
"""

from typing import Any

from llvmlite import ir
from numba import types

from slime_like.cpu.kernels.vectors import ARRAY, FLOAT, INT, Vectors, vector_code

LANES = 8


@vector_code(LANES, types.void, ARRAY, INT, ARRAY, INT, INT)
def copy(code: Vectors, a: Any, a_at: Any, out: Any, out_at: Any, width: Any) -> None:
    """``out = a``."""
    with code.pieces(width) as d:
        code.store(code.load(a, a_at, d), out, out_at, d)


@vector_code(LANES, FLOAT, ARRAY, INT, ARRAY, INT, INT)
def product(code: Vectors, a: Any, a_at: Any, b: Any, b_at: Any, width: Any) -> Any:
    """``sum(a * b)``."""
    total = code.accumulator()
    with code.pieces(width) as d:
        code.accumulate(total, code.load(a, a_at, d), code.load(b, b_at, d))
    return code.sum_of(total)


@vector_code(LANES, types.void, ARRAY, INT, ARRAY, FLOAT, ARRAY, ARRAY, INT, ARRAY, INT, INT)
def turn(code: Vectors, a: Any, a_at: Any, weight: Any, factor: Any, cos: Any, sin: Any, *rest: Any) -> None:
    """``out = rotated(a * factor * weight)``, of a weight (D,); the ``rest`` is turn_at, out, out_at, D."""
    turn_at, out, out_at, width = rest
    half, factors = _half(code, width), code.splat(factor)
    with code.pieces(half) as d:
        low = code.times(code.times(code.load(a, a_at, d), factors), code.load(weight, d))
        high = code.times(code.times(code.load(a, a_at, half, d), factors), code.load(weight, half, d))
        straight, across = code.load(cos, turn_at, d), code.load(sin, turn_at, d)
        code.store(code.minus(code.times(low, straight), code.times(high, across)), out, out_at, d)
        code.store(code.plus(code.times(high, straight), code.times(low, across)), out, out_at, half, d)


@vector_code(LANES, types.void, ARRAY, INT, FLOAT, ARRAY, ARRAY, INT, ARRAY, INT, INT)
def turn_back(code: Vectors, a: Any, a_at: Any, factor: Any, cos: Any, sin: Any, *rest: Any) -> None:
    """``out = a * factor``, rotated the other way; ``out`` may be ``a``. The ``rest`` is as that of ``turn``."""
    turn_at, out, out_at, width = rest
    half, factors = _half(code, width), code.splat(factor)
    with code.pieces(half) as d:
        low, high = (code.times(code.load(a, a_at, *at), factors) for at in ((d,), (half, d)))
        straight, across = code.load(cos, turn_at, d), code.load(sin, turn_at, d)
        code.store(code.plus(code.times(low, straight), code.times(high, across)), out, out_at, d)
        code.store(code.minus(code.times(high, straight), code.times(low, across)), out, out_at, half, d)


@vector_code(LANES, types.void, ARRAY, INT, ARRAY, INT, ARRAY, FLOAT, ARRAY, INT)
def norm_back(
    code: Vectors, grad: Any, grad_at: Any, x: Any, x_at: Any, weight: Any, rstd: Any, weight_grad: Any, width: Any
) -> None:
    """Overwrite ``x`` with its gradient from that of its norm, and add ``weight_grad += grad * x * rstd``.

    See ``rms_norm.backward``.
    """
    builder, factors, projection = code.builder, code.splat(rstd), code.accumulator()
    with code.pieces(width) as d:
        slope = code.times(code.load(grad, grad_at, d), code.load(x, x_at, d))
        code.store(code.plus(code.times(slope, factors), code.load(weight_grad, d)), weight_grad, d)
        code.accumulate(projection, slope, code.load(weight, d))
    inverse = builder.fdiv(ir.Constant(ir.FloatType(), 1.0), builder.uitofp(width, ir.FloatType()))
    shares = code.splat(code.times(code.times(code.sum_of(projection), code.times(rstd, rstd)), inverse))
    with code.pieces(width) as d:
        term = code.times(code.load(grad, grad_at, d), code.load(weight, d))
        term = code.minus(term, code.times(code.load(x, x_at, d), shares))
        code.store(code.times(term, factors), x, x_at, d)


def _half(code: Vectors, width: Any) -> Any:
    return code.builder.udiv(width, ir.Constant(width.type, 2))
