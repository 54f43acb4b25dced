"""Scalar functions that Numba's compiler turns into vector instructions when a loop calls them."""

import math

import numpy as np

from slime_like.cpu.kernels.compiling import IN_ORDER, part

LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
"""Beyond them e^x leaves float32's normal numbers."""
LOG2_E = np.float32(math.log2(math.e))
LN2_HIGH = np.float32(0.693359375)  # nine bits: times a whole number it is exact
LN2_LOW = np.float32(math.log(2) - 0.693359375)
POLYNOMIAL = tuple(
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
_C0, _C1, _C2, _C3, _C4, _C5 = POLYNOMIAL
_ONE, _HALF = np.float32(1.0), np.float32(0.5)
EXPONENT_BIAS, MANTISSA_BITS = np.int32(127), np.int32(23)


@part(IN_ORDER)
def exp(x: np.float32) -> np.float32:
    """e^x to two units in the last place; NaN stays NaN.

    libm's function is a call for every element. This one is arithmetic alone: x = n ln 2 + r, a polynomial in r
    (Cephes' ``expf``, https://www.netlib.org/cephes) and n as the exponent's bits.
    """
    x = LOWEST if x < LOWEST else x  # NaN is neither
    x = _HIGHEST if x > _HIGHEST else x
    n = np.floor(x * LOG2_E + _HALF)
    r = x - n * LN2_HIGH - n * LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    p = p * r * r + r + _ONE
    return p * np.int32((np.int32(n) + EXPONENT_BIAS) << MANTISSA_BITS).view(np.float32)
