"""Agents that call the model themselves, and the worker processes that run them."""
