"""A limit on the processor time of Python code, in any thread."""

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_LOOK_EVERY_S = 0.2


class TimeLimitExceeded(Exception):
    """Code was interrupted at its limit."""


@contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise ``TimeLimitExceeded`` inside after ``seconds`` of this thread's processor time. Limits do not nest.

    The code is interrupted between two operations of the interpreter. One that takes long, such as building a huge
    text, is not cut short.
    """
    thread, watch = threading.get_ident(), _watch()
    with watch.lock:
        watch.ends[thread] = time.thread_time() + seconds
    try:
        yield
    finally:
        try:
            watch.forget(thread)
        finally:  # the interruption may come while the first call begins
            watch.forget(thread)


class _Watch:
    """A thread that interrupts others. ``ends``: processor time at which each is interrupted, and later again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ends: dict[int, float] = {}
        threading.Thread(target=self._run, name="time limits", daemon=True).start()

    def forget(self, thread: int) -> None:
        with self.lock:
            self.ends.pop(thread, None)
            _raise_in(thread, None)  # withdraws an interruption that has not begun

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_S)
            with self.lock:
                for thread, end in self.ends.items():
                    if time.clock_gettime(time.pthread_getcpuclockid(thread)) > end:
                        _raise_in(thread, TimeLimitExceeded)


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error and ctypes.py_object(error))


@cache
def _watch() -> _Watch:
    return _Watch()


os.register_at_fork(after_in_child=_watch.cache_clear)  # a child has only the thread that forked
