"""Environments that come with this distribution. Each imports the standard library and ``slime_like.environments``."""
