"""The endpoint for agents that own their loop: recorded turns, tool calls, protocols, sessions, the server."""
