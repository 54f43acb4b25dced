"""Environments: what answers a model between its turns, and the worker processes that do."""

from slime_like.environments.environment import Environment, Step, Task

__all__ = ["Environment", "Step", "Task"]
