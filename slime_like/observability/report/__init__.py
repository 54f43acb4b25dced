"""The HTML report of a run, and its figures on the terminal."""
