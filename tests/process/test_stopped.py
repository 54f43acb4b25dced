"""Stopped processes and stopped children of workers are found."""

import signal
import subprocess
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from slime_like.orchestration.cluster.stopped import stopped_processes
from tests.process.conftest import wait_until


def test_a_stopped_child_of_a_worker_is_found_and_ended(tmp_path: Path) -> None:
    command = ["sh", "-c", "sleep 600 & wait"]
    with (tmp_path / "engine-3.2.log").open("wb") as log, subprocess.Popen(command, stdout=log) as worker:
        try:
            wait_until(lambda: psutil.Process(worker.pid).children() != [])
            (child,) = psutil.Process(worker.pid).children()
            assert stopped_processes([worker.pid], "here") == []
            child.send_signal(signal.SIGSTOP)
            wait_until(lambda: child.status() == psutil.STATUS_STOPPED)
            (found,) = stopped_processes([worker.pid, 2**22 + 1], "here")
            assert (found.node, found.process, found.role) == ("here", child.pid, "engine-3.2")
            assert stopped_processes([worker.pid], "here", end=[found]) == [found]
            worker.wait(10)  # it waits for its child
        finally:
            for process in (*psutil.Process(worker.pid).children(), worker) if worker.poll() is None else ():
                process.kill()
