"""Run one of the two systems to its end."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from slime_like.errors import SlimeLikeError

_TIMEOUT_S = 1800.0


def run_bounded(command: Sequence[str], log: Path) -> None:
    """Run ``command`` with its output in ``log``.

    Raises:
        SlimeLikeError: it failed, or took longer than half an hour.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            problem = f"{command[0]} ran longer than {_TIMEOUT_S:.0f} s"
            raise SlimeLikeError(problem, code="process-timed-out", remedy=f"see {log}") from error
    if done.returncode != 0:
        problem = f"{' '.join(command[:3])} ended with exit code {done.returncode}"
        raise SlimeLikeError(problem, code="process-failed", remedy=f"see {log}")
