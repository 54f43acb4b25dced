"""Subcommands with arguments of their own. Importing them imports neither torch nor Ray."""
