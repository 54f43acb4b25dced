"""Checks of a configuration against files, models, engines and user code, before anything starts."""
