"""Run a part within its limit, and read what came of it."""

import contextlib
import os
import signal
import subprocess
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.first_light.machine import Machine
from benchmarks.first_light.parts import Command, Part

_GRACE_S = 15.0
"""For pytest to write its results after an interrupt, and for a run to stop its processes."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Tests of a part, and how many were skipped for which reason."""

    passed: int = 0
    failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a part.

    Attributes:
        outcome: passed, failed, skipped, or stopped at its limit.
        reason: why it was skipped, or which command failed.
        counts: of its tests, where it has results of tests.
    """

    part: Part
    outcome: str
    seconds: float = 0.0
    reason: str = ""
    counts: Counts | None = None

    @property
    def bad(self) -> bool:
        return self.outcome not in ("passed", "skipped")


def run_part(part: Part, machine: Machine, out: Path) -> Result:
    """Output goes to a file of the part's name in ``out``; processes it leaves behind are ended."""
    if (obstacle := part.obstacle(machine)) is not None:
        return Result(part, "skipped", reason=obstacle)
    started = time.monotonic()
    outcome, reason = "passed", ""
    with (out / f"{part.slug}.log").open("w", encoding="utf-8") as log:
        for command in part.commands:
            code = _run(command, log.fileno(), started + part.limit_s - time.monotonic())
            if code != 0:
                outcome = "failed" if code is not None else f"stopped after {part.limit_s} s"
                reason = f"{' '.join(command[1:4])} ended with {code}" if code is not None else ""
                break
    counts = read_counts(part.tests) if part.tests is not None and part.tests.exists() else None
    if counts is not None and outcome == "passed" and not counts.passed:
        outcome, reason = "skipped", "; ".join(counts.skipped)
    return Result(part, outcome, time.monotonic() - started, reason, counts)


def _run(command: Command, output: int, seconds: float) -> int | None:
    """Its exit code; ``None`` where it was stopped after ``seconds``."""
    process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_counts(results: Path) -> Counts:
    """Counts of a file in JUnit's format."""
    failed, passed, skipped = 0, 0, Counter[str]()
    for case in ET.parse(results).getroot().iter("testcase"):
        skip = case.find("skipped")
        if skip is not None:
            skipped[skip.get("message", "")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        else:
            passed += 1
    return Counts(passed, failed, skipped)


def last_lines(log: Path, count: int = 12) -> Sequence[str]:
    """End of a part's output."""
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
