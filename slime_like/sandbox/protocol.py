"""Messages between a pool and its workers: lines of JSON over a pipe. Nothing is ever unpickled."""

import json
from typing import Any


def encode(message: dict[str, Any]) -> bytes:
    """The message as one line of ASCII. Raises ``TypeError`` or ``ValueError`` for what JSON cannot express."""
    return json.dumps(message, allow_nan=False).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The message of a line; ``None`` where it is cut off, because the other side has ended."""
    return json.loads(line) if line.endswith(b"\n") else None
