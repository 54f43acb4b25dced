"""Reports of scheduler ranks to the process that started them, besides SGLang's answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from typing import Self, TypeAlias

from slime_like.errors import WeightSyncError
from slime_like.hosting.calls import code_of


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's report on one call.

    Attributes:
        error: why it failed, or ``None``.
        code: of the error.
        received: hashes of an update's tensors, where they were asked for.
        hash_s: seconds spent on them.
    """

    error: str | None = None
    received: dict[str, int] | None = None
    hash_s: float = 0.0
    code: str = "rank-failed"

    @classmethod
    def of_error(cls, error: Exception) -> Self:
        return cls(f"{type(error).__name__}: {error}", code=code_of(error, "rank-failed"))


Reports: TypeAlias = "SimpleQueue[RankReport]"


def require_success(reports: Sequence[RankReport]) -> None:
    """Raises ``WeightSyncError`` with the first rank's failure, if any failed."""
    for report in reports:
        if report.error is not None:
            raise WeightSyncError(report.error, code=report.code)


def common_checksums(reports: Sequence[RankReport]) -> tuple[dict[str, int], float]:
    """The hashes that all ranks report, and the longest time they took.

    Raises:
        WeightSyncError: the ranks' hashes differ.
    """
    first = reports[0].received or {}
    if any((report.received or {}) != first for report in reports):
        raise WeightSyncError("its tensor-parallel ranks received different bytes", code="ranks-differ")
    return first, max(report.hash_s for report in reports)
