"""Work on tensors in a few threads: reading, casting, checksums, comparing and writing all leave Python's lock."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from slime_like.system.interrupts import raise_if_interrupted

Job = TypeVar("Job")
Result = TypeVar("Result")

_LOOK_EVERY_S = 0.2
"""Between looks at progress and at whether the user has interrupted."""


class StoppedError(Exception):
    """A job gave up because another one failed."""


class Tracker:
    """Bytes done by all jobs, and whether they must stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._stopped = threading.Event()

    @property
    def done(self) -> int:
        return self._done

    def advance(self, nbytes: int) -> None:
        """Count, and go on only if no thread has failed: called after every tensor.

        Raises:
            StoppedError: the work is over.
        """
        with self._lock:
            self._done += nbytes
        if self._stopped.is_set():
            raise StoppedError

    def stop(self) -> None:
        self._stopped.set()


def run_jobs(
    jobs: Sequence[Job],
    work: Callable[[Job, Tracker], Result],
    workers: int,
    finished: Callable[[Result], None],
    progress: Callable[[int], None],
) -> None:
    """Do every job; the first failure, or an interruption, stops the others after their current tensor.

    Args:
        work: runs in a worker thread.
        workers: threads; memory is that of one tensor in each.
        finished: called in this thread with every result, as they come.
        progress: called in this thread with the bytes done.
    """
    tracker = Tracker()
    with ThreadPoolExecutor(max(1, min(workers, len(jobs))), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting: set[Future[Result]] = {pool.submit(work, job, tracker) for job in jobs}
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=_LOOK_EVERY_S, return_when=FIRST_COMPLETED)
                raise_if_interrupted()
                failed = [future for future in done if future.exception() is not None]
                for future in done - set(failed):
                    finished(future.result())
                for future in failed:
                    future.result()
                progress(tracker.done)
        except BaseException:
            tracker.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            for future in waiting:  # what was done meanwhile is not lost
                if not future.cancelled() and future.exception() is None:
                    finished(future.result())
            raise
