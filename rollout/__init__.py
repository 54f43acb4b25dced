"""Rollout engines, which implement ``slime_like.interfaces.RolloutEngine``.

``slime_like.orchestration.rollout`` sends them requests, and handles staleness and deaths.
"""
