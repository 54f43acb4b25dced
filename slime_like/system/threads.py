"""Work on tensors in a few threads. Reading, casting, hashing, comparing and writing tensors release Python's lock."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from slime_like.system.interrupts import raise_if_interrupted

Job = TypeVar("Job")
Result = TypeVar("Result")

_LOOK_EVERY_S = 0.2


class StoppedError(Exception):
    """Error that ends a job because another one failed."""


class Tracker:
    """Count of the bytes done by all jobs, and the request to stop them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.done = 0
        self.stopped = threading.Event()

    def advance(self, nbytes: int) -> None:
        """Count a finished tensor. Raises ``StoppedError`` after a failure of another job."""
        with self._lock:
            self.done += nbytes
        if self.stopped.is_set():
            raise StoppedError


def run_jobs(
    jobs: Sequence[Job],
    work: Callable[[Job, Tracker], Result],
    workers: int,
    finished: Callable[[Result], None],
    progress: Callable[[int], None],
) -> None:
    """Do all jobs. The first failure, or an interrupt, stops the others after their current tensor.

    ``work`` runs in one of ``workers`` threads, each of which holds one tensor. In this thread, ``finished`` gets every
    result, and ``progress`` the bytes done.
    """
    tracker = Tracker()
    with ThreadPoolExecutor(max(1, min(workers, len(jobs))), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting: set[Future[Result]] = {pool.submit(work, job, tracker) for job in jobs}
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=_LOOK_EVERY_S, return_when=FIRST_COMPLETED)
                raise_if_interrupted()
                for future in sorted(done, key=lambda each: each.exception() is not None):  # failures last
                    finished(future.result())
                progress(tracker.done)
        except BaseException:
            tracker.stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for future in waiting:  # keep jobs that finished meanwhile
                if not future.cancelled() and future.exception() is None:
                    finished(future.result())
            raise
