"""RolePool: adds the scores of a role with workers to rewarded groups."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from slime_like.errors import SlimeLikeError, TrainerError
from slime_like.interfaces import Scores
from slime_like.observability.names import scoring_metrics
from slime_like.orchestration.rollout.group_store import GroupTask
from slime_like.trajectory import UnscoredTrajectory


class RoleWorker(Protocol):
    """Worker that scores with a role. It holds all weights before it joins a pool. One thread calls all methods except
    ``close``; they raise ``SlimeLikeError`` if the worker has failed."""

    @property
    def name(self) -> str: ...

    def score(self, trajectories: list[UnscoredTrajectory]) -> list[Scores]:
        """Return the (response_len,) float32 scores of each trajectory, by field."""

    def use(self, weights: Path) -> None:
        """Score with the weights in this directory from now on. Does nothing if they are already in use."""

    def restart(self, weights: Path | None) -> None:
        """End the rest of the worker, and start it again in the same place. May take a while.

        Args:
            weights: directory to load; ``None`` loads the configuration's weights.
        """

    def close(self) -> None:
        """End the worker. May be called twice, and from another thread."""


class RoleWeights:
    """Weights directory that the training loop replaces and the workers' threads read. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: Path | None = None
        self._readers: Counter[Path | None] = Counter()

    def use(self, weights: Path) -> None:
        """Score with the weights in this directory, starting with the next request."""
        with self._lock:
            self._newest = weights

    def in_use(self) -> set[Path]:
        """Return the directories that a worker may be reading."""
        with self._lock:
            return {weights for weights, readers in self._readers.items() if readers and weights is not None}

    @contextmanager
    def reading(self) -> Iterator[Path | None]:
        """Yield the weights to use, and mark them as in use inside; ``None`` until ``use`` is called."""
        with self._lock:
            weights = self._newest
            self._readers[weights] += 1
        try:
            yield weights
        finally:
            with self._lock:
                self._readers[weights] -= 1


class RolePool:
    """Pool of a role's workers. Each has a thread that takes the next waiting groups, as many as fit a request.

    The caller keeps the groups. If a worker fails, its groups wait again, and its thread restarts it. The pool fails if
    no restart and no worker is left.

    Args:
        role: name of the role.
        request_tokens: limit on the tokens of waiting groups that are scored together.
        max_restarts: limit on worker restarts over the pool's life.
        source: the only source whose groups the pool scores; ``None``: all groups.

    Attributes:
        weights: directory that the workers score with. Thread-safe.
        news: a sentence about every worker that left or returned.
    """

    def __init__(self, role: str, request_tokens: int, max_restarts: int = 0, source: str | None = None) -> None:
        self.role = role
        self.source = source
        self.weights = RoleWeights()
        self.news: list[str] = []
        self._request_tokens = request_tokens
        self._changed = threading.Condition()  # guards everything below, and the tasks
        self._restarts_left = max_restarts
        self._workers = 0
        self._end: BaseException | None = None
        self._tasks: list[GroupTask] = []
        self._work: list[tuple[float, int, int]] = []

    def join(self, worker: RoleWorker) -> None:
        """Add a worker that holds the weights."""
        with self._changed:
            self._workers += 1
        threading.Thread(target=self._serve, args=(worker,), name=worker.name, daemon=True).start()

    def poll(self, tasks: Sequence[GroupTask], timeout_s: float) -> list[GroupTask]:
        """Let workers score all waiting groups, and return scored ones. Without any, wait at most ``timeout_s``.

        Args:
            tasks: all tasks that the pool is to score, in order, until it has returned them.

        Raises:
            TrainerError: no worker is left, and every scored group has been returned.
        """
        with self._changed:
            self._tasks = [*tasks]
            self._changed.notify_all()
            if tasks and not self._with(self) and self._end is None:
                self._changed.wait(timeout_s)
            if not (scored := self._with(self)) and self._end is not None:
                raise self._end
            self._tasks = [task for task in tasks if task.answer is not self]
            return scored

    def _with(self, answer: object) -> list[GroupTask]:
        """Return the tasks with this answer, in order: ``None`` if they wait, the pool if they are scored."""
        return [task for task in self._tasks if task.answer is answer]

    def take_work(self, total_s: float) -> dict[str, float]:
        """Return metrics of the work since the last call, ``total_s`` ago, with mean seconds over remaining workers."""
        with self._changed:
            work, self._work = self._work, []
        busy_s, response_tokens, total_tokens = map(sum, zip((0.0, 0, 0), *work, strict=True))
        return scoring_metrics(self.role, total_s, busy_s / max(1, self._workers), response_tokens, total_tokens)

    def close(self) -> None:
        """Start no more requests. The owner must close the workers."""
        self._finish(TrainerError("the run has ended", code="run-ended", who=f"{self.role} workers"))

    def _finish(self, reason: BaseException) -> None:
        with self._changed:
            self._end = self._end or reason
            self._changed.notify_all()

    # -------------------------------------------------------------------------------------------- a worker's thread
    def _serve(self, worker: RoleWorker) -> None:
        try:
            while tasks := self._next_request(worker):
                try:
                    self._score(worker, tasks)
                except SlimeLikeError as error:
                    self.news.append(f"{worker.name} left the logprob pool ({error})")
                    self._answer(tasks, None)
                    if not self._restarts(worker, error):
                        worker.close()
                        return
        except BaseException as error:  # raised again by ``poll``
            self._finish(error)

    def _next_request(self, worker: RoleWorker) -> list[GroupTask]:
        """Wait for groups, and take those that fit a request, at least one. Return none once the pool has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._end or self._with(None))
            taken, tokens = list[GroupTask](), 0
            for task in self._with(None) if self._end is None else ():
                tokens += task.samples.total_tokens
                if taken and tokens > self._request_tokens:
                    break
                task.answer = worker
                taken.append(task)
            return taken

    def _score(self, worker: RoleWorker, tasks: Sequence[GroupTask]) -> None:
        rows = [row for task in tasks for row in task.samples.trajectories]
        with self.weights.reading() as weights:
            if weights is not None:
                worker.use(weights)
        started = time.perf_counter()
        scores = {row.sequence_id: found for row, found in zip(rows, worker.score(rows), strict=True)}
        busy_s = time.perf_counter() - started
        with self._changed:
            self._work.append((busy_s, sum(row.response_len for row in rows), sum(row.total_len for row in rows)))
            for task in tasks:
                pairs = zip(task.samples.trajectories, task.rewarded.scores, strict=True)
                task.rewarded = replace(task.rewarded, scores=[old | scores[row.sequence_id] for row, old in pairs])
            self._answer(tasks, self)

    def _answer(self, tasks: Sequence[GroupTask], answer: object) -> None:
        with self._changed:
            for task in tasks:
                task.answer = answer
            self._changed.notify_all()

    def _restarts(self, worker: RoleWorker, error: SlimeLikeError) -> bool:
        """Restart a failed worker, as often as restarts are left. Return whether it works again."""
        while self._may_restart():
            try:
                with self.weights.reading() as weights:
                    worker.restart(weights)
                self.news.append(f"{worker.name} was restarted")
                return True
            except SlimeLikeError as again:
                error = again
                self.news.append(f"{worker.name} did not start again ({error})")
        with self._changed:
            self._workers -= 1
        if not self._workers:
            self._finish(TrainerError(f"no {self.role} worker is left: {error}", code=f"no-{self.role}-worker"))
        return False

    def _may_restart(self) -> bool:
        """Use up a restart, if one is left and the pool has not ended."""
        with self._changed:
            may = self._end is None and self._restarts_left > 0
            self._restarts_left -= may
            return may
