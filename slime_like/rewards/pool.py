"""Scoring responses in worker processes with bounds on time and memory: a bad answer costs its own sample, no more."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from slime_like.config import RewardConfig
from slime_like.errors import RewardError
from slime_like.rewards.registry import LOCAL
from slime_like.rewards.worker_process import WorkerProcess

_CLOSE_TIMEOUT_S = 2.0
_CHUNK_ITEMS = 64
_SUSPICIOUS_ITEMS = 8


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One response to score: decoded text, without special tokens."""

    prompt: str
    response: str
    answer: str


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """What the reward functions say of one response.

    Attributes:
        rewards: one per configured function, unweighted; all 0 where scoring failed.
        successes: one per configured function, 1.0 or 0.0.
        metadata: per function, what it reported. Where scoring failed, ``reason`` is "timeout", "crash", "memory" or
            "error", with ``function`` and ``detail`` where they are known.
    """

    rewards: tuple[float, ...]
    successes: tuple[float, ...]
    metadata: dict[str, Any] = field(default_factory=dict)


class RewardPool:
    """``config.workers`` processes; a hung or dead one is replaced. Workers start at once, in the background.

    Use it from the thread that made it: the kernel ends a worker together with the thread that started it.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._workers: list[WorkerProcess] = []
        self._closed = False
        # Functions that may look at the prompt must be asked for every prompt.
        self._prompt_matters = any(function.name not in LOCAL for function in config.functions)
        try:
            for _ in range(config.workers):
                self._workers.append(self._start_worker())
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._workers)

    def start(self) -> None:
        """Wait until every worker is ready.

        Raises:
            RewardError: a reward function cannot be used, or a worker did not start in time.
        """
        _Round(self, []).run(until_ready=True)

    def score(self, items: Sequence[RewardItem]) -> list[RewardOutcome]:
        """Score a batch; equal items are scored once, and the order is kept.

        Raises:
            RewardError: the workers cannot go on, every one of many items failed in the same function, or so many
                timed out before any other was scored that the functions must be hanging.
        """
        distinct: dict[tuple[str, ...], int] = {}
        which = [distinct.setdefault(self._key(item), len(distinct)) for item in items]
        chosen: dict[int, RewardItem] = {}
        for index, item in zip(which, items, strict=True):
            chosen.setdefault(index, item)
        distinct_outcomes = _Round(self, list(chosen.values())).run()
        outcomes = [distinct_outcomes[index] for index in which]
        if len(chosen) > 1:  # the same response over and over says nothing about others
            self._refuse_broken_function(outcomes)
        return outcomes

    def close(self) -> None:
        """End every worker, by its process id, within a bound."""
        workers, self._workers, self._closed = self._workers, [], True
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for worker in workers:
            worker.end(grace_s=max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------- for a round's own use
    def _start_worker(self) -> WorkerProcess:
        return WorkerProcess(self._config, self._config.start_timeout_s)

    def _key(self, item: RewardItem) -> tuple[str, ...]:
        return (item.response, item.answer, *([item.prompt] if self._prompt_matters else []))

    def _refuse_broken_function(self, outcomes: list[RewardOutcome]) -> None:
        """One bad answer costs one sample; a function that fails on everything is a bug, not a reward of 0."""
        failed = [outcome.metadata for outcome in outcomes if outcome.metadata.get("reason") == "error"]
        if len(failed) == len(outcomes) and len(failed) >= _SUSPICIOUS_ITEMS:
            first = failed[0]
            raise RewardError(
                f"reward function {first.get('function')} failed on all {len(failed)} responses of a batch, first with "
                f"{first.get('detail')}; correct the function or the answers in the data"
            )


class _Round:
    """One batch on its way through the workers of a pool."""

    def __init__(self, pool: RewardPool, items: list[RewardItem]) -> None:
        if pool._closed:
            raise RewardError("the reward pool is closed; make a new one")
        self._pool = pool
        self._config = pool._config
        self._workers = pool._workers
        self._items = items
        self._waiting = list(range(len(items) - 1, -1, -1))
        self._outcomes: list[RewardOutcome | None] = [None] * len(items)
        self._left = len(items)
        self._timed_out = 0  # as long as nothing else has happened in this round; far below 0 afterwards

    def run(self, until_ready: bool = False) -> list[RewardOutcome]:
        for index, worker in enumerate(self._workers):
            if worker.ready and not worker.alive:  # it died while idle, which is no sample's fault
                self._replace(index)
        while self._left or (until_ready and not all(worker.ready for worker in self._workers)):
            self._hand_out()
            self._exchange()
            self._enforce_deadlines()
        return [outcome for outcome in self._outcomes if outcome is not None]

    def _hand_out(self) -> None:
        share = math.ceil(len(self._items) / (2 * len(self._workers)))
        for worker in self._workers:
            if worker.ready and not worker.pending and self._waiting:
                size = min(_CHUNK_ITEMS, share)
                worker.pending = [self._waiting.pop() for _ in range(min(size, len(self._waiting)))]
                items = [self._items[i] for i in worker.pending]
                worker.queue(
                    {"items": [{"prompt": i.prompt, "response": i.response, "answer": i.answer} for i in items]}
                )
                worker.deadline = time.monotonic() + self._config.timeout_s

    def _exchange(self) -> None:
        """Wait for a pipe to be ready, no longer than to the next deadline, then read and write what can be."""
        poller = select.poll()
        readers, writers = {}, {}
        for index, worker in enumerate(self._workers):
            poller.register(worker.read_fd, select.POLLIN)
            readers[worker.read_fd] = index
            if worker.has_output:
                poller.register(worker.write_fd, select.POLLOUT)
                writers[worker.write_fd] = worker
        wait_s = min(worker.deadline for worker in self._workers) - time.monotonic()
        for descriptor, _ in poller.poll(max(0.0, wait_s) * 1000):
            if descriptor in writers:
                writers[descriptor].write()
            else:
                self._receive(readers[descriptor])

    def _receive(self, index: int) -> None:
        worker = self._workers[index]
        messages = worker.read()
        if messages is None:
            self._lost(index, "crash")
            return
        for message in messages:
            if "error" in message:
                raise RewardError(f"reward.functions: {message['error']}")
            if "ready" in message:
                worker.ready = True
            else:
                self._settle(worker.pending.pop(0), message)
        if messages:
            worker.deadline = time.monotonic() + self._config.timeout_s if worker.pending else math.inf

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for index, worker in enumerate(self._workers):
            if worker.deadline <= now:
                self._lost(index, "timeout")

    def _lost(self, index: int, reason: str) -> None:
        """The item in progress pays; those behind it go back to the queue."""
        worker = self._workers[index]
        if not worker.ready:
            late = f"was not ready within reward.start_timeout_s={self._config.start_timeout_s:g} s"
            what = "ended" if reason == "crash" else late
            raise RewardError(f"reward worker {worker.pid} {what} while starting: {worker.last_words()}")
        if worker.pending:
            self._settle(worker.pending.pop(0), {"reason": reason})
            self._waiting += reversed(worker.pending)
        self._replace(index)

    def _replace(self, index: int) -> None:
        self._workers[index].end()
        self._workers[index] = self._pool._start_worker()

    def _settle(self, item: int, message: dict[str, Any]) -> None:
        self._timed_out = self._timed_out + 1 if message.get("reason") == "timeout" else -len(self._items)
        if self._timed_out == _SUSPICIOUS_ITEMS:
            raise RewardError(
                f"reward functions gave no answer within reward.timeout_s={self._config.timeout_s:g} s for each of the "
                f"first {_SUSPICIOUS_ITEMS} responses of a batch; raise that, or correct the function"
            )
        if "reason" in message:
            zeros = (0.0,) * len(self._config.functions)
            outcome = RewardOutcome(zeros, zeros, message)
        else:
            outcome = RewardOutcome(tuple(message["rewards"]), tuple(message["successes"]), message["metadata"])
        self._outcomes[item] = outcome
        self._left -= 1
