"""Reward functions in worker processes with limits on time and memory. A bad response costs only its sample."""

import asyncio
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Self

from slime_like.config import RewardConfig
from slime_like.errors import RewardError
from slime_like.sandbox.pool import WorkerKind, WorkerPool
from slime_like.sandbox.rewards.registry import LOCAL, QUICK, ROW, SERVICES
from slime_like.system.budget import HourlyBudget
from slime_like.system.loop_thread import LoopThread

_SHOWN_CHARS = 60
_SUSPICIOUS_ITEMS = 8
"""Number of responses that hang, one after the other, before any other is answered."""
_SUSPICIOUS_PROMPTS = 8
"""Number of prompts in a row whose responses all failed. Prompts are counted, because all responses to one prompt fail
together if its row has an unusable answer, and a call may be about a single prompt."""
_MAX_OUTAGES = 4
"""Number of times within an hour that functions which have answered before may fail as above."""
_FULL_TIMEOUTS = 8
_MAX_TIMEOUTS = 100
_SHORTENED = 0.1

Answer = dict[str, Any]
"""A worker's message about one item: the results of its samples, or the reason why it has none."""


def is_failure(metadata: Mapping[str, Any]) -> bool:
    """Return whether a response or rollout with this metadata has no reward, for a reason other than what it says."""
    return "reason" in metadata and "fault" not in metadata


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One response to score, as text without the token that ended it, with thinking in ``<think>...</think>``, and the
    row as JSON if a function may read it."""

    prompt: str
    response: str
    answer: str
    row: str | None = None


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """Result of the reward functions for one response.

    Attributes:
        rewards: one per computed function (``RewardConfig.computed``), unweighted; all 0 if scoring failed.
        successes: one per computed function, 1.0 or 0.0.
        metadata: what each function reported. If scoring failed, ``reason`` is "timeout", "crash", "memory", "cpu",
            "error" or "budget" (too many responses of the step timed out before this one), with ``function`` and
            ``detail`` if they are known. With ``fault``, the response is to blame, and its reward is 0.
    """

    rewards: tuple[float, ...]
    successes: tuple[float, ...]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """True if the response has no reward and is not to blame."""
        return is_failure(self.metadata)


class FailureCounter:
    """Failures over all calls of a pool, and timeouts of the present step.

    A policy may learn to write towers of powers, each of which hangs. Eight of a step's responses per worker may take
    ``timeout_s``, the next ones a tenth of it, if all functions are quick unless they hang. After 100 per worker, the
    remaining responses are not scored. The count restarts with the next step's responses.

    Args:
        responses: number of responses of a step. Each call may be about a part of a step.
    """

    def __init__(self, config: RewardConfig, responses: int) -> None:
        self._config, self._responses = config, responses
        self._functions = [function.name for function in config.computed]
        self._survives = config.max_failed_fraction == 1
        self._max = _MAX_TIMEOUTS * config.workers
        self._full = _FULL_TIMEOUTS * config.workers if QUICK.issuperset(self._functions) else self._max
        self._has_answered = False  # some item got a reward, or was to blame for having none
        self._failed = Counter[str]()
        self._outages = HourlyBudget(_MAX_OUTAGES)
        self._lock = Lock()
        self._seen = self._timeouts = 0
        self._about: dict[str, Any] = {}

    @property
    def timeout_s(self) -> float:
        """Seconds that the next response may take; 0 if it is not to be scored."""
        if self._timeouts >= self._max:
            return 0.0
        return self._config.timeout_s * (1.0 if self._timeouts < self._full else _SHORTENED)

    @property
    def refusal(self) -> dict[str, Any]:
        """Answer for a response that is not scored."""
        detail = f"not scored: {self._timeouts} responses of this step timed out before"
        return {"reason": "budget", "detail": detail, **self._about}

    def record(self, hung: list[str | None], prompt: str, answer: dict[str, Any]) -> dict[str, Any]:
        """Count one answer and return it. A timeout after less than ``timeout_s`` gets a detail.

        ``hung`` collects the prompts of a batch's timeouts, and ``None`` for other answers. Raises ``RewardError`` if
        the first eight answers of a batch are all timeouts, unless a single prompt may be at fault, or the run is to
        survive an outage, because the functions have answered before.
        """
        bound = self.timeout_s
        self._seen += 1
        if answer.get("reason") in ("timeout", "cpu"):  # a later refusal blames what all of them had in common
            about: dict[str, Any] = {name: answer[name] for name in ("function", "fault") if name in answer}
            self._about = dict(about.items() & self._about.items()) if self._timeouts else about
            self._timeouts += 1
        if self._seen == self._responses:
            self._seen = self._timeouts = 0
        if answer.get("reason") == "timeout" and "detail" not in answer and 0 < bound < self._config.timeout_s:
            detail = f"no answer within {bound:g} s, after {self._full} timeouts in this step"
            answer = {**answer, "detail": detail}
        hung.append(prompt if is_failure(answer) and answer["reason"] == "timeout" else None)
        all_hung = len(hung) == _SUSPICIOUS_ITEMS and None not in hung
        if all_hung and not (self._has_answered and (self._survives or len(set(hung)) == 1)):
            self._reject(answer, f"failed on each of the first {_SUSPICIOUS_ITEMS} responses of a batch, most recently")
        self._has_answered |= not is_failure(answer)
        return answer

    def record_call(self, what: str, count: int, answers: Sequence[Mapping[str, Any]], last: tuple[str, str]) -> None:
        """Count one call about ``count`` "prompts" or "groups". ``last`` is its last prompt and answer.

        Raises ``RewardError`` if too many in a row failed on all responses: that is a bug, or an outage that the run is
        not to survive.
        """
        failed = bool(answers) and all(map(is_failure, answers))
        with self._lock:  # groups are scored from several threads
            self._failed[what] = in_a_row = self._failed[what] + count if failed else 0
        if in_a_row >= _SUSPICIOUS_PROMPTS and not (self._survives and self._has_answered):
            prompt, truth = (repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...") for text in last)
            where = f"most recently (prompt {prompt} and answer {truth})"
            self._reject(answers[-1], f"failed on all responses to {in_a_row} {what} in a row, {where}")

    def _reject(self, answer: Mapping[str, Any], what: str) -> None:
        """Raise ``RewardError``, unless functions that have answered before have an outage, which may pass.

        An exception of a function that is not a service is a bug.
        """
        is_outage = answer["reason"] != "error" or answer.get("function") in SERVICES
        if is_outage and self._has_answered and self._outages.use():
            self._failed.clear()
            return
        name, reason = answer.get("function"), answer["reason"]
        why, remedy = answer.get("detail", "the end of its worker"), "correct the function or the answers in the data"
        if "detail" not in answer and reason == "timeout":
            why = f"no answer within reward.timeout_s={self._config.timeout_s:g} s"
            remedy = "raise that, or correct the function"
        if name in SERVICES:
            remedy = "check the service, or reward.functions"
        who = f"reward function {name}" if name else f"reward.functions ({', '.join(self._functions)})"
        problem, trace = f"{who} {what} with {why}", answer.get("traceback")
        raise RewardError(problem, code="reward-function-fails", remedy=remedy, users_traceback=trace)


class RewardPool:
    """``config.workers`` processes that start in the background. A hung or dead process is replaced.

    Args:
        step_responses: number of responses of a training step. The time that hanging ones cost is bounded per step.
        logs: directory for the functions' output.
    """

    def __init__(self, config: RewardConfig, step_responses: int = 512, logs: Path | None = None) -> None:
        self._functions = [function.name for function in config.computed]
        functions = [index for index, function in enumerate(config.functions) if not function.is_given]
        kind = _workers_of(config, functions, "reward.functions")
        self._workers = WorkerPool(kind, config, None if logs is None else (logs, "reward"))
        self._failures = FailureCounter(config, step_responses)
        self._thread = LoopThread()  # workers live as long as it does
        if self._functions:
            self._thread.run(self._workers.launch())

    @property
    def process_ids(self) -> tuple[int, ...]:
        return self._workers.process_ids

    def start(self) -> None:
        """Wait for every worker. Raises ``RewardError`` if a function is unusable, or a start takes too long."""
        self._thread.run(self._workers.ready())

    def score(self, items: Sequence[RewardItem], groups: Sequence[Hashable] | None = None) -> list[RewardOutcome]:
        """Score a batch, in order. Equal items are scored once.

        ``groups`` has a key for each item that is the same for all items of its group, which have the same prompt and
        answer. By default, every item is a group. Raises ``RewardError`` if the workers no longer start, or so many
        items failed in a row that the functions must be broken.
        """
        if not self._functions:
            return [RewardOutcome((), ()) for _ in items]
        if self._thread.loop.is_closed():
            raise RewardError("the reward pool is closed", code="pool-closed", remedy="create a new one")
        if not items:
            return []
        if not self._workers.about:
            self.start()
        of_groups = frozenset(self._workers.about["of_groups"])  # only the workers import the functions
        by_prompt = not LOCAL.issuperset(self._functions)  # included functions ignore the prompt
        keys = [(item.response, item.answer, item.prompt if by_prompt else "", item.row) for item in items]
        groups = range(len(items)) if groups is None else groups
        members = _members(group for _, group in zip(items, groups, strict=True))
        equal = _members(keys) if len(of_groups) < len(self._functions) else []
        whole = members if of_groups else []
        messages = [_message(items[same[0]]) for same in equal]
        messages += [_message(items[group[0]]) | {"responses": [items[i].response for i in group]} for group in whole]
        answers = self._thread.run(self._answers(messages))
        last = (items[-1].prompt, items[-1].answer)
        if equal:
            prompts = len({tuple(keys[i] for i in group) for group in members})
            self._failures.record_call("prompts", prompts, answers[: len(equal)], last)
        if whole:
            self._failures.record_call("groups", len(whole), answers[len(equal) :], last)
        results: list[list[Answer]] = [[] for _ in items]
        for answer, indices in zip(answers, [*equal, *whole], strict=True):
            found = answer.get("samples", [answer])  # one for each of the items, or one for all of them
            for index, result in zip(indices, found if len(found) > 1 else found * len(indices), strict=True):
                results[index].append(result)
        return [self._outcome(each) for each in results]

    def _outcome(self, results: Sequence[Answer]) -> RewardOutcome:
        """Merge the results of functions of single responses and of whole groups."""
        failed = next((each for each in sorted(results, key=is_failure, reverse=True) if "reason" in each), None)
        if failed is not None:
            zeros = (0.0,) * len(self._functions)
            return RewardOutcome(zeros, zeros, {key: value for key, value in failed.items() if key != "traceback"})
        scores = sorted(score for each in results for score in each["scores"])  # by the function's number
        metadata = {name: value for each in results for name, value in each["metadata"].items()}
        return RewardOutcome(tuple(reward for _, reward, _ in scores), tuple(won for *_, won in scores), metadata)

    def close(self) -> None:
        """End every worker by its process id, within a bound. May be called twice."""
        if self._thread.loop.is_closed():
            return
        try:
            self._thread.run(self._workers.close())
        finally:
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _answers(self, items: Sequence[dict[str, Any]]) -> list[Answer]:
        """Return one answer per item, in order. The first error ends the batch."""
        hung = list[str | None]()

        async def ask(item: dict[str, Any]) -> Answer:
            answer = await self._workers.ask(item, lambda: self._failures.timeout_s)
            return self._failures.record(hung, item["prompt"], answer or self._failures.refusal)

        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(ask(item)) for item in items]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in asked]


def start_problems(config: RewardConfig, index: int, sample: RewardItem | None) -> list[str]:
    """Start a worker with only ``config.functions[index]``, call it once with ``sample``, and return the problems."""
    subject = f"reward.functions.{index}.name={config.functions[index].name}"
    pool = WorkerPool(_workers_of(config, [index], subject), config.model_copy(update={"workers": 1}))
    if sample is None:
        return pool.start_problems()

    async def call() -> list[str]:
        group = {"responses": [sample.response] * 2} if pool.about["of_groups"] else {}
        answer = await pool.ask(_message(sample) | group) or {}
        reason = answer.get("reason")
        if reason is None:
            return []
        why, remedy = answer.get("detail") or f"no result ({reason})", "correct the function, or the row"
        if reason == "timeout":
            why = f"no result within reward.timeout_s={config.timeout_s:g} s"
            remedy = "raise that if the machine is busy or the function slow at first, or correct the function"
        row = f"the first row of the data, with its answer {sample.answer[:40]!r} as the response"
        return [f"{subject} fails on {row}: {why}; {remedy}"]

    return pool.start_problems(call)


def _workers_of(config: RewardConfig, functions: Iterable[int], subject: str) -> WorkerKind:
    setup = [
        {"field": f"reward.functions.{index}", **config.functions[index].model_dump(include={"name", "options"})}
        for index in functions
    ]
    return WorkerKind("slime_like.sandbox.rewards.worker", {"functions": setup}, "reward", subject, RewardError)


def _message(item: RewardItem) -> dict[str, Any]:
    """Convert an item without ``asdict``, whose copies take a tenth of a short step's scoring."""
    return {"prompt": item.prompt, "response": item.response, "answer": item.answer, ROW: item.row}


def _members(groups: Iterable[Hashable]) -> list[list[int]]:
    """Return the indices of each group's items, in order of appearance."""
    found: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        found.setdefault(group, []).append(index)
    return list(found.values())
