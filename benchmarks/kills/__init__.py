"""Runs whose processes are killed and stopped."""
