"""Ctrl-C and SIGTERM that are not lost: libraries swallow a KeyboardInterrupt that reaches them at the wrong moment."""

import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType


class InterruptHandler:
    """A signal handler that raises ``KeyboardInterrupt``, and remembers that it did.

    Attributes:
        noted: a signal has come.
    """

    def __init__(self) -> None:
        self.noted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
        raise KeyboardInterrupt

    def install(self) -> None:
        """Take over both signals. Main thread only."""
        signal.signal(signal.SIGINT, self)
        signal.signal(signal.SIGTERM, self)
        sys.unraisablehook = self._swallowed

    def _swallowed(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Suppress the report of an ignored interrupt, e.g. in a fork's callbacks: it is noted already."""
        if not (self.noted and isinstance(unraisable.exc_value, KeyboardInterrupt)):
            sys.__unraisablehook__(unraisable)


def raise_if_interrupted() -> None:
    """Raise ``KeyboardInterrupt`` if a signal was noted, even if a library swallowed the first exception."""
    if any(handler.noted for handler in _handlers()):
        take_interrupt()  # what ends the run must not be interrupted itself
        raise KeyboardInterrupt


def polls(every_s: float, timeout_s: float) -> Iterator[None]:
    """Yield now and every ``every_s`` seconds, for the last time when ``timeout_s`` have passed; interrupts end it."""
    deadline = time.monotonic() + timeout_s
    while True:
        raise_if_interrupted()
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(every_s)


def take_signals_back() -> None:
    """Reinstall the handlers after libraries that replaced them below Python's, as Ray's C++ does."""
    for handler in _handlers():
        handler.install()


def take_interrupt() -> None:
    """Record that a caught ``KeyboardInterrupt`` is dealt with: waiting on the way out does not raise it once more."""
    for handler in _handlers():
        handler.noted = False


def _handlers() -> Iterator[InterruptHandler]:
    found = (signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))
    return (handler for handler in found if isinstance(handler, InterruptHandler))
