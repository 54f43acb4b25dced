"""Reward functions, and the worker processes that run them."""
