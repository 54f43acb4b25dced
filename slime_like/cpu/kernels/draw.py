"""One token per row of float32 logits, drawn by inverting the cumulative distribution in float64."""

import math

import numpy as np
from numba import float32, float64, int64

from slime_like.cpu.kernels.compiling import IN_ORDER, Array, kernel, part

_BLOCK = 64
"""Probabilities that are added up at once; the walk to the drawn token goes from sum to sum."""
_LOWEST = -708.0  # below it e^x leaves float64's normal numbers
_LOG2_E = math.log2(math.e)
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # 32 bits: times a whole number it is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_ROUNDING = 1.5 * 2.0**52  # added, it leaves a whole number in a float64's low bits
_MANTISSA_BITS = np.int64(52)
_TAYLOR = tuple(1.0 / math.factorial(n) for n in range(12))
_T2, _T3, _T4, _T5, _T6, _T7, _T8, _T9, _T10, _T11 = _TAYLOR[2:]


@part(IN_ORDER)
def _exp(x: float) -> float:
    """e^x of x <= 0 to a relative 1e-14, as arithmetic that becomes vector instructions; NaN stays NaN."""
    bounded = _LOWEST if x < _LOWEST else x
    shifted = bounded * _LOG2_E + _ROUNDING
    n = shifted - _ROUNDING
    r = bounded - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((((((_T11 * r + _T10) * r + _T9) * r + _T8) * r + _T7) * r + _T6) * r + _T5) * r + _T4) * r + _T3) * r + _T2
    p = p * r * r + r + 1.0
    power = np.int64(np.float64(p).view(np.int64) + (np.float64(shifted).view(np.int64) << _MANTISSA_BITS))
    return x if x != x else (0.0 if x < _LOWEST else power.view(np.float64))


@part()
def _probabilities(logits: Array, temperature: float, largest: float, probabilities: Array, sums: Array) -> float:
    """``probabilities[v] = e^(logits[v] / temperature - largest)`` and the ``sums`` of its blocks; gives their sum."""
    total = 0.0
    for block in range(sums.shape[0]):
        block_sum = 0.0
        for v in range(block * _BLOCK, min((block + 1) * _BLOCK, logits.shape[0])):
            p = _exp(np.float64(logits[v] / temperature) - np.float64(largest))
            probabilities[v] = p
            block_sum += p
        sums[block] = block_sum
        total += block_sum
    return total


@part(IN_ORDER)
def _inverted(probabilities: Array, sums: Array, target: float) -> int:
    """The first token up to which the probabilities add up to more than ``target``.

    None with probability zero: where rounding leaves the sum at ``target`` it is the last that has any.
    """
    below, block = 0.0, 0
    while block + 1 < sums.shape[0] and below + sums[block] <= target:
        below += sums[block]
        block += 1
    for v in range(block * _BLOCK, probabilities.shape[0]):
        below += probabilities[v]
        if below > target and probabilities[v] > 0.0:
            return v
    for v in range(probabilities.shape[0] - 1, -1, -1):
        if probabilities[v] > 0.0:
            return v
    return probabilities.shape[0] - 1


@kernel(float32[:, ::1], float32[::1], float64[::1], int64[::1], float32[::1], fastmath=IN_ORDER)
def forward(logits: Array, temperatures: Array, uniform: Array, tokens: Array, logprobs: Array) -> None:
    """Write every row's token and its logprob over the whole vocabulary.

    Args:
        logits: (B, V).
        temperatures: (B,); 0 takes the largest logit, and its logprob at temperature 1.
        uniform: (B,), from [0, 1).
        tokens, logprobs: (B,).
    """
    rows, vocabulary = logits.shape
    probabilities = np.empty(vocabulary, np.float64)
    sums = np.empty((vocabulary + _BLOCK - 1) // _BLOCK, np.float64)
    for row in range(rows):
        best = 0
        for v in range(vocabulary):
            if logits[row, v] > logits[row, best]:
                best = v
        temperature = temperatures[row] if temperatures[row] > 0 else np.float32(1.0)
        largest = logits[row, best] / temperature
        total = _probabilities(logits[row], temperature, largest, probabilities, sums)
        token = best
        if temperatures[row] > 0:
            token = _inverted(probabilities, sums, uniform[row] * total)
        tokens[row] = token
        logprobs[row] = np.float64(logits[row, token] / temperature) - np.float64(largest) - math.log(total)
