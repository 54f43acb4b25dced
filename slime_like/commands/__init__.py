"""Subcommands with their own arguments. Importing them imports neither torch nor Ray."""
