"""A model on disk: configuration, dimensions, weight files."""
