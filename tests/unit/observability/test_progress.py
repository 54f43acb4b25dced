"""What reaches the stream, byte for byte; time is a counter, a terminal is a pseudo-terminal."""

import contextlib
import io
import os
import pty
import threading
import unicodedata

import pytest

from slime_like.observability.names import phase_shares, step_metrics
from slime_like.observability.progress import Progress
from tests.unit.observability.records import rl_record, sft_record

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Time:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def control_characters(text: str) -> set[str]:
    return {character for character in text if unicodedata.category(character) == "Cc" and character != "\n"}


def test_a_plain_line_says_what_matters() -> None:
    stream = io.StringIO()
    with Progress("plain", 100, stream) as progress:
        progress.update(3, step_metrics(rl_record()) | {"evaluation/accuracy": 0.81})
    assert stream.getvalue() == (
        "step 3/100 | step time 8.00 s | loss 2 | reward 0.900 | accuracy 0.810 | rollout tokens/s 20"
        " | wait 6% generate 50% reward 6% score 6% train 25% sync 5% orchestration 1%\n"
    )


def test_a_supervised_run_shows_no_reward() -> None:
    stream = io.StringIO()
    with Progress("plain", 5, stream) as progress:
        progress.update(1, step_metrics(sft_record()))
    assert "loss 2" in stream.getvalue()
    assert "tokens/s" not in stream.getvalue() and "accuracy" not in stream.getvalue()
    assert stream.getvalue().count("reward") == 1  # the phase


def test_plain_lines_come_once_a_second_and_the_last_always() -> None:
    stream, time = io.StringIO(), Time()
    progress = Progress("plain", 1000, stream, time)
    for step in range(1, 26):  # one step every 0.1 s, from second 0 to 2.4
        progress.update(step, {})
        time.seconds = step / 10
    assert stream.getvalue().split("\n") == ["step 1/1000", "step 11/1000", "step 21/1000", ""]
    progress.close()
    progress.close()
    assert stream.getvalue().endswith("step 21/1000\nstep 25/1000\n")


def test_the_end_of_the_run_is_written_at_once() -> None:
    stream, time = io.StringIO(), Time()
    progress = Progress("plain", 2, stream, time)
    progress.update(1, {})
    progress.update(2, {})
    progress.update(2, {})  # an evaluation that changes no figure
    assert stream.getvalue() == "step 1/2\nstep 2/2\n"
    progress.close()
    assert stream.getvalue() == "step 1/2\nstep 2/2\n"


def test_an_evaluation_after_the_last_step_adds_its_figure_alone() -> None:
    stream = io.StringIO()
    with Progress("plain", 2, stream, Time()) as progress:
        progress.update(0, {"evaluation/accuracy": 0.25})
        progress.update(2, step_metrics(rl_record()))
        progress.update(2, {"evaluation/accuracy": 0.75})
    before, last, evaluation = stream.getvalue().splitlines()
    assert before == "step 0/2 | accuracy 0.250"
    assert last.startswith("step 2/2 | step time 8.00 s | loss 2 | reward 0.900 | accuracy 0.250 | ")
    assert evaluation == "step 2/2 | accuracy 0.750"


def test_an_evaluation_that_comes_at_once_is_part_of_its_steps_line() -> None:
    stream = io.StringIO()
    with Progress("plain", 9, stream, Time()) as progress:
        for step, accuracy in ((1, 0.25), (2, 0.25), (2, 0.75)):
            progress.update(step, {"evaluation/accuracy": accuracy})
    assert stream.getvalue() == "step 1/9 | accuracy 0.250\nstep 2/9 | accuracy 0.750\n"


def test_an_exception_leaves_the_last_line() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyError), Progress("plain", 9, stream, Time()) as progress:
        progress.update(1, {})
        progress.update(2, {})
        raise KeyError
    assert stream.getvalue() == "step 1/9\nstep 2/9\n"


def test_a_figure_keeps_its_last_value() -> None:
    stream, time = io.StringIO(), Time()
    with Progress("plain", 9, stream, time) as progress:
        progress.update(0, {"evaluation/accuracy": 0.25})
        time.seconds = 5.0
        progress.update(1, {"train_actor_training/loss": 0.5})
    assert stream.getvalue().splitlines()[1] == "step 1/9 | loss 0.5 | accuracy 0.250"


def test_plain_output_has_no_control_characters() -> None:
    stream = io.StringIO()
    with Progress("plain", 9, stream) as progress:
        progress.note("\x1b[31mred\x1b[0m\r\nbell\x07 [bold]kept[/bold] ümlaut")
        progress.update(1, step_metrics(rl_record()))
    assert control_characters(stream.getvalue()) == set()
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
    received = bytearray()

    def drain() -> None:
        while True:
            try:
                data = os.read(leader, 65536)
            except OSError:  # Linux's way of saying that the other end was closed
                return
            received.extend(data)

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        with (
            contextlib.suppress(KeyError),
            os.fdopen(follower, "w", encoding="utf-8") as stream,
            Progress("auto", 9, stream) as progress,
        ):
            progress.update(4, step_metrics(rl_record()) | {"evaluation/accuracy": 0.81})
            progress.note("saved [x]")
            if error is not None:
                raise error
    finally:
        reader.join(timeout=10)
        os.close(leader)
    return received.decode("utf-8")


@pytest.mark.parametrize("error", [None, KeyError()])
def test_on_a_terminal_auto_is_live_and_gives_the_terminal_back(error: Exception | None) -> None:
    before = set(threading.enumerate())
    screen = on_a_terminal(error)
    for shown in ("4/9", "8.00 s", "0.900", "0.810", "generate 50%", "orchestration 1%", "saved [x]"):
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
