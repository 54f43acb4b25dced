"""A run: directory, session, steps and figures."""
