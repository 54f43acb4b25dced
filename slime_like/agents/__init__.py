"""Endpoint for agents that run their own loop: recorded turns, tool calls, protocols, sessions and the server."""
