"""Kernels for a CPU, compiled by Numba: attention, norms, SwiGLU, sampling, and decoding."""
