"""Sparse weight sync: only what changed since the last one, bit for bit what a whole one would bring.

In 16-bit formats most weights stay as they are in one step at a small learning rate: the step is smaller than half the
distance to the next number that the format has.
"""
