"""Rollout engines, each behind ``slime_like.interfaces.RolloutEngine``."""
