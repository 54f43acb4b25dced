"""Damaged and forged input for the commands' own readers; see ``__main__``."""
