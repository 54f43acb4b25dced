"""Weight sync: how fast buckets travel, what sending only changes saves, and what verification costs.

``python -m benchmarks.weights`` runs every part; name some to run those only.
"""
