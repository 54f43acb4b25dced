"""Flags of a run for fault tests, and a wait for a call of one of its actors."""

import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.conftest import Tiny
from tests.support.processes import Command


def quick(tiny: Tiny, run_dir: Path, *more: str) -> list[str]:
    """Return flags with the transformers engine, which starts fastest, and without evaluation."""
    return tiny.rl_flags(run_dir, "--rollout.engine", "transformers", "--evaluation.files", "[]", *more)


def running(command: Command, call: str) -> psutil.Process:
    """Wait for an actor to run ``call``, which Ray shows in the title of its process."""
    while True:
        assert command.process.poll() is None, command.output
        actors = [each for each in command.descendants() if title(each).startswith(call.partition(".")[0])]
        for _ in range(50):  # finding processes takes longer than a short call, and reading titles does not
            for process in actors:
                if title(process) == call:
                    return process
            time.sleep(0.001)


def title(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return "".join(process.cmdline()[:1])
    return ""
