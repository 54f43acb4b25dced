"""Logs are bounded, and keep their beginning and their last words."""

import os
import re
import tempfile
import threading
import time
from pathlib import Path

import pytest

from slime_like.system import disk
from slime_like.system.disk import open_log


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_LOG_BYTES", 2**16)
    monkeypatch.setattr(disk, "_HEAD_BYTES", 2**14)
    monkeypatch.setattr(disk, "_TAIL_BYTES", 2**13)


def test_the_middle_of_a_long_log_is_dropped(tmp_path: Path) -> None:
    """It is shortened while somebody writes, whose last line is there."""

    def write(number: int) -> None:
        for line in range(200_000):
            os.write(number, b"line %06d\n" % line)

    with open_log(tmp_path, "reward-0") as log:
        dropped, writer = 0, threading.Thread(target=write, args=(log.fileno(),))
        writer.start()
        while writer.is_alive():
            dropped = disk.drop_middle(log.fileno(), dropped)
            time.sleep(0.001)
        dropped = disk.drop_middle(log.fileno(), dropped)
    found = (tmp_path / "reward-0.log").read_bytes()
    assert len(found) <= 2**16 and found.startswith(b"line 000000\nline 000001\n")
    assert found.endswith(b"line 199998\nline 199999\n")
    (missing,) = re.findall(rb"\n\[slime-like\] (\d+) bytes are missing here", found)
    assert int(missing) == dropped
    # What was written just while the log was shortened may be missing, too; each notice is 100 bytes.
    assert 0.9 * 200_000 * 12 < len(found) + dropped < 1.1 * 200_000 * 12


def test_a_discarded_log_is_bounded_while_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file has no name and is not opened for appending."""
    monkeypatch.setattr(disk, "_CHECK_LOGS_S", 0.01)
    with tempfile.TemporaryFile(buffering=0) as log:
        disk.bound_log(log)
        log.write(b"x" * 2**20)
        number = next(number for number, file in disk._logs.items() if file() is log)
        for _ in range(500):
            if log.seek(0, 2) < 2**16:
                break
            time.sleep(0.01)
        assert log.seek(0, 2) < 2**16
    for _ in range(500):
        if number not in disk._logs:
            return
        time.sleep(0.01)
    raise AssertionError("the log is still checked")
