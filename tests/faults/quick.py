"""Flags of a run for fault tests, and a wait for a call of one of its actors."""

import re
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.conftest import Tiny
from tests.support.processes import Command


def quick(tiny: Tiny, run_dir: Path, *more: str) -> list[str]:
    """Return flags with the transformers engine, which starts fastest, and without evaluation."""
    return tiny.rl_flags(run_dir, "--rollout.engine", "transformers", "--evaluation.files", "[]", *more)


def running(command: Command, call: str, timeout_s: float = 240.0) -> psutil.Process:
    """Wait for a worker in a call that matches ``call``, a pattern. Ray shows the call in the title of its process."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert command.process.poll() is None, command.output
        workers = [each for each in command.descendants() if title(each).startswith("ray::")]
        for _ in range(50):  # finding processes takes longer than a short call, and reading titles does not
            for process in workers:
                if re.fullmatch(call, title(process)):
                    return process
            time.sleep(0.001)
    raise AssertionError(f"no worker was in {call} within {timeout_s:.0f} s: {command.output}")


def title(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return "".join(process.cmdline()[:1])
    return ""
