"""Reward functions in worker processes with bounds on time and memory: a bad answer costs its sample, no more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from slime_like.config import RewardConfig
from slime_like.config.rollout import ENVIRONMENT
from slime_like.errors import ConfigError, RewardError, SlimeLikeError
from slime_like.sandbox.loop_thread import LoopThread
from slime_like.sandbox.pool import WorkerKind, WorkerPool
from slime_like.sandbox.rewards.failures import BatchTimeouts, RewardFailures
from slime_like.sandbox.rewards.registry import LOCAL

_MODULE = "slime_like.sandbox.rewards.worker"
_CHUNK_ITEMS = 64

Answer = dict[str, Any]
"""A worker's message about one item: its results, or the reason why there are none."""

_NOTHING: Answer = {"rewards": (), "successes": (), "metadata": {}}
"""Answer of functions that are not there."""


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One response to score: decoded text, without special tokens."""

    prompt: str
    response: str
    answer: str


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """Result of the reward functions for one response.

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
    """``config.workers`` processes; a hung or dead one is replaced. Workers start at once, in the background."""

    def __init__(self, config: RewardConfig) -> None:
        self._functions = [function.name for function in config.computed]
        self._has_foreign = any(name not in LOCAL for name in self._functions)
        self._count = config.workers
        functions = [index for index, function in enumerate(config.functions) if function.name != ENVIRONMENT]
        self._workers = WorkerPool(_workers_of(config, functions, "reward.functions", RewardError), config)
        self._failures = RewardFailures(config)
        self._thread = LoopThread()
        self._closed = False
        if self._functions:
            self._thread.run(self._launch())

    @property
    def process_ids(self) -> tuple[int, ...]:
        return self._workers.process_ids

    def start(self) -> None:
        """Wait until every worker is ready.

        Raises:
            RewardError: a reward function cannot be used, or a worker did not start in time.
        """
        self._thread.run(self._workers.ready())

    def score(self, items: Sequence[RewardItem], groups: Sequence[Hashable] | None = None) -> list[RewardOutcome]:
        """Score a batch; equal items are scored once, and the order is kept.

        Args:
            groups: for each item, what it shares with the others of its group, which has one prompt and one answer;
                without it, every item is a group.

        Raises:
            RewardError: the workers cannot go on, or so many items failed with none between them that had a reward that
                the functions must be broken.
        """
        if not self._functions:
            return [RewardOutcome((), ()) for _ in items]
        if self._closed:
            raise RewardError("the reward pool is closed; make a new one")
        if not items:
            return []
        if not self._workers.about:
            self.start()
        return self._score(items, _members(groups if groups is not None else range(len(items)), len(items)))

    def close(self) -> None:
        """End every worker, by its process id, within a bound."""
        if self._closed:
            return
        self._closed = True
        try:
            self._thread.run(self._workers.close())
        finally:
            self._thread.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _launch(self) -> None:
        self._workers.launch()

    def _score(self, items: Sequence[RewardItem], members: Sequence[Sequence[int]]) -> list[RewardOutcome]:
        of_groups = frozenset(self._workers.about["of_groups"])  # known to the workers, which import the functions
        chosen: dict[tuple[str, ...], RewardItem] = {}
        for item in items:
            chosen.setdefault(self._key(item), item)
        which = {key: index for index, key in enumerate(chosen)}
        samples = [_sample_message(item) for item in chosen.values()] if len(of_groups) < len(self._functions) else []
        wholes = [_group_message([items[i] for i in group]) for group in members] if of_groups else []
        answers = self._thread.run(self._answers([*samples, *wholes]))
        shared = answers[len(samples) :]
        last = (items[-1].prompt, items[-1].answer)
        of_items = [_NOTHING] * len(items)
        if samples:
            indices = [which[self._key(item)] for item in items]
            of_items = [answers[index] for index in indices]
            self._failures.record_prompts(of_items, len({tuple(indices[i] for i in group) for group in members}), last)
        if wholes:
            self._failures.record_groups(shared, last)
        kinds = [name in of_groups for name in self._functions]
        shared_of_items = _each_sample(shared, members, len(items))
        return [_outcome(kinds, pair) for pair in zip(of_items, shared_of_items, strict=True)]

    def _key(self, item: RewardItem) -> tuple[str, ...]:
        """Functions that are not ours may look at the prompt, and are called for each."""
        return (item.response, item.answer, *([item.prompt] if self._has_foreign else []))

    async def _answers(self, items: Sequence[dict[str, Any]]) -> list[Answer]:
        """Return one answer per item, in order. The first error ends the batch."""
        size = min(_CHUNK_ITEMS, math.ceil(len(items) / (2 * self._count)))
        timeouts = BatchTimeouts(self._failures)
        try:
            async with asyncio.TaskGroup() as tasks:
                chunks = [
                    tasks.create_task(self._chunk_answers(items[start : start + size], timeouts))
                    for start in range(0, len(items), size)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [answer for chunk in chunks for answer in chunk.result()]

    async def _chunk_answers(self, items: Sequence[dict[str, Any]], timeouts: BatchTimeouts) -> list[Answer]:
        answers: list[Answer] = []

        def settle(answer: Answer) -> None:
            timeouts.record(items[len(answers)]["prompt"], answer)
            answers.append(answer)

        await self._workers.ask(items, settle)
        return answers


def start_problems(config: RewardConfig, index: int) -> list[str]:
    """Problems of ``config.functions[index]`` that a worker finds when it starts with this function alone."""
    subject = f"reward.functions.{index}.name={config.functions[index].name}"
    kind = _workers_of(config, [index], subject, lambda text: ConfigError(text.splitlines()))
    thread = LoopThread()
    try:
        thread.run(_try_start(WorkerPool(kind, config.model_copy(update={"workers": 1}))))
    except ConfigError as error:
        return list(map(str, error.problems))
    finally:
        thread.close()
    return []


async def _try_start(workers: WorkerPool) -> None:
    workers.launch()
    try:
        await workers.ready()
    finally:
        await workers.close()


def _workers_of(
    config: RewardConfig, functions: Iterable[int], subject: str, error: Callable[[str], SlimeLikeError]
) -> WorkerKind:
    setup = [
        {
            "field": f"reward.functions.{index}",
            "name": config.functions[index].name,
            "options": config.functions[index].options,
        }
        for index in functions
    ]
    return WorkerKind(_MODULE, {"functions": setup}, "a reward worker", "reward", subject, error)


def _members(groups: Iterable[Hashable], count: int) -> list[list[int]]:
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


def _each_sample(answers: Sequence[Answer], members: Sequence[Sequence[int]], count: int) -> list[Answer]:
    """The group functions' answer for every item; a failed group's reason, for all of its items."""
    found = [_NOTHING] * count
    for answer, group in zip(answers, members, strict=bool(answers)):
        values = answer["samples"] if "samples" in answer else [answer] * len(group)
        for index, value in zip(group, values, strict=True):
            found[index] = value
    return found


def _outcome(kinds: Sequence[bool], answers: tuple[Answer, Answer]) -> RewardOutcome:
    """Results of both kinds of functions side by side, in the order of the configuration.

    Args:
        kinds: per function, whether it is given whole groups.
        answers: of the functions of single responses, and of those of whole groups.
    """
    zeros = (0.0,) * len(kinds)
    failed = next((answer for answer in answers if "reason" in answer), None)
    if failed is not None:
        return RewardOutcome(zeros, zeros, {key: value for key, value in failed.items() if key != "traceback"})
    rewards, successes = ([iter(answer[key]) for answer in answers] for key in ("rewards", "successes"))
    return RewardOutcome(
        tuple(next(rewards[kind]) for kind in kinds),
        tuple(next(successes[kind]) for kind in kinds),
        answers[0]["metadata"] | answers[1]["metadata"],
    )
