"""Processes that end by themselves while they are being ended."""

import psutil
import pytest

from slime_like.system.processes import end_processes


def test_a_process_that_has_just_ended_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "pid_exists", lambda process_id: True)  # it was there when it was found
    end_processes([4_000_000], grace_s=0.0)  # no process has this id
