"""Attention over packed sequences, on one rank and over context-parallel ranks."""
