"""Text about responses without a reward, because a function or the environment failed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def by_reason(reasons: Sequence[str]) -> str:
    """Count failures by reason: "3 by error, 1 by timeout"."""
    return ", ".join(f"{reasons.count(reason)} by {reason}" for reason in sorted(set(reasons)))


def failure_text(metadata: Iterable[Mapping[str, Any]]) -> str:
    """Format ``by_reason`` of the failed responses with the detail of the first one."""
    failed = [entry for entry in metadata if "reason" in entry]
    details = [entry["detail"] for entry in failed if "detail" in entry]
    return by_reason([entry["reason"] for entry in failed]) + (f", first: {details[0]}" if details else "")
