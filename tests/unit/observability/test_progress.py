"""What reaches the stream, byte for byte; time is a counter, a terminal is a pseudo-terminal."""

import contextlib
import io
import os
import pty
import threading
from types import SimpleNamespace

import pytest

from slime_like.observability.names import phase_shares, step_metrics
from slime_like.observability.progress import Progress
from tests.unit.observability.records import rl_record, sft_record

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


RL, SFT = step_metrics(rl_record()), step_metrics(sft_record())
ACCURACY = {"evaluation/accuracy": 0.25}
SHARES = " | generate 50% train 25% other 25%"
RL_LINE = (
    "step time 8.00 s | reward 1.200 | math_verify 0.600 | length 1.200 | accuracy {} | response tokens 16"
    " | cut off 40% | flat groups 2 | entropy 0.00 | grad norm 0 | rollout tokens/s 20" + SHARES
)
# steps of the run; second, step and figures of every update; lines by then, and after the end
PLAIN: dict[str, tuple[int, list[tuple[float, int, dict[str, float]]], list[str], list[str]]] = {
    "a line has the figures and the phases": (
        100, [(0, 3, RL | {"evaluation/accuracy": 0.81})], [f"step 3/100 | {RL_LINE.format('0.810')}"], [],
    ),
    "a supervised run has no reward": (
        5, [(0, 1, SFT)], ["step 1/5 | step time 8.00 s | loss 2 | entropy 0.00 | grad norm 0" + SHARES], [],
    ),
    "once a second, and the last always": (
        1000,
        [(max(0, step - 1) / 10, step, {}) for step in range(1, 26)],
        ["step 1/1000", "step 11/1000", "step 21/1000"],
        ["step 25/1000"],
    ),
    "the end is written at once; an evaluation changes no figure": (
        2, [(0, 1, {}), (0, 2, {}), (0, 2, {})], ["step 1/2", "step 2/2"], [],
    ),
    "an evaluation after the last step adds its figure alone": (
        2,
        [(0, 0, ACCURACY), (0, 2, RL), (0, 2, {"evaluation/accuracy": 0.75})],
        ["step 0/2 | accuracy 0.250", f"step 2/2 | {RL_LINE.format('0.250 (step 0)')}", "step 2/2 | accuracy 0.750"],
        [],
    ),
    "an evaluation that comes at once is part of its step's line": (
        9,
        [(0, 1, ACCURACY), (0, 2, ACCURACY), (0, 2, {"evaluation/accuracy": 0.75})],
        ["step 1/9 | accuracy 0.250"],
        ["step 2/9 | accuracy 0.750"],
    ),
    "a figure keeps its last value": (
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
        progress.update(step, values)
    assert stream.getvalue().splitlines() == lines
    for _ in range(2):  # may be closed twice
        progress.close()
        assert stream.getvalue() == "".join(f"{line}\n" for line in [*lines, *at_end])


def test_an_exception_leaves_the_last_line() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyError), Progress("plain", 9, stream, lambda: 0.0) as progress:
        progress.update(1, {})
        progress.update(2, {})
        raise KeyError
    assert stream.getvalue() == "step 1/9\nstep 2/9\n"


def test_plain_output_has_no_control_characters() -> None:
    stream = io.StringIO()
    with Progress("plain", 9, stream) as progress:
        progress.note("\x1b[31mred\x1b[0m\r\nbell\x07 [bold]kept[/bold] ümlaut")
        progress.update(1, RL)
    assert stream.getvalue().replace("\n", "").isprintable()
    assert stream.getvalue().splitlines()[0] == "red  bell  [bold]kept[/bold] ümlaut"


@pytest.mark.parametrize(("mode", "written"), [("auto", "step 1/9\n"), ("off", "")])
def test_without_a_terminal_auto_is_plain_and_off_is_silent(mode: str, written: str) -> None:
    stream = io.StringIO()
    with Progress(mode, 9, stream) as progress:  # type: ignore[arg-type]
        progress.update(1, {})
    assert stream.getvalue() == written


def on_a_terminal(error: Exception | None) -> str:
    """Run an "auto" progress on a pseudo-terminal, raise ``error`` in it, return all that the terminal received."""
    leader, follower = pty.openpty()
    with (
        contextlib.suppress(KeyError),
        os.fdopen(follower, "w", encoding="utf-8") as stream,
        Progress("auto", 9, stream) as progress,
    ):
        progress.update(4, RL | {"evaluation/accuracy": 0.81})
        progress.note("saved [x]")
        if error is not None:
            raise error
    received = bytearray()
    with os.fdopen(leader, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # there is no more
        while data := terminal.read(65536):
            received.extend(data)
    return received.decode("utf-8")


@pytest.mark.parametrize("error", [None, KeyError()])
def test_on_a_terminal_auto_is_live_and_gives_the_terminal_back(error: Exception | None) -> None:
    before = set(threading.enumerate())
    screen = on_a_terminal(error)
    for shown in ("4/9", "8.00 s", "1.200", "0.810", "generate 50%", "other 25%", "saved [x]"):
        assert shown in screen
    assert screen.index(HIDE_CURSOR) < screen.rindex(SHOW_CURSOR)
    assert HIDE_CURSOR not in screen[screen.rindex(SHOW_CURSOR) :]
    for thread in set(threading.enumerate()) - before:  # the refresh thread is ending
        thread.join(10)
        assert not thread.is_alive()


def test_shares_are_of_all_phases_together() -> None:
    assert phase_shares({}) == []
    shares = phase_shares({"phases/train (s)": 3.0, "phases/sync (s)": 0.0, "phases/orchestration (s)": 1.0})
    assert shares == [("train", 75.0), ("orchestration", 25.0)]
