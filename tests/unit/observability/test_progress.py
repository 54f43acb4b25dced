"""Output of the displays, byte for byte. Time is a counter, the terminal is a pseudo-terminal."""

import contextlib
import io
import os
import pty
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.observability.names import phase_shares
from slime_like.observability.progress import Progress
from tests.unit.observability.records import RL_METRICS, SFT_METRICS

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


RL, SFT = RL_METRICS, SFT_METRICS
ACCURACY = {"evaluation/accuracy": 0.25}
SHARES = " | generate 50% train 25% other 25%"
RL_LINE = (
    "step time 8.00 s | reward 1.200 | math_verify 0.600 | length 1.200 | accuracy {} | response tokens 16"
    " | cut off 40% | flat groups 2/3 | entropy 0.00 | grad norm 0 | rollout tokens/s 20" + SHARES
)
# steps of the run; second, step and metrics of every update; lines written by then, and at the end
PLAIN: dict[str, tuple[int, list[tuple[float, int, dict[str, float]]], list[str], list[str]]] = {
    "a line has metrics and phases": (
        100, [(0, 3, RL | {"evaluation/accuracy": 0.81})], [f"step 3/100 | {RL_LINE.format('0.810')}"], [],
    ),
    "a supervised run has no reward": (
        5, [(0, 1, SFT)], ["step 1/5 | step time 8.00 s | loss 2 | entropy 0.00 | grad norm 0" + SHARES], [],
    ),
    "once a second, and always the last": (
        1000,
        [(max(0, step - 1) / 10, step, {}) for step in range(1, 26)],
        ["step 1/1000", "step 11/1000", "step 21/1000"],
        ["step 25/1000"],
    ),
    "the end is written immediately, and an evaluation without changes is not": (
        2, [(0, 1, {}), (0, 2, {}), (0, 2, {})], ["step 1/2", "step 2/2"], [],
    ),
    "an evaluation after the last step adds only its metric": (
        2,
        [(0, 0, ACCURACY), (0, 2, RL), (0, 2, {"evaluation/accuracy": 0.75})],
        ["step 0/2 | accuracy 0.250", f"step 2/2 | {RL_LINE.format('0.250 (step 0)')}", "step 2/2 | accuracy 0.750"],
        [],
    ),
    "an immediate evaluation is part of its step's line": (
        9,
        [(0, 1, ACCURACY), (0, 2, ACCURACY), (0, 2, {"evaluation/accuracy": 0.75})],
        ["step 1/9 | accuracy 0.250"],
        ["step 2/9 | accuracy 0.750"],
    ),
    "the accuracy of an earlier start is shown": (
        9, [(-1, 5, ACCURACY), (0, 7, {"train_actor_training/loss": 0.5})],
        ["step 7/9 | loss 0.5 | accuracy 0.250 (step 5)"], [],
    ),
    "metrics keep their last value": (
        9,
        [(0, 0, ACCURACY), (5, 1, {"train_actor_training/loss": 0.5})],
        ["step 0/9 | accuracy 0.250", "step 1/9 | loss 0.5 | accuracy 0.250 (step 0)"],
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("total", "updates", "lines", "at_end"), PLAIN.values(), ids=PLAIN)
def test_plain_lines(
    total: int, updates: list[tuple[float, int, dict[str, float]]], lines: list[str], at_end: list[str]
) -> None:
    stream, now = io.StringIO(), SimpleNamespace(seconds=0.0)
    progress = Progress("plain", total, stream, lambda: now.seconds)
    for now.seconds, step, values in updates:
        if now.seconds < 0:  # an earlier start logged these
            progress.recall(step, values)
        else:
            progress.update(step, values)
    assert stream.getvalue().splitlines() == lines
    for _ in range(2):  # may be closed twice
        progress.close()
        assert stream.getvalue() == "".join(f"{line}\n" for line in [*lines, *at_end])


def test_lines_of_waits() -> None:
    """A wait has one line at its end, unless it was short, failed, or was shown before."""
    stream, now = io.StringIO(), SimpleNamespace(seconds=0.0)
    progress = Progress("plain", 9, stream, lambda: now.seconds)

    def wait(title: str, total: int, noun: str, seconds: float) -> None:
        with progress.waiting(title, total, noun) as waiting:
            now.seconds += seconds
            waiting.reach(total)
            assert stream.getvalue().splitlines() == lines  # nothing during the wait

    lines: list[str] = []
    for title, total, noun, seconds, line in (
        ("engines", 2, "", 13.44, "engines: 2 ready in 13.4 s"),
        ("connecting", 0, "", 0.9, None),
        ("first weight sync", 0, "", 1.0, "first weight sync: 1.0 s"),
        ("evaluating", 64, "prompt", 90.0, "evaluating: 64 prompts in 90.0 s"),
        ("evaluating", 64, "prompt", 90.0, None),
    ):
        wait(title, total, noun, seconds)
        lines += [line] if line is not None else []
        assert stream.getvalue().splitlines() == lines
    with contextlib.suppress(KeyError), progress.waiting("engines that fail"):
        now.seconds += 9
        raise KeyError
    assert stream.getvalue().splitlines() == lines


@pytest.mark.parametrize(("mode", "shown"), [("plain", True), ("auto", True), ("off", False)])
def test_an_error_is_the_last_line_of_the_log(mode: Any, shown: bool) -> None:
    """The log has the plain lines in every mode, without control characters. No stream is a terminal."""
    stream, log, error = io.StringIO(), io.StringIO(), KeyError("engine 3 died")
    error.add_note("go on")
    with pytest.raises(KeyError), Progress(mode, 9, stream, lambda: 0.0, log=log) as progress:
        progress.note("\x1b[31mstart\x1b[0m\r\ning\x07")
        progress.update(1, {})
        progress.update(2, {})
        raise error
    lines = "start  ing\nstep 1/9\nstep 2/9\n"
    assert stream.getvalue() == lines * shown
    assert log.getvalue() == f"{lines}failed: 'engine 3 died'; go on\n"


def on_a_terminal(error: Exception | None) -> str:
    """Return what an "auto" progress writes to a pseudo-terminal. A step takes two minutes. Then raises ``error``."""
    leader, follower = pty.openpty()
    now, received = SimpleNamespace(seconds=0.0), bytearray()
    with (
        os.fdopen(leader, "rb", buffering=0) as terminal,
        contextlib.suppress(KeyError, OSError),  # OSError: nothing left to read
    ):
        with (
            contextlib.suppress(KeyError),
            os.fdopen(follower, "w", encoding="utf-8") as stream,
            Progress("auto", 9, stream, lambda: now.seconds) as progress,
        ):
            for step in range(1, 5):
                now.seconds += 120
                progress.update(step, RL | {"evaluation/accuracy": 0.81})
            progress.note("saved [x]")
            with progress.waiting("engines", 2) as waiting:
                waiting.on_waiting(["engine 1"])
                now.seconds += 7
                redrawn = b"engines: 1 of 2 ready, 7 s, waiting for engine 1"
                while redrawn not in received:
                    received.extend(terminal.read(65536))
                if error is not None:
                    raise error
        while data := terminal.read(65536):
            received.extend(data)
    return received.decode("utf-8")


@pytest.mark.parametrize("error", [None, KeyError()])
def test_live_display_restores_the_terminal(error: Exception | None) -> None:
    before = set(threading.enumerate())
    screen = on_a_terminal(error)
    for shown in ("4/9", "8.00 s", "1.200", "0.810", "generate 50%", "other 25%", "saved [x]"):
        assert shown in screen
    assert "0:08:07" in screen and "0:10:00" in screen  # elapsed and left: 5 steps of two minutes
    assert "engines" not in screen[screen.rindex("4/9") :]  # after the wait, its line is empty
    assert screen.index(HIDE_CURSOR) < screen.rindex(SHOW_CURSOR)
    assert HIDE_CURSOR not in screen[screen.rindex(SHOW_CURSOR) :]
    for thread in set(threading.enumerate()) - before:  # the refresh thread is ending
        thread.join(10)
        assert not thread.is_alive()


def test_phase_shares() -> None:
    assert phase_shares({}) == []
    shares = phase_shares({"phases/train (s)": 3.0, "phases/sync (s)": 0.0, "phases/orchestration (s)": 1.0})
    assert shares == [("train", 75.0), ("orchestration", 25.0)]
