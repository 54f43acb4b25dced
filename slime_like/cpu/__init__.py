"""Code that exists for a CPU alone: Numba kernels, oneDNN products."""
