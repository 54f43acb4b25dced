"""A run: directory, session, steps, figures."""
