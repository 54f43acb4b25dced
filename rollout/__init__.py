"""Rollout engines, each behind ``slime_like.interfaces.RolloutEngine``.

``slime_like.orchestration.rollout`` drives them: requests, staleness, deaths.
"""
