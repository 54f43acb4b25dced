"""Judging a chat template on random histories."""
