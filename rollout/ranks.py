"""Answers of an engine's ranks to a call that all of them carry out."""

from collections.abc import Callable, Sequence
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeAlias

from slime_like.errors import WeightSyncError
from slime_like.hosting.calls import code_of, one_line

RankAnswer: TypeAlias = tuple[Any, str | None, str]
"""A result; or ``None``, the error's sentence and its code. Plain values, which every engine's RPC carries."""

AnswerQueue: TypeAlias = "SimpleQueue[RankAnswer]"


def attempt(call: Callable[[], Any]) -> RankAnswer:
    """One rank's part of a call. Its error is an answer too: engines pass on that of the first rank at most."""
    try:
        return call(), None, ""
    except Exception as error:
        return None, one_line(error), code_of(error, "rank-failed")


def results(answers: Sequence[RankAnswer]) -> list[Any]:
    """Every rank's result. Raises ``WeightSyncError`` with the first rank's failure, if any failed."""
    for _, failure, code in answers:
        if failure is not None:
            raise WeightSyncError(failure, code=code)
    return [result for result, _, _ in answers]


def common_checksums(received: Sequence[tuple[dict[str, int], float]]) -> tuple[dict[str, int], float]:
    """The hashes of all ranks, and the longest time they took. Raises ``WeightSyncError`` where the hashes differ."""
    first, _ = received[0]
    if any(checksums != first for checksums, _ in received):
        raise WeightSyncError("its tensor-parallel ranks received different bytes", code="ranks-differ")
    return first, max(hash_s for _, hash_s in received)
