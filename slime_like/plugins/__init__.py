"""Custom code: import paths, entry points, source, tracebacks."""
