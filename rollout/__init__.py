"""The rollout engines, which implement ``slime_like.interfaces.RolloutEngine``.

Sampling with them, and their replacement, are in ``slime_like.orchestration.rollout``.
"""
