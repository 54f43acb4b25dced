"""Measure CPU times on one thread, and peak memory in a separate process."""

import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from slime_like.errors import SlimeLikeError

TIMEOUT_S = 300.0
_ENOUGH_S = 3.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        case: measured case.
        form: implementation.
        value, unit: measured value.
        note: a ratio, or what the value is compared with.
        goal, is_met: in words, and whether the row meets it; None if there is no goal.
    """

    case: str
    form: str
    value: float
    unit: str
    note: str = ""
    goal: str = ""
    is_met: bool | None = None


def best_times(forms: Mapping[str, Callable[[], object]], repeats: int = 25) -> dict[str, float]:
    """Return each form's least CPU time of ``repeats`` runs, in milliseconds, because others may use the machine.

    A slow form runs less often: at least three times, but not after ``_ENOUGH_S``.

    Forms run one after another, each warmed up. In turns, a form that fills the caches would slow down the next one.
    """
    return {name: _best_time(form, repeats) for name, form in forms.items()}


def _best_time(form: Callable[[], object], repeats: int) -> float:
    form()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        form()
        times.append(time.process_time() - start)
        if len(times) >= 3 and sum(times) > _ENOUGH_S:
            break
    return min(times) * 1e3


def time_rows(
    case: str, times: Mapping[str, float], baseline: str, goals: Mapping[str, float] | None = None
) -> list[Row]:
    """Return a row per form with its speed relative to the baseline; ``goals`` has the least of some forms."""
    rows = []
    for name, ms in times.items():
        speed = times[baseline] / ms
        note = "baseline" if name == baseline else f"{speed:.2f} x as fast"
        least = (goals or {}).get(name)
        goal = () if least is None else (f"at least {least:.2f} x as fast", speed >= least)
        rows.append(Row(case, name, ms, "ms", note, *goal))
    return rows


def peak_bytes(prepare: Callable[[], object], run: Callable[[object], object]) -> int:
    """Return the peak growth of resident memory while ``run`` processes the result of ``prepare``, in a fork.

    Raises:
        SlimeLikeError: the process died or took longer than its bound.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_peak, args=(sender, prepare, run))
    process.start()
    sender.close()
    try:
        if not receiver.poll(TIMEOUT_S):
            problem = f"the memory measurement took longer than {TIMEOUT_S} s"
            raise SlimeLikeError(problem, code="process-timed-out", remedy="run it on a quieter machine")
        return receiver.recv()
    except EOFError as error:
        problem = "the memory measurement's process died"
        raise SlimeLikeError(problem, code="process-failed", remedy="is there enough memory?") from error
    finally:
        process.kill()
        process.join()


def _peak(sender: Connection, prepare: Callable[[], object], run: Callable[[object], object]) -> None:
    subject = prepare()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    kept = run(subject)
    sender.send(_status("VmHWM") - before)
    del kept


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    problem, remedy = f"/proc/self/status has no {field}", "memory is measured on Linux only"
    raise SlimeLikeError(problem, code="no-memory-figures", remedy=remedy)
