"""What a worker's heartbeat tells others."""

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_like.system import heartbeat
from slime_like.system.heartbeat import Pulse


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time of a heartbeat in ``tmp_path``, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(heartbeat, "_own", None)
    monkeypatch.delenv(heartbeat._DIRECTORY, raising=False)
    heartbeat.start(tmp_path)
    yield now
    del os.environ[heartbeat._DIRECTORY]


def read(directory: Path) -> Pulse:
    pulse = Pulse.read(directory, os.getpid())
    assert pulse is not None
    return pulse


def test_others_see_the_phase_and_the_last_progress(clock: list[float], tmp_path: Path) -> None:
    assert read(tmp_path).phase == "" and read(tmp_path).silent_s == 0.0
    with heartbeat.phase("train_minibatch"):
        clock[0] += 5.0
        assert (read(tmp_path).phase, read(tmp_path).still_s, read(tmp_path).count) == ("train_minibatch", 5.0, 0)
        heartbeat.beat()
        heartbeat.tick()
        clock[0] += 2.0
        assert (read(tmp_path).still_s, read(tmp_path).silent_s, read(tmp_path).count) == (2.0, 2.0, 1)
    assert read(tmp_path).phase == "" and Pulse.read(tmp_path, 2**22 + 1) is None


def test_the_usual_wait_is_the_median_of_the_longest_ones(clock: list[float], tmp_path: Path) -> None:
    """A phase with many short micro-batches is compared with its longest wait, not with its length."""
    for waits, usual_s in (((1, 4, 2), 0.0), ((30, 1), 0.0), ((6, 6, 6, 6), 0.0), ((9,), 6.0)):
        with heartbeat.phase("score"):
            assert read(tmp_path).usual_s == usual_s
            for wait in waits:
                clock[0] += wait
                heartbeat.beat()
    with heartbeat.phase("score"):
        assert read(tmp_path).usual_s == 7.5  # of 4, 30, 6 and 9


def test_phases_overlap(clock: list[float], tmp_path: Path) -> None:
    """The one that began last is shown. Its waits are the other's, too."""
    for _ in range(3):
        generating = heartbeat.phase("generate")
        generating.__enter__()
        with heartbeat.phase("sleep"):
            clock[0] += 3.0
            assert read(tmp_path).phase == "sleep"
        assert read(tmp_path).phase == "generate"
        generating.__exit__(None, None, None)
    with heartbeat.phase("generate"):
        assert math.isclose(read(tmp_path).usual_s, 3.0)
