"""Report of a run as an HTML page, and its metrics on the terminal."""

REPORT_FILE = "report.html"
"""Name of the page in the run's directory."""
