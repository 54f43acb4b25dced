"""Reference models on ranks of their own, and their refresh from the policy."""
