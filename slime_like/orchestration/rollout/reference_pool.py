"""ReferencePool: the logprob pool. Rewarded groups go in, and come out with the reference's logprobs."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from slime_like.errors import SlimeLikeError, TrainerError
from slime_like.orchestration.rollout.registry import WorkerRegistry
from slime_like.orchestration.rollout.scoring import RewardedGroup
from slime_like.trajectory import UnscoredTrajectory

_REQUESTS_PER_WORKER = 2
"""One that a worker is at, and one that it goes on with at once."""


class ReferenceWorker(Protocol):
    """Holds the reference's weights, all of them, before it joins a pool."""

    @property
    def name(self) -> str: ...

    def score(self, trajectories: list[UnscoredTrajectory]) -> list[Tensor]:
        """(response_len,) float32 logprobs of each. Called from one thread.

        Raises:
            TrainerError: it is of no more use.
        """

    def use(self, weights: Path) -> None:
        """Score with the weights in this directory from now on; nothing to do if it does so already.

        Raises:
            SlimeLikeError: it is of no more use.
        """

    def restart(self, weights: Path | None) -> None:
        """End what is left of it, and start it anew in the same place, with ``weights`` if there are any but those of
        the configuration. Called from one thread; may take a while.

        Raises:
            SlimeLikeError: it did not start, or was closed.
        """

    def close(self) -> None:
        """End it. May be called twice, and from another thread."""


@dataclass(frozen=True, slots=True)
class ReferenceWork:
    """What the workers have done in a while: mean seconds at work of those that are left, and tokens."""

    busy_s: float
    response_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class _Request:
    groups: list[RewardedGroup]
    tokens: int
    member: int


class ReferencePool:
    """Groups are scored whole, by the worker with the least outstanding tokens. Use from one thread.

    A worker that fails leaves; what it had goes to others, from the beginning. It is started anew, in the background,
    and joins again; the failure that finds no restart and no worker left is the pool's.

    Args:
        request_tokens: groups that wait are sent together, up to so many tokens.
        max_restarts: workers started anew, over the pool's life.

    Attributes:
        news: a sentence about every worker that has left, or come back.
    """

    def __init__(self, request_tokens: int, max_restarts: int = 0) -> None:
        self._request_tokens = request_tokens
        self._restarts_left = max_restarts
        self._restarting: dict[Future[None], ReferenceWorker] = {}
        self._registry = WorkerRegistry(_REQUESTS_PER_WORKER)
        self._numbers = itertools.count()
        self._workers: dict[int, ReferenceWorker] = {}
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._waiting: deque[RewardedGroup] = deque()
        self._running: dict[Future[list[Tensor]], _Request] = {}
        self._guard = threading.Lock()
        self._weights: Path | None = None
        self._in_use: Counter[Path] = Counter()
        self._busy_s = 0.0
        self._tokens = (0, 0)
        self.news: list[str] = []

    def __len__(self) -> int:
        """Groups that have not come out."""
        return len(self._waiting) + sum(len(request.groups) for request in self._running.values())

    def join(self, worker: ReferenceWorker) -> None:
        """Let it score. It has the weights."""
        member = next(self._numbers)
        self._workers[member] = worker
        self._threads[member] = ThreadPoolExecutor(1, thread_name_prefix=worker.name)
        self._registry.join(member)

    def submit(self, group: RewardedGroup) -> None:
        """Queue a group; it is sent by the next ``poll``."""
        self._waiting.append(group)

    def poll(self, timeout_s: float) -> list[RewardedGroup]:
        """Send what can be sent, then wait at most ``timeout_s`` for the first groups to come out.

        Raises:
            TrainerError: no worker is left.
        """
        self._send()
        awaited: list[Future[Any]] = [*self._running, *self._restarting]
        done = wait(awaited, timeout_s, FIRST_COMPLETED).done if awaited else set()
        finished = [group for future in done for group in self._settle(future)]
        self._admit_restarted()
        self._send()
        return finished

    def use(self, weights: Path) -> None:
        """Whatever a worker begins to score from now on is scored with the weights in this directory. Thread-safe."""
        with self._guard:
            self._weights = weights

    def weights_in_use(self) -> set[Path]:
        """Directories that a worker may be reading. Thread-safe."""
        with self._guard:
            return {weights for weights, readers in self._in_use.items() if readers}

    @contextmanager
    def _newest(self) -> Iterator[Path | None]:
        """The weights to be used; inside, they count as being read."""
        with self._guard:
            weights = self._weights
            if weights is not None:
                self._in_use[weights] += 1
        try:
            yield weights
        finally:
            with self._guard:
                if weights is not None:
                    self._in_use[weights] -= 1

    def discard(self) -> None:
        """Forget every group; what is being scored comes out nowhere."""
        self._waiting.clear()
        for request in self._running.values():
            request.groups.clear()

    def take_work(self) -> ReferenceWork:
        """What has been done since the last call."""
        with self._guard:
            busy_s, self._busy_s = self._busy_s, 0.0
            (response, total), self._tokens = self._tokens, (0, 0)
        return ReferenceWork(busy_s / max(1, len(self._registry.workers)), response, total)

    def close(self) -> None:
        """Begin nothing more. The workers themselves are their owner's to end."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------------------- requests
    def _send(self) -> None:
        while self._waiting:
            count, tokens = self._next_request()
            member = self._registry.acquire(tokens)
            if member is None:
                return
            groups = [self._waiting.popleft() for _ in range(count)]
            trajectories = [trajectory for own in groups for trajectory in own.group.trajectories]
            future = self._threads[member].submit(self._score, self._workers[member], trajectories)
            self._running[future] = _Request(groups, tokens, member)

    def _next_request(self) -> tuple[int, int]:
        """(groups, tokens) from the head of the queue: as many as fit, at least one."""
        count = tokens = 0
        for own in self._waiting:
            if count and tokens + own.group.total_tokens > self._request_tokens:
                break
            count, tokens = count + 1, tokens + own.group.total_tokens
        return count, tokens

    def _score(self, worker: ReferenceWorker, trajectories: list[UnscoredTrajectory]) -> list[Tensor]:
        """In the worker's thread."""
        with self._newest() as weights:
            if weights is not None:
                worker.use(weights)
        started = time.perf_counter()
        logprobs = worker.score(trajectories)
        with self._guard:
            self._busy_s += time.perf_counter() - started
            response, total = self._tokens
            response += sum(trajectory.response_len for trajectory in trajectories)
            self._tokens = response, total + sum(trajectory.total_len for trajectory in trajectories)
        return logprobs

    def _settle(self, future: Future[Any]) -> list[RewardedGroup]:
        request = self._running.pop(future, None)
        if request is None:  # its worker was lost a moment ago, or is starting again
            return []
        self._registry.release(request.member, request.tokens)
        try:
            logprobs = iter(future.result())
        except SlimeLikeError as error:
            self._lose(request, error)
            return []
        return [replace(own, reference=[next(logprobs) for _ in own.group.trajectories]) for own in request.groups]

    def _lose(self, failed: _Request, error: SlimeLikeError) -> None:
        """Back to the head of the queue, together with everything else that the lost worker had."""
        others = [future for future, request in self._running.items() if request.member == failed.member]
        lost = [failed, *(self._running.pop(future) for future in others)]
        self._waiting.extendleft(reversed([own for request in lost for own in request.groups]))
        self._registry.leave(failed.member)
        worker, thread = self._workers.pop(failed.member), self._threads.pop(failed.member)
        self.news.append(f"{worker.name} left the logprob pool ({error})")
        for future in others:
            future.cancel()
        self._restart_or_close(worker, thread, error)
        thread.shutdown(wait=False)

    def _restart_or_close(self, worker: ReferenceWorker, thread: ThreadPoolExecutor, error: SlimeLikeError) -> None:
        """Either may take a while, and happens in ``thread``."""
        if self._restarts_left > 0:
            self._restarts_left -= 1
            self._restarting[thread.submit(self._restart, worker)] = worker
            return
        thread.submit(worker.close)
        if not self._registry.workers and not self._restarting:
            raise TrainerError(f"no reference worker is left: {error}") from error

    def _restart(self, worker: ReferenceWorker) -> None:
        """In the worker's thread."""
        with self._newest() as weights:
            worker.restart(weights)

    def _admit_restarted(self) -> None:
        """Let workers score that have started again; those that could not are tried again while restarts are left."""
        for future in [own for own in self._restarting if own.done()]:
            worker = self._restarting.pop(future)
            try:
                future.result()
            except SlimeLikeError as error:
                self.news.append(f"{worker.name} did not start again ({error})")
                with_thread = ThreadPoolExecutor(1, thread_name_prefix=worker.name)
                self._restart_or_close(worker, with_thread, error)
                with_thread.shutdown(wait=False)
            else:
                self.news.append(f"{worker.name} was started again")
                self.join(worker)
