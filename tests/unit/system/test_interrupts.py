"""Interrupts that a library swallows are raised again at the next wait. Handled ones are not."""

import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_like.system.interrupts import InterruptHandler, raise_if_interrupted, take_interrupt, take_signals_back


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, InterruptHandler())
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_raised_once(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt):  # a library may have caught the first
        raise_if_interrupted()
    raise_if_interrupted()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    take_interrupt()
    raise_if_interrupted()  # it is handled


def test_a_handler_installed_in_c_is_replaced(tmp_path: Path) -> None:
    """``faulthandler`` acts like Ray's C++ here: it writes before it passes a signal on to Python."""
    with (tmp_path / "said").open("w+") as said:
        faulthandler.register(signal.SIGTERM, file=said, chain=True)
        take_signals_back()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert said.read() == ""
