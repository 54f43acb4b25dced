"""SwiGLU of float32 rows whose gates and ups are two matrices."""

import numpy as np
from numba import float32

from slime_like.cpu.kernels.compiling import IN_ORDER, Array, kernel
from slime_like.cpu.kernels.elementary import exp

_ONE = np.float32(1.0)


@kernel(float32[:, ::1], float32[:, ::1], fastmath=IN_ORDER)
def forward(gate: Array, up: Array) -> None:
    """``gate = gate * sigmoid(gate) * up`` in place (arXiv:2002.05202, section 2); both (rows, F)."""
    rows, width = gate.shape
    for row in range(rows):
        for f in range(width):
            x = gate[row, f]
            gate[row, f] = x / (_ONE + exp(-x)) * up[row, f]
