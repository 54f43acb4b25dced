"""One run: directory, session, steps, figures."""
