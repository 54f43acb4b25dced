"""Processes that serve an engine: started, called over a socket pair, watched, and ended by process id."""
