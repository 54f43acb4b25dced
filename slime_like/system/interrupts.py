"""Interruption of Python code: signals that libraries cannot swallow, and a limit on processor time in any thread."""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType

_LOOK_EVERY_S = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptHandler:
    """Handler of Ctrl-C, SIGTERM and SIGHUP that raises ``KeyboardInterrupt`` and remembers it in ``noted``.

    So the interrupt is not lost, even if a library swallows the exception. SIGHUP stays ignored where it is, as under
    ``nohup``.
    """

    def __init__(self) -> None:
        self.noted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
        if number == signal.SIGHUP:
            _leave_terminal()
        raise KeyboardInterrupt

    def install(self) -> None:
        """Handle the signals. Call in the main thread."""
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self)
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
    found = map(signal.getsignal, _SIGNALS)
    return (handler for handler in found if isinstance(handler, InterruptHandler))


def _leave_terminal() -> None:
    """Send the output nowhere if its terminal is gone: a failed write would cut the cleanup short."""
    output = select.poll()
    for descriptor in (1, 2):
        output.register(descriptor, 0)
    for descriptor, event in output.poll(0):
        if event & (select.POLLHUP | select.POLLERR):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


class TimeLimitExceeded(Exception):
    """Code was interrupted at its limit."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TimeLimitExceeded`` inside after ``seconds`` of this thread's processor time, between two operations.

    One long operation, such as building a huge text, is not cut short. Limits do not nest.
    """
    watch = _Watch.running()
    with watch.lock:
        watch.ends[threading.get_ident()] = time.thread_time() + seconds
    try:
        yield
    finally:
        try:
            watch.forget(threading.get_ident())
        finally:  # the interruption may come while the first call begins
            watch.forget(threading.get_ident())


class _Watch(threading.Thread):
    """Interrupts other threads at their ``ends``, in processor time, and again until they have left."""

    def __init__(self) -> None:
        super().__init__(name="time limits", daemon=True)
        self.lock = threading.Lock()
        self.ends: dict[int, float] = {}
        self._interrupted = set[int]()

    @staticmethod
    @cache
    def running() -> "_Watch":
        (watch := _Watch()).start()
        return watch

    def run(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_S)
            with self.lock:
                for thread, end in self.ends.items():
                    if time.clock_gettime(time.pthread_getcpuclockid(thread)) > end:
                        self._interrupted.add(thread)
                        _raise_in(thread, ctypes.py_object(TimeLimitExceeded))

    def forget(self, thread: int) -> None:
        with self.lock:
            self.ends.pop(thread, None)
            if thread in self._interrupted:  # otherwise Python 3.11 would hang under a profiler or debugger
                _raise_in(thread, None)  # withdraws an interruption that has not begun
                self._interrupted.discard(thread)


def _raise_in(thread: int, error: "ctypes.py_object[type[Exception]] | None") -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


os.register_at_fork(after_in_child=_Watch.running.cache_clear)  # a child has only the thread that forked
