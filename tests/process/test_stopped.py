"""Stopped processes and stopped children of workers are found."""

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from slime_like.orchestration.cluster.stopped import stopped_processes


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that started another, both printing to a log."""
    with (tmp_path / "engine-3.2.log").open("wb") as log:
        process = subprocess.Popen(["sh", "-c", "sleep 600 & wait"], stdout=log)
    with process:
        while not psutil.Process(process.pid).children():
            time.sleep(0.01)
        yield process
        family = [] if process.poll() is not None else psutil.Process(process.pid).children()
        for one in (*family, process):
            one.kill()


def test_stopped_processes_are_found_and_ended(worker: subprocess.Popen[bytes]) -> None:
    (child,) = psutil.Process(worker.pid).children()
    assert stopped_processes([worker.pid], "here") == []
    child.send_signal(signal.SIGSTOP)
    while child.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    (found,) = stopped_processes([worker.pid, 2**22 + 1], "here")
    assert (found.node, found.process, found.role) == ("here", child.pid, "engine-3.2")
    assert stopped_processes([worker.pid], "here", end=[found]) == [found]
    child.wait(10)
    worker.wait(10)  # it waits for its child
