"""Processes that end while they are being ended."""

import psutil
import pytest

from slime_like.system.processes import end_processes

UNUSED = 4_000_000  # no process has this id


def test_one_that_ends_this_moment_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "pid_exists", lambda process_id: True)  # as it was when it was looked for
    end_processes([UNUSED], grace_s=0.0)
