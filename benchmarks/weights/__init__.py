"""Measure weight syncs: speed of buckets, savings of sending only changes, and cost of verification.

``python -m benchmarks.weights`` runs every part; name parts to run only those.
"""
