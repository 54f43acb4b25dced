"""Report of a run as an HTML page, and its metrics on the terminal."""
