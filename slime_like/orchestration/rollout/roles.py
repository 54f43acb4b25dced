"""Roles with workers, which add scores to rewarded groups: one queue per role, one thread per worker."""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from slime_like.errors import SlimeLikeError, TrainerError
from slime_like.observability.names import scoring_metrics
from slime_like.orchestration.rollout.scoring import RewardedGroup
from slime_like.orchestration.trainer.model_ranks import ModelRanks
from slime_like.system.budget import HourlyBudget
from slime_like.system.spans import span
from slime_like.system.words import pluralize


@dataclass(eq=False, slots=True)
class _Job:
    group: RewardedGroup
    scored: Future[RewardedGroup] = field(default_factory=Future)


class RoleQueue:
    """Groups that wait for a role's workers. Each worker has a thread that takes the next ones that fit a request.

    If a worker fails, its groups wait again, and its thread restarts it. The queue fails if no restart and no worker is
    left. Thread-safe.

    Args:
        role: name of the role.
        request_tokens: limit on the tokens of waiting groups that are scored together.
        max_restarts: limit on worker restarts within an hour.
        source: the only source whose groups are scored; ``None``: all groups.

    Attributes:
        news: a sentence about every worker that left or returned.
    """

    def __init__(self, role: str, request_tokens: int, max_restarts: int = 0, source: str | None = None) -> None:
        self.role = role
        self.source = source
        self.news: list[str] = []
        self._request_tokens = request_tokens
        self._changed = threading.Condition()  # guards everything below
        self._restarts_left = HourlyBudget(max_restarts)
        self._workers = 0
        self._end: BaseException | None = None
        self._jobs: deque[_Job] = deque()
        self._work: list[tuple[float, int, int]] = []
        self._weights: Path | None = None
        self._readers: Counter[Path | None] = Counter()

    async def score(self, group: RewardedGroup) -> RewardedGroup:
        """Return the group with the role's scores.

        Raises:
            TrainerError: no worker is left.
        """
        job = _Job(group)
        with self._changed:
            self._jobs.append(job)
            self._settle()
        return await asyncio.wrap_future(job.scored)

    def join(self, worker: ModelRanks) -> None:
        """Add a worker that holds the weights. One thread calls its methods; they raise ``SlimeLikeError`` if it has
        failed."""
        with self._changed:
            self._workers += 1
        threading.Thread(target=self._serve, args=(worker,), name=worker.name, daemon=True).start()

    def use(self, weights: Path) -> None:
        """Score with the weights in this directory, starting with the next request."""
        with self._changed:
            self._weights = weights

    def in_use(self) -> set[Path]:
        """Return the directories that a worker may be reading."""
        with self._changed:
            return {weights for weights, readers in self._readers.items() if readers and weights is not None}

    @contextmanager
    def _reading(self) -> Iterator[Path | None]:
        """Yield the weights to use, and mark them as in use inside; ``None`` until ``use`` is called."""
        with self._changed:
            weights = self._weights
            self._readers[weights] += 1
        try:
            yield weights
        finally:
            with self._changed:
                self._readers[weights] -= 1

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
            self._settle()

    def _settle(self) -> None:
        """Wake up the workers after a change. After the end, all waiting groups fail."""
        while self._end is not None and self._jobs:
            if (job := self._jobs.popleft()).scored.set_running_or_notify_cancel():
                job.scored.set_exception(self._end)
        self._changed.notify_all()

    # -------------------------------------------------------------------------------------------- a worker's thread
    def _serve(self, worker: ModelRanks) -> None:
        try:
            while jobs := self._next_request():
                try:
                    self._score(worker, jobs)
                except SlimeLikeError as error:
                    self.news.append(f"{worker.name} left the logprob pool ({error})")
                    with self._changed:
                        self._jobs.extendleft(reversed(jobs))
                        self._settle()
                    if not self._restarts(worker, error):
                        worker.close()
                        return
        except BaseException as error:  # raised again by ``score``
            self._finish(error)

    def _next_request(self) -> list[_Job]:
        """Wait for groups, and take those that fit a request, at least one. Return none once the queue has ended."""
        with self._changed:
            self._changed.wait_for(self._has_work)
            taken, tokens = list[_Job](), 0
            while self._has_work() and self._jobs:
                tokens += self._jobs[0].group.group.total_tokens
                if taken and tokens > self._request_tokens:
                    break
                taken.append(self._jobs.popleft())
            return taken

    def _has_work(self) -> bool:
        """Return whether a worker must do something, after removing groups that were aborted."""
        while self._jobs and self._jobs[0].scored.cancelled():
            self._jobs.popleft()
        return bool(self._jobs) or self._end is not None

    def _score(self, worker: ModelRanks, jobs: Sequence[_Job]) -> None:
        rows = [row for job in jobs for row in job.group.group.trajectories]
        with self._reading() as weights:
            if weights is not None:
                worker.use(weights)
        started = time.perf_counter()
        with span(f"{worker.name}/scoring", pluralize(len(rows), "row")):
            scores = {row.sequence_id: found for row, found in zip(rows, worker.score(rows), strict=True)}
        busy_s = time.perf_counter() - started
        with self._changed:
            self._work.append((busy_s, sum(row.response_len for row in rows), sum(row.total_len for row in rows)))
        for job in jobs:
            pairs = zip(job.group.group.trajectories, job.group.scores, strict=True)
            scored = replace(job.group, scores=[old | scores[row.sequence_id] for row, old in pairs])
            if job.scored.set_running_or_notify_cancel():
                job.scored.set_result(scored)

    def _restarts(self, worker: ModelRanks, error: SlimeLikeError) -> bool:
        """Restart a failed worker, as often as restarts are left. Return whether it works again."""
        while self._may_restart():
            try:
                with self._reading() as weights:
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
        """Use up a restart, if one is left and the queue has not ended."""
        with self._changed:
            return self._end is None and self._restarts_left.use()
