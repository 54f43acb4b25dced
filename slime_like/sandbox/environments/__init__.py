"""Environments for conversations, and the worker processes that run them."""
