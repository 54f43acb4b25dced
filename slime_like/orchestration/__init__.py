"""Ray: the processes of a run, and what they do together."""

import os

# Ray prints a paragraph for each dead actor; its logs have them too, and the run reports one sentence.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^")
