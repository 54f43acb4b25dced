"""Compare time and memory of `slime-like convert` with a plain copy of the same bytes."""
