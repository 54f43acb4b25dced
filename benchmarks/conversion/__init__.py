"""Seconds and memory of `slime-like convert`, next to a plain copy of the same bytes."""
