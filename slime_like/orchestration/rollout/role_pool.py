"""RolePool: adds the scores of a role with workers to rewarded groups."""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from slime_like.errors import SlimeLikeError, TrainerError
from slime_like.interfaces import Scores
from slime_like.observability.records import ScoringRecord
from slime_like.orchestration.rollout.group_store import GroupTask
from slime_like.orchestration.rollout.routing import LeastLoaded
from slime_like.trajectory import UnscoredTrajectory

_REQUESTS_PER_WORKER = 2
"""Requests per worker: one in progress, and one that follows immediately."""


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


@dataclass(frozen=True, eq=False, slots=True)
class _Member:
    """A worker and the one thread that calls it."""

    worker: RoleWorker
    thread: ThreadPoolExecutor


@dataclass(frozen=True, slots=True)
class _Request:
    tokens: int
    member: _Member


class RolePool:
    """Pool of a role's workers. Each group goes as a whole to the least loaded one. Use from one thread.

    The caller keeps the groups. A failed worker leaves the pool, and other workers score its groups from the beginning.
    It restarts in the background and joins again. The pool fails if no restart and no worker is left.

    Args:
        role: name of the role.
        request_tokens: limit on the tokens of waiting groups that are sent together.
        max_restarts: limit on worker restarts over the pool's life.
        source: the only source whose groups the pool scores; ``None``: all groups.

    Attributes:
        weights: directory that the workers score with. Thread-safe.
        news: a sentence about every worker that left or returned.
    """

    def __init__(self, role: str, request_tokens: int, max_restarts: int = 0, source: str | None = None) -> None:
        self.role = role
        self.source = source
        self._request_tokens = request_tokens
        self._restarts_left = max_restarts
        self._restarting: dict[Future[None], _Member] = {}
        self._members: LeastLoaded[_Member] = LeastLoaded(_REQUESTS_PER_WORKER)
        self._running: dict[Future[dict[str, Scores]], _Request] = {}
        self._done: deque[tuple[float, int, int]] = deque()  # appended by the workers' threads
        self.weights = RoleWeights()
        self.news: list[str] = []

    def join(self, worker: RoleWorker) -> None:
        """Add a worker that holds the weights."""
        self._members.join(_Member(worker, ThreadPoolExecutor(1, thread_name_prefix=worker.name)))

    def poll(self, tasks: Sequence[GroupTask], timeout_s: float) -> list[GroupTask]:
        """Send all waiting groups that workers have room for, then wait at most ``timeout_s`` for scored groups.

        Args:
            tasks: all tasks that the pool is to score, in the order to send them, until it has returned them.

        Raises:
            TrainerError: no worker is left.
        """
        self._send(tasks)
        awaited: list[Future[Any]] = [*self._running, *self._restarting]
        done = wait(awaited, timeout_s, FIRST_COMPLETED).done if awaited else set()
        finished = [task for future in done for task in self._settle(future, tasks)]
        self._admit_restarted()
        self._send(tasks)
        return finished

    def take_work(self, total_s: float) -> ScoringRecord:
        """Return the work since the last call ``total_s`` ago, with mean seconds over the remaining workers."""
        done = [self._done.popleft() for _ in range(len(self._done))]
        busy_s, response_tokens, total_tokens = map(sum, zip((0.0, 0, 0), *done, strict=True))
        return ScoringRecord(total_s, busy_s / max(1, len(self._members.workers)), response_tokens, total_tokens)

    def close(self) -> None:
        """Start no more requests. The owner must close the workers."""
        for member in (*self._members.workers, *self._restarting.values()):
            member.thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------------------- requests
    def _send(self, tasks: Sequence[GroupTask]) -> None:
        waiting = [task for task in tasks if task.answer is None]
        while waiting:
            count, tokens = self._next_request(waiting)
            member = self._members.acquire(tokens)
            if member is None:
                return
            sent, waiting = waiting[:count], waiting[count:]
            trajectories = [trajectory for task in sent for trajectory in task.samples.trajectories]
            future = member.thread.submit(self._score, member.worker, trajectories)
            self._running[future] = _Request(tokens, member)
            for task in sent:
                task.answer = future

    def _next_request(self, waiting: Sequence[GroupTask]) -> tuple[int, int]:
        """Count (groups, tokens) at the head of the queue that fit a request, at least one group."""
        count = tokens = 0
        for task in waiting:
            if count and tokens + task.samples.total_tokens > self._request_tokens:
                break
            count, tokens = count + 1, tokens + task.samples.total_tokens
        return count, tokens

    def _score(self, worker: RoleWorker, trajectories: list[UnscoredTrajectory]) -> dict[str, Scores]:
        """Score in the worker's thread. Return scores by ``sequence_id``."""
        with self.weights.reading() as weights:
            if weights is not None:
                worker.use(weights)
        started = time.perf_counter()
        scores = worker.score(trajectories)
        busy_s = time.perf_counter() - started
        self._done.append((busy_s, sum(t.response_len for t in trajectories), sum(t.total_len for t in trajectories)))
        return {row.sequence_id: found for row, found in zip(trajectories, scores, strict=True)}

    def _settle(self, future: Future[Any], tasks: Sequence[GroupTask]) -> list[GroupTask]:
        request = self._running.pop(future, None)
        if request is None:  # its worker has just left or is restarting
            return []
        self._members.release(request.member, request.tokens)
        try:
            scores = future.result()
        except SlimeLikeError as error:
            self._lose(request.member, error, tasks, future)
            return []
        finished = [task for task in tasks if task.answer is future]
        for task in finished:
            rows = zip(task.samples.trajectories, task.rewarded.scores, strict=True)
            task.rewarded = replace(task.rewarded, scores=[old | scores[row.sequence_id] for row, old in rows])
        return finished

    # -------------------------------------------------------------------------------------------------------- restarts
    def _lose(self, member: _Member, error: SlimeLikeError, tasks: Sequence[GroupTask], failed: Future[Any]) -> None:
        """Remove the worker of a failed request. All its groups wait for others again."""
        others = [future for future, request in self._running.items() if request.member == member]
        for task in tasks:
            if task.answer in (failed, *others):
                task.answer = None
        self._members.leave(member)
        self.news.append(f"{member.worker.name} left the logprob pool ({error})")
        for future in others:
            del self._running[future]
            future.cancel()
        self._restart_or_close(member, error)

    def _restart_or_close(self, member: _Member, error: SlimeLikeError) -> None:
        """Restart or close the member in its thread, since both may take a while."""
        if self._restarts_left > 0:
            self._restarts_left -= 1
            self._restarting[member.thread.submit(self._restart, member.worker)] = member
        else:
            member.thread.submit(member.worker.close)
            member.thread.shutdown(wait=False)
        if not self._members.workers and not self._restarting:
            raise TrainerError(f"no {self.role} worker is left: {error}", code=f"no-{self.role}-worker") from error

    def _restart(self, worker: RoleWorker) -> None:
        """Restart in the worker's thread."""
        with self.weights.reading() as weights:
            worker.restart(weights)

    def _admit_restarted(self) -> None:
        """Let restarted workers join. Retry failed starts while restarts are left."""
        for future in [restart for restart in self._restarting if restart.done()]:
            member = self._restarting.pop(future)
            try:
                future.result()
            except SlimeLikeError as error:
                self.news.append(f"{member.worker.name} did not start again ({error})")
                self._restart_or_close(member, error)
            else:
                self.news.append(f"{member.worker.name} was restarted")
                self._members.join(member)
