"""Refresh of the reference model from the policy."""
