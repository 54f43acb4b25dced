"""Trainer backends, each behind ``slime_like.interfaces.TrainerBackend``.

``slime_like.orchestration.trainer`` drives them.
"""
