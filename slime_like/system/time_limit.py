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
                        _raise_in(thread, ctypes.py_object(TimeLimitExceeded))

    def forget(self, thread: int) -> None:
        with self.lock:
            self.ends.pop(thread, None)
            _raise_in(thread, None)  # withdraws an interruption that has not begun


def _raise_in(thread: int, error: "ctypes.py_object[type[Exception]] | None") -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


os.register_at_fork(after_in_child=_Watch.running.cache_clear)  # a child has only the thread that forked
