"""Scoring responses in worker processes with bounds on time and memory: a bad answer costs its own sample, no more."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from slime_like.config import RewardConfig
from slime_like.errors import RewardError
from slime_like.sandbox.process import STARTS, WorkerProcess
from slime_like.sandbox.rewards.registry import LOCAL, SERVICE

_MODULE = "slime_like.sandbox.rewards.worker"
_CLOSE_TIMEOUT_S = 2.0
_CHUNK_ITEMS = 64
_SHOWN_CHARS = 60
_SUSPICIOUS_ITEMS = 8
"""Responses that hang, one after the other, before any other one is answered."""
_SUSPICIOUS_PROMPTS = 8
"""Prompts in succession all of whose responses failed. Not responses: eight to one prompt fail together where its row
has an answer that nothing can be compared with, and a call may be about one prompt alone."""


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
        rewards: one per computed function (``RewardConfig.computed``), unweighted; all 0 where scoring failed.
        successes: one per computed function, 1.0 or 0.0.
        metadata: per function, what it reported. Where scoring failed, ``reason`` is "timeout", "crash", "memory",
            "cpu" or "error", with ``function`` and ``detail`` where they are known.
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
        self._functions = config.computed
        self._workers: list[WorkerProcess] = []
        self._closed = False
        # The user's own, or a service: they may look at the prompt, and must be asked for every one.
        self._has_foreign = any(function.name not in LOCAL for function in self._functions)
        # What ours give up on is the responses' fault: a policy may well write eight huge powers in succession.
        self._broken = ("error", "crash", "timeout") if self._has_foreign else ("error",)
        self._of_groups: frozenset[str] | None = None  # the workers, which import the functions, know
        self._killed_starts = 0  # in succession, as the next two are
        self._failed_prompts = 0
        self._failed_groups = 0
        self._has_answered = False
        try:
            for _ in range(config.workers if self._functions else 0):
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

    def score(self, items: Sequence[RewardItem], groups: Sequence[Hashable] | None = None) -> list[RewardOutcome]:
        """Score a batch; equal items are scored once, and the order is kept.

        Args:
            groups: for each item, what it shares with the others of its group, which has one prompt and one answer;
                none makes every item a group of its own.

        Raises:
            RewardError: the workers cannot go on, or so many items failed with none between them that had a reward that
                the functions must be broken.
        """
        if not self._functions:
            return [RewardOutcome((), ()) for _ in items]
        if self._of_groups is None:
            self.start()
        assert self._of_groups is not None
        members = _members(groups if groups is not None else range(len(items)), len(items))
        distinct: dict[tuple[str, ...], int] = {}
        which = [distinct.setdefault(self._key(item), len(distinct)) for item in items]
        chosen: dict[int, RewardItem] = {}
        for index, item in zip(which, items, strict=True):
            chosen.setdefault(index, item)
        samples = [_sample_message(item) for item in chosen.values()]
        if len(self._of_groups) == len(self._functions):
            samples = []
        wholes = [_group_message([items[i] for i in group]) for group in members] if self._of_groups else []
        answers = _Round(self, [*samples, *wholes]).run()
        of_items = [answers[index] for index in which] if samples else [_NOTHING] * len(items)
        of_groups = answers[len(samples) :]
        if samples:
            alike = {tuple(which[index] for index in group) for group in members}
            self._failed_prompts = self._count(of_items, self._failed_prompts + len(alike), "prompts", items)
        self._failed_groups = self._count(of_groups, self._failed_groups + len(of_groups), "groups", items)
        return self._outcomes(of_items, _each_sample(of_groups, members, len(items)))

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
        setup = {
            "functions": [{"name": function.name, "options": function.options} for function in self._functions],
            "memory_mb": self._config.memory_mb,
            "timeout_s": self._config.timeout_s,
        }
        return WorkerProcess(_MODULE, setup, self._config.start_timeout_s)

    def _is_ready(self, of_groups: list[str]) -> None:
        self._of_groups = frozenset(of_groups)
        self._killed_starts = 0

    def _may_start_again(self) -> bool:
        """After a worker was killed that was not ready yet."""
        self._killed_starts += 1
        return self._killed_starts < STARTS

    def _key(self, item: RewardItem) -> tuple[str, ...]:
        return (item.response, item.answer, *([item.prompt] if self._has_foreign else []))

    def _outcomes(self, of_items: list[dict[str, Any]], of_groups: list[dict[str, Any]]) -> list[RewardOutcome]:
        """Both kinds of functions side by side, in the order of the configuration."""
        assert self._of_groups is not None
        kinds = [function.name in self._of_groups for function in self._functions]
        zeros = (0.0,) * len(kinds)
        outcomes = []
        for own, shared in zip(of_items, of_groups, strict=True):
            failed = next((answer for answer in (own, shared) if "reason" in answer), None)
            if failed is not None:
                reason = {key: value for key, value in failed.items() if key != "traceback"}
                outcomes.append(RewardOutcome(zeros, zeros, reason))
                continue
            rewards = [iter(answer["rewards"]) for answer in (own, shared)]
            successes = [iter(answer["successes"]) for answer in (own, shared)]
            outcomes.append(
                RewardOutcome(
                    tuple(next(rewards[kind]) for kind in kinds),
                    tuple(next(successes[kind]) for kind in kinds),
                    own["metadata"] | shared["metadata"],
                )
            )
        return outcomes

    def _count(self, answers: Sequence[dict[str, Any]], failed: int, what: str, items: Sequence[RewardItem]) -> int:
        """How many prompts, or groups, have failed in succession with these: ``failed`` of them, or none.

        One bad answer costs one sample; a function that fails on everything is a bug, not a reward of 0. Counted over
        calls, of which each may be about a single prompt.
        """
        if not answers or any(answer.get("reason") not in self._broken for answer in answers):
            return 0
        if failed >= _SUSPICIOUS_PROMPTS:
            last = f"prompt {_shown(items[-1].prompt)} and answer {_shown(items[-1].answer)}"
            self._refuse(answers[-1], f"failed on all responses to {failed} {what} in succession, last ({last})")
        return failed

    def _refuse_hanging_functions(self, failed: dict[str, Any], prompts: int) -> None:
        """At the eighth time, not after a batch of hundreds; where one prompt may be to blame, only of a function that
        has never answered."""
        if self._has_foreign and (prompts > 1 or not self._has_answered):
            self._refuse(failed, f"failed on each of the first {_SUSPICIOUS_ITEMS} responses of a batch, last")

    def _refuse(self, failed: dict[str, Any], what: str) -> None:
        name, reason = failed.get("function"), failed["reason"]
        why, remedy = failed.get("detail"), "correct the function or the answers in the data"
        if name == SERVICE:
            remedy = "see to the service, or to reward.functions"
        elif why is None and reason == "timeout":
            why = f"no answer within reward.timeout_s={self._config.timeout_s:g} s"
            remedy = "raise that, or correct the function"
        elif why is None:
            why = "the end of its worker"
        own = ", ".join(function.name for function in self._functions)
        who = f"reward function {name}" if name else f"reward.functions ({own})"
        refusal = RewardError(f"{who} {what} with {why}; {remedy}")
        refusal.users_traceback = failed.get("traceback")
        raise refusal


_NOTHING: dict[str, Any] = {"rewards": (), "successes": (), "metadata": {}}
"""What functions that are not there say."""


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")


def _members(groups: Sequence[Hashable], count: int) -> list[list[int]]:
    """Indices of each group's items, in order of appearance."""
    found: dict[Hashable, list[int]] = {}
    for index, group in zip(range(count), groups, strict=True):
        found.setdefault(group, []).append(index)
    return list(found.values())


def _sample_message(item: RewardItem) -> dict[str, Any]:
    return {"prompt": item.prompt, "response": item.response, "answer": item.answer}


def _group_message(items: Sequence[RewardItem]) -> dict[str, Any]:
    responses = [item.response for item in items]
    return {"prompt": items[0].prompt, "responses": responses, "answer": items[0].answer}


def _each_sample(
    answers: Sequence[dict[str, Any]], members: Sequence[Sequence[int]], count: int
) -> list[dict[str, Any]]:
    """What the group functions say of every item; a failed group's reason, for all of its items."""
    found = [_NOTHING] * count
    for answer, group in zip(answers, members, strict=bool(answers)):
        own = answer["samples"] if "samples" in answer else [answer] * len(group)
        for index, value in zip(group, own, strict=True):
            found[index] = value
    return found


class _Round:
    """One batch on its way through the workers of a pool."""

    def __init__(self, pool: RewardPool, items: list[dict[str, Any]]) -> None:
        if pool._closed:
            raise RewardError("the reward pool is closed; make a new one")
        self._pool = pool
        self._config = pool._config
        self._workers = pool._workers
        self._items = items
        self._waiting = list(range(len(items) - 1, -1, -1))
        self._answers: list[dict[str, Any] | None] = [None] * len(items)
        self._left = len(items)
        self._timed_out = 0  # as long as nothing else has happened in this round; far below 0 afterwards
        self._timed_out_prompts: set[str] = set()

    def run(self, until_ready: bool = False) -> list[dict[str, Any]]:
        for index, worker in enumerate(self._workers):
            if worker.ready and not worker.alive:  # it died while idle, which is no sample's fault
                self._replace(index)
        while self._left or (until_ready and not all(worker.ready for worker in self._workers)):
            self._hand_out()
            self._exchange()
            self._enforce_deadlines()
        return [answer for answer in self._answers if answer is not None]

    def _hand_out(self) -> None:
        share = math.ceil(len(self._items) / (2 * len(self._workers)))
        for worker in self._workers:
            if worker.ready and not worker.pending and self._waiting:
                size = min(_CHUNK_ITEMS, share)
                worker.pending = [self._waiting.pop() for _ in range(min(size, len(self._waiting)))]
                worker.queue({"items": [self._items[i] for i in worker.pending]})
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
            self._lost(index, worker.why_it_ended())
            return
        for message in messages:
            if "error" in message:
                raise RewardError(f"reward.functions: {message['error']}")
            if "ready" in message:
                worker.ready = True
                self._pool._is_ready(message["of_groups"])
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
            if reason != "timeout" and worker.was_killed() and self._pool._may_start_again():
                self._replace(index)
                return
            late = f"was not ready within reward.start_timeout_s={self._config.start_timeout_s:g} s"
            what = late if reason == "timeout" else "ended"
            raise RewardError(f"reward worker {worker.pid} {what} while starting: {worker.last_words()}")
        if worker.pending:
            self._settle(worker.pending.pop(0), {"reason": reason})
            self._waiting += reversed(worker.pending)
        self._replace(index)

    def _replace(self, index: int) -> None:
        self._workers[index].end()
        self._workers[index] = self._pool._start_worker()

    def _settle(self, item: int, message: dict[str, Any]) -> None:
        timed_out = message.get("reason") == "timeout"
        self._timed_out = self._timed_out + 1 if timed_out else -len(self._items)
        if timed_out:
            self._timed_out_prompts.add(self._items[item]["prompt"])
        if self._timed_out == _SUSPICIOUS_ITEMS:
            self._pool._refuse_hanging_functions(message, len(self._timed_out_prompts))
        self._pool._has_answered |= "reason" not in message
        self._answers[item] = message
        self._left -= 1
