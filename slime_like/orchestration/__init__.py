"""Orchestration of a run's processes with Ray."""

import os

# Ray prints a paragraph per dead actor. Its logs have the same text, and the run reports one sentence.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^")
