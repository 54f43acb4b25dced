"""Reference models on separate ranks, and their refresh from the policy."""
