"""Measure weight syncs: ``python -m benchmarks.weights [PART...]``."""
