"""SwiGLU of float32 rows, forward and backward in one pass each (arXiv:2002.05202, section 2)."""

import numpy as np
from numba import float32

from slime_like.cpu.kernels.compiling import IN_ORDER, Array, kernel
from slime_like.cpu.kernels.elementary import exp

_ONE = np.float32(1.0)


@kernel(float32[:, ::1], float32[:, ::1], fastmath=IN_ORDER)
def forward(gate_up: Array, out: Array) -> None:
    """``out = gate * sigmoid(gate) * up``.

    Args:
        gate_up: (T, 2 F), a row's gates before its ups.
        out: (T, F), written.
    """
    tokens, width = out.shape
    for t in range(tokens):
        for f in range(width):
            gate = gate_up[t, f]
            out[t, f] = gate / (_ONE + exp(-gate)) * gate_up[t, width + f]


@kernel(float32[:, ::1], float32[:, ::1], fastmath=IN_ORDER)
def forward_in_place(gate: Array, up: Array) -> None:
    """``gate = gate * sigmoid(gate) * up``; both (rows, F)."""
    rows, width = gate.shape
    for row in range(rows):
        for f in range(width):
            x = gate[row, f]
            gate[row, f] = x / (_ONE + exp(-x)) * up[row, f]


@kernel(float32[:, ::1], float32[:, ::1], fastmath=IN_ORDER)
def backward(grad: Array, gate_up: Array) -> None:
    """Gradient of ``gate_up`` from that of ``out``, in its place.

    Args:
        grad: (T, F).
        gate_up: (T, 2 F).
    """
    tokens, width = grad.shape
    sigmoid, of_gate, of_up = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    for t in range(tokens):
        # One array is written in each loop: of two halves of a row the compiler does not know that they are apart.
        for f in range(width):
            sigmoid[f] = _ONE / (_ONE + exp(-gate_up[t, f]))
        for f in range(width):
            slope = sigmoid[f] * (_ONE + gate_up[t, f] * (_ONE - sigmoid[f]))
            of_gate[f] = grad[t, f] * gate_up[t, width + f] * slope
        for f in range(width):
            of_up[f] = grad[t, f] * gate_up[t, f] * sigmoid[f]
        for f in range(width):
            gate_up[t, f] = of_gate[f]
        for f in range(width):
            gate_up[t, width + f] = of_up[f]
