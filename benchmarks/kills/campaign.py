"""Kill and stop processes of every class in every phase, in consecutive runs in one directory.

A case ends when the run has ended or has continued for ``_STEPS_AFTER`` steps. The next case follows in the same run; a
run that has ended is started again and resumes.
"""

import json
import random
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks.kills.victims import PHASES, VICTIMS, find, wait_for_phase
from slime_like.data.ledger import audit_run
from tests.support.processes import Command

KILLS, STOPS = 3, 2
"""Number of cases per class."""

DEATH_S, HANG_S = 30.0, 120.0
"""Bounds on the time until the message."""

_STEPS_AFTER = 3
_GIVE_UP_S = 160.0
_DRIVER_RESTS_S = 45.0
_START_S = 240.0
_PHASE_S = 60.0
_END_S = 60.0
_LOOK_EVERY_S = 0.05


@dataclass
class Case:
    """Case of a campaign: what is done to a run, and the outcome.

    Attributes:
        title: title of the process.
        outcome: "ended", "goes on", "hung".
        seconds: from the signal to the message, to the end, or to the last of ``_STEPS_AFTER`` steps.
        code: exit code of the run, if the case ended it.
        left: processes, shared memory and directories left after the end.
        step: last step before the signal.
        resumed: first step trained after it, and whether the steps up to the next case equal the undisturbed run's.
    """

    victim: str
    how: str
    phase: str
    title: str = ""
    outcome: str = ""
    seconds: float = 0.0
    end_s: float = 0.0
    sentence: str = ""
    code: int | None = None
    named: bool = True
    left: list[str] = field(default_factory=list)
    step: int = 0
    audit: bool = True
    resumed: tuple[int, bool] | None = None

    @property
    def is_good(self) -> bool:
        """Return whether it was within the bounds, named correctly, and left nothing."""
        bound = DEATH_S if self.how == "SIGKILL" else HANG_S
        in_time = self.outcome == "goes on" or (self.outcome == "ended" and self.seconds <= bound)
        return in_time and self.named and not self.left and self.audit and (self.resumed is None or self.resumed[1])


def draw(victims: Sequence[str], seed: int) -> list[Case]:
    """Return ``KILLS`` kills and ``STOPS`` stops per class, each in another phase, in random order."""
    generator, cases = random.Random(seed), []
    for victim in victims:
        phases = generator.sample(PHASES, KILLS + STOPS)
        cases += [Case(victim, "SIGKILL", phase) for phase in phases[:KILLS]]
        cases += [Case(victim, "SIGSTOP", phase) for phase in phases[KILLS:]]
    generator.shuffle(cases)
    return cases


class Campaign:
    """All cases in one run directory; records are appended to ``root/cases.jsonl`` as they are made.

    Args:
        arguments: arguments of ``slime-like``.
        temporary: directory for the run's temporary files only.
        forked: fork from a process that has imported everything, which saves most of the start. A forked reward worker
            or agent has a different parent, so that neither pool nor watch can find it stopped.
    """

    def __init__(self, arguments: Sequence[str], root: Path, temporary: Path, seed: int, forked: bool) -> None:
        self._arguments, self._root, self._temporary, self._forked = arguments, root, temporary, forked
        self._run_dir = root / "run"
        self._generator = random.Random(seed)
        self._command: Command | None = None
        self._starts = len(list(root.glob("log-*")))
        self._before: set[Path] = set()

    def run(self, cases: Sequence[Case], limit: int | None = None) -> list[Case]:
        """Apply the cases; cases of the start phase come when a run must be started anyway.

        Recorded cases are not repeated; they count for ``limit``.
        """
        done = self._recorded()
        known = {(case.victim, case.how, case.phase) for case in done}
        left = [case for case in cases if (case.victim, case.how, case.phase) not in known]
        while left and len(done) != limit:
            in_start = self._command is None
            case = next((case for case in left if (case.phase == "start") == in_start), left[0])
            left.remove(case)
            self._apply(case)
            done.append(case)
            with (self._root / "cases.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(case)) + "\n")
            print(f"{len(done)}/{len(cases)} {case}", flush=True)
        if self._command is None:
            self._start()
        self._await_steps()
        self._interrupt(Case("", "", ""))
        return done

    def _await_steps(self) -> None:
        """Wait for the steps after the last case."""
        goal, deadline = self.steps() + _STEPS_AFTER, time.monotonic() + _START_S
        while self.steps() < goal:
            assert self._command is not None and self._command.process.poll() is None, "the last start failed"
            assert time.monotonic() < deadline, f"no step {goal}"
            time.sleep(_LOOK_EVERY_S)

    def _recorded(self) -> list[Case]:
        records = self._root / "cases.jsonl"
        lines = records.read_text(encoding="utf-8").splitlines() if records.is_file() else []
        return [Case(**json.loads(line)) for line in lines]

    def steps(self) -> int:
        """Number of the last step in the run's metrics."""
        metrics = self._run_dir / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines() if line] if metrics.is_file() else []
        return max((row["step"] for row in rows if "train_actor_training/loss" in row), default=0)

    # ------------------------------------------------------------------------------------------------------ one case
    def _start(self) -> None:
        self._starts += 1
        self._before = set(self._temporary.iterdir())
        self._command = Command(self._arguments, self._root / f"log-{self._starts}", self._forked)

    def _apply(self, case: Case) -> None:
        if case.phase == "start" and self._command is not None:
            self._interrupt(case)
        if self._command is None:
            self._start()
        command = self._command
        assert command is not None
        process = self._at_its_phase(command, case)
        case.step, case.title = self.steps(), " ".join(process.cmdline())[:80]
        heard = len(command.output)
        process.send_signal(signal.Signals[case.how])
        self._follow(command, case, process, time.monotonic(), heard)

    def _at_its_phase(self, command: Command, case: Case) -> psutil.Process:
        """Wait until the run is in the case's phase, and return the process."""
        if case.phase != "start":
            command.wait_for("| step time ", _START_S)
            while find(command, case.victim) is None:
                time.sleep(_LOOK_EVERY_S)
            process = find(command, case.victim)
            assert wait_for_phase(command, case.phase, _PHASE_S), f"no {case.phase} seen: {command.output}"
        else:
            deadline = time.monotonic() + _START_S
            # A killed driver can leave nothing before there is an orphan reaper.
            while find(command, "orphan reaper") is None or (process := find(command, case.victim)) is None:
                assert time.monotonic() < deadline and command.process.poll() is None, command.output
                time.sleep(_LOOK_EVERY_S)
            time.sleep(self._generator.uniform(0.0, 3.0))
        assert process is not None
        return process

    def _follow(self, command: Command, case: Case, process: psutil.Process, began: float, heard: int) -> None:
        """Wait until the run has ended or has continued for long enough."""
        victim, goal = VICTIMS[case.victim], 0
        named = re.compile(victim.named)
        while command.process.poll() is None:
            after = time.monotonic() - began
            if not case.sentence and (line := _line(command.output[heard:], named)):
                case.sentence, case.seconds = line, after
            if case.victim == "driver" and case.how == "SIGSTOP" and after > _DRIVER_RESTS_S:
                process.send_signal(signal.SIGCONT)
            # A needed process that is stopped is noticed after HANG_S at the latest.
            waits = case.how == "SIGSTOP" and victim.needed and case.victim != "driver" and after < HANG_S + 10
            is_there = _is_there(process)
            if goal == 0 and not (waits and is_there) and not (victim.vital and not is_there):
                goal = self.steps() + _STEPS_AFTER
            if goal and self.steps() >= goal and "| step time " in command.output:
                case.outcome, case.end_s = "goes on", after
                case.seconds = case.seconds or after
                if case.victim == "orphan reaper" or (_is_there(process) and case.victim != "driver"):
                    self._interrupt(case)  # the end must not depend on the process, either
                return
            if after > _GIVE_UP_S:
                case.outcome, case.seconds, case.end_s = "hung", after, after
                break
            time.sleep(_LOOK_EVERY_S)
        self._close(command, case, began, heard, named)

    def _close(self, command: Command, case: Case, began: float, heard: int, named: re.Pattern[str]) -> None:
        finished = command.finish(timeout_s=0.0 if case.outcome == "hung" else _END_S)
        said = command.output[heard:].strip().splitlines()
        case.end_s = finished.at - began
        if case.outcome != "hung":
            case.outcome, case.code = "ended", finished.code
            last = [line for line in said if line.startswith("slime-like:") and "restart with --resume" not in line]
            case.sentence = last[-1] if last else (said[-1] if said else "")
            # For a killed driver, the orphan reaper writes the message after everything has ended.
            case.seconds = time.monotonic() - began if case.victim == "driver" else case.end_s
            case.named = named.search(case.sentence) is not None
        case.left = self._left(finished.left_behind)
        case.audit = not (self._run_dir / "ledger.sqlite").is_file() or not audit_run(self._run_dir).problems
        self._command = None

    def _interrupt(self, case: Case) -> None:
        """End a running run as Ctrl-C does; leftovers count."""
        command = self._command
        assert command is not None
        began = time.monotonic()
        command.interrupt()
        finished = command.finish(_END_S)
        case.left += self._left(finished.left_behind)
        if finished.code != 130 or finished.at - began > DEATH_S:
            case.left.append(f"the end by Ctrl-C: code {finished.code} after {finished.at - began:.0f} s")
        self._command = None

    def _left(self, found: list[str]) -> list[str]:
        return found + [str(path) for path in set(self._temporary.iterdir()) - self._before]


def _line(text: str, named: re.Pattern[str]) -> str:
    return next((line for line in text.splitlines() if named.search(line)), "")


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
