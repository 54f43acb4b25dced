"""Trainer backends, each behind ``slime_like.interfaces.TrainerBackend``."""
