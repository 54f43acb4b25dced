"""Conversion and comparison of checkpoints, from disk to disk."""
