"""Ctrl-C and SIGTERM that are not lost, even if a library swallows a ``KeyboardInterrupt``."""

import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType


class InterruptHandler:
    """Signal handler that raises ``KeyboardInterrupt`` and remembers it in ``noted``."""

    def __init__(self) -> None:
        self.noted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
        raise KeyboardInterrupt

    def install(self) -> None:
        """Handle both signals. Call in the main thread."""
        signal.signal(signal.SIGINT, self)
        signal.signal(signal.SIGTERM, self)
        sys.unraisablehook = self._swallowed

    def _swallowed(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Suppress the report of an interrupt that a callback ignored: it is noted already."""
        if not (self.noted and isinstance(unraisable.exc_value, KeyboardInterrupt)):
            sys.__unraisablehook__(unraisable)


def raise_if_interrupted() -> None:
    """Raise ``KeyboardInterrupt`` if a signal was noted, even if a library swallowed the first exception."""
    if any(handler.noted for handler in _handlers()):
        take_interrupt()  # otherwise the cleanup would be interrupted, too
        raise KeyboardInterrupt


def polls(every_s: float, timeout_s: float) -> Iterator[None]:
    """Yield now and every ``every_s`` seconds, and a last time after ``timeout_s`` seconds. Raises on an interrupt."""
    deadline = time.monotonic() + timeout_s
    while True:
        raise_if_interrupted()
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(every_s)


def take_signals_back() -> None:
    """Reinstall the handlers after libraries that replaced them in C, like Ray does."""
    for handler in _handlers():
        handler.install()


def take_interrupt() -> None:
    """Record that a caught ``KeyboardInterrupt`` is handled, so waits during the cleanup don't raise it again."""
    for handler in _handlers():
        handler.noted = False


def _handlers() -> Iterator[InterruptHandler]:
    found = (signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))
    return (handler for handler in found if isinstance(handler, InterruptHandler))
