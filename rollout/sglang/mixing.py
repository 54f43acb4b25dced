"""A hash of numbers for random draws that depend on nothing but a seed and a position."""

from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mix(value: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64 tensors, elementwise; the sign bit is an ordinary bit, the result has 64.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    value = value + _signed(_GOLDEN)
    value = (value ^ _shift_right(value, 30)) * _signed(_MULTIPLIERS[0])
    value = (value ^ _shift_right(value, 27)) * _signed(_MULTIPLIERS[1])
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own copies the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
