"""Answers of an engine's ranks to a collective call."""

import json
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from importlib import import_module
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeAlias

import torch.distributed as dist

from slime_like.errors import WeightSyncError
from slime_like.hosting.process import code_of, one_line

RankAnswer: TypeAlias = tuple[Any, str | None, str]
"""A result, or ``None`` with the error's message and code. Plain values, because every engine's RPC carries those."""

AnswerQueue: TypeAlias = "SimpleQueue[RankAnswer] | StoreQueue"


class StoreQueue:
    """Queue of answers in the store of an engine that spans nodes. Every process connects when it first uses it."""

    def __init__(self, host: str, port: int) -> None:
        self._place = host, port
        self._read = 0

    @cached_property
    def _store(self) -> dist.Store:
        return dist.PrefixStore("answers", dist.TCPStore(*self._place, is_master=False, wait_for_workers=False))

    def put(self, answer: RankAnswer) -> None:
        self._store.set(str(self._store.add("count", 1)), json.dumps(answer))

    def get(self) -> RankAnswer:
        """Wait for the next answer, within the store's timeout."""
        self._read += 1
        result, failure, code = json.loads(self._store.get(str(self._read)))
        self._store.delete_key(str(self._read))
        return result, failure, code

    def empty(self) -> bool:
        return not self._store.check([str(self._read + 1)])


def attempt(call: Callable[[], Any]) -> RankAnswer:
    """Run one rank's part of a call. Return errors as answers, because engines pass on only the first rank's."""
    try:
        return call(), None, ""
    except Exception as error:
        return None, one_line(error), code_of(error, "rank-failed")


def function_of(rank: object, name: str) -> Callable[..., Any]:
    """Return a method of ``rank``, or the function "MODULE:NAME" in the package ``rollout``, applied to ``rank``."""
    module, _, function = name.rpartition(":")
    return partial(getattr(import_module(f"rollout.{module}"), function), rank) if module else getattr(rank, name)


def results(answers: Sequence[RankAnswer]) -> list[Any]:
    """Return every rank's result. Raises ``WeightSyncError`` with the first failure."""
    for _, failure, code in answers:
        if failure is not None:
            raise WeightSyncError(failure, code=code)
    return [result for result, _, _ in answers]


def common_checksums(received: Sequence[tuple[dict[str, int], float]]) -> tuple[dict[str, int], float]:
    """Return the ranks' hashes, and the longest hashing time. Raises ``WeightSyncError`` if the hashes differ."""
    first, _ = received[0]
    if any(checksums != first for checksums, _ in received):
        raise WeightSyncError("tensor-parallel ranks received different bytes", code="ranks-differ")
    return first, max(hash_s for _, hash_s in received)
