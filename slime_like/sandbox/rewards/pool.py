"""Reward functions in worker processes with limits on time and memory. A bad response costs only its sample."""

import asyncio
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from slime_like.config import RewardConfig
from slime_like.errors import RewardError
from slime_like.sandbox.pool import WorkerKind, WorkerPool
from slime_like.sandbox.rewards.failures import FailureCounter, is_failure
from slime_like.sandbox.rewards.registry import LOCAL, ROW
from slime_like.system.loop_thread import LoopThread

_CHUNK_ITEMS = 64

Answer = dict[str, Any]
"""A worker's message about one item: the results of its samples, or the reason why it has none."""


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


class RewardPool:
    """``config.workers`` processes that start in the background. A hung or dead process is replaced.

    Args:
        step_responses: number of responses of a training step. The time that hanging ones cost is bounded per step.
        logs: directory for the functions' output.
    """

    def __init__(self, config: RewardConfig, step_responses: int = 512, logs: Path | None = None) -> None:
        self._functions = [function.name for function in config.computed]
        self._count = config.workers
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
        size = min(_CHUNK_ITEMS, math.ceil(len(items) / (2 * self._count)))
        hung = list[str | None]()
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        try:
            async with asyncio.TaskGroup() as tasks:
                chunks = [tasks.create_task(self._chunk_answers(part, hung)) for part in parts]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [answer for chunk in chunks for answer in chunk.result()]

    async def _chunk_answers(self, items: Sequence[dict[str, Any]], hung: list[str | None]) -> list[Answer]:
        answers: list[Answer] = []

        def settle(answer: Answer) -> None:
            answers.append(self._failures.record(hung, items[len(answers)]["prompt"], answer))

        while len(answers) < len(items):
            if self._failures.timeout_s:
                await self._workers.ask(items[len(answers) :], settle, lambda: self._failures.timeout_s)
            else:
                settle(self._failures.refusal)
        return answers


def start_problems(config: RewardConfig, index: int, sample: RewardItem | None) -> list[str]:
    """Start a worker with only ``config.functions[index]``, call it once with ``sample``, and return the problems."""
    subject = f"reward.functions.{index}.name={config.functions[index].name}"
    pool = WorkerPool(_workers_of(config, [index], subject), config.model_copy(update={"workers": 1}))
    if sample is None:
        return pool.start_problems()

    async def call() -> list[str]:
        answers: list[Answer] = []
        group = {"responses": [sample.response] * 2} if pool.about["of_groups"] else {}
        await pool.ask([_message(sample) | group], answers.append)
        reason = answers[0].get("reason")
        if reason is None:
            return []
        why, remedy = answers[0].get("detail") or f"no result ({reason})", "correct the function, or the row"
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
