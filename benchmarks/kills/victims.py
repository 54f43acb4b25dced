"""Find a run's processes by class, and its phase, from the processes' titles."""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.processes import Command

PHASES = ("start", "generate", "score", "train", "sync", "save")
_LOOK_EVERY_S = 0.001
_FIND_EVERY_S = 0.5
VLLM_CORE = ("VLLM::EngineCore", "multiprocessing.spawn")
"""This class renames its process if the operating system allows it."""

_CALLS = {
    "generate": re.compile(r"ray::EngineActor\.generate"),
    "score": re.compile(r"ray::TrainerRank\.(score|score_batch)$"),
    "train": re.compile(r"ray::TrainerRank\.(load_batch|train_minibatch|train_window|finish_stream)$"),
    "sync": re.compile(r"ray::(TrainerRank\.(begin_export|next_bucket|end_export)|EngineActor\.(update|load_bucket))"),
    "save": re.compile(r"ray::TrainerRank\.(save|start_save|is_written|finish)$"),
}


@dataclass(frozen=True, slots=True)
class Victim:
    """A class of processes.

    Attributes:
        is_one: whether a process with this title and log is in the class.
        named: pattern that the message must contain if the process is missed.
        needed: a run that continues while such a process is stopped has not noticed it yet.
        vital: the run ends if it does.
    """

    is_one: Callable[[str, str], bool]
    named: str
    needed: bool = True
    vital: bool = False


def _titled(*texts: str) -> Callable[[str, str], bool]:
    return lambda title, _: any(text in title for text in texts)


VICTIMS = {
    "driver": Victim(lambda *_: False, r"driver \(process", vital=True),  # found by its process id
    "trainer rank": Victim(lambda _, log: log.startswith("trainer-"), r"trainer(-0| rank 0)", vital=True),
    "reference worker": Victim(lambda _, log: log.startswith("reference-"), r"reference(-| worker )0"),
    "engine actor": Victim(_titled("ray::EngineActor"), r"engine(-| )0"),
    "engine core": Victim(_titled(*VLLM_CORE), r"engine(-| )0"),
    "reward worker": Victim(_titled("slime_like.sandbox.rewards.worker"), r"reward worker"),
    "environment worker": Victim(_titled("slime_like.sandbox.environments.worker"), r"environment worker"),
    "raylet": Victim(_titled("raylet/raylet"), r"raylet", vital=True),
    "GCS": Victim(_titled("gcs/gcs_server"), r"(?i)gcs", vital=True),
    "runtime-env agent": Victim(_titled("ray::RuntimeEnvAgent"), r"runtime_env_agent", vital=True),
    "dashboard agent": Victim(_titled("ray::DashboardAgent"), r"dashboard_agent", needed=False, vital=True),
    "orphan reaper": Victim(_titled("cluster.orphan_reaper"), r"orphan reaper", needed=False),
}
"""Classes by engine: a transformers engine has no core, and only a vLLM engine's core is a separate class."""


def find(command: Command, name: str) -> psutil.Process | None:
    """Return the first process of this class, if there is one now."""
    if name == "driver":
        return psutil.Process(command.process.pid)
    found = [process for process in command.descendants() if VICTIMS[name].is_one(*_seen(process))]
    return min(found, key=lambda process: process.pid, default=None)


def wait_for_phase(command: Command, phase: str, timeout_s: float) -> bool:
    """Wait for a worker in this phase; return False if there is none in time or the command has ended."""
    deadline, found_at, workers = time.monotonic() + timeout_s, 0.0, list[int]()
    while time.monotonic() < deadline and command.process.poll() is None:
        if time.monotonic() - found_at > _FIND_EVERY_S:
            found_at = time.monotonic()
            workers = [process.pid for process in command.descendants() if "ray::" in _seen(process)[0]]
        for worker in workers:
            with suppress(OSError):
                title = Path(f"/proc/{worker}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
                if _CALLS[phase].match(title):
                    return True
        time.sleep(_LOOK_EVERY_S)
    return False


def _seen(process: psutil.Process) -> tuple[str, str]:
    """Return its title and the name of the log that it prints to."""
    title = log = ""
    with suppress(psutil.Error, OSError):
        title = " ".join(process.cmdline())
        log = Path(f"/proc/{process.pid}/fd/1").readlink().name
    return title, log
