"""Length-prefixed JSON over a pipe, between a pool and its workers. Nothing is ever unpickled."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size


def encode(message: dict[str, Any]) -> bytes:
    """Four bytes of length, big-endian, then the message as ASCII JSON."""
    body = json.dumps(message, allow_nan=False).encode("ascii")
    return _LENGTH.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """Bytes of the body that follows a header."""
    (length,) = _LENGTH.unpack(header)
    return int(length)


def decode(body: bytes) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(body)
    return message


def read_message(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message of a blocking stream, ``None`` at its end."""
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    length = length_of(header)
    body = stream.read(length)
    return decode(body) if len(body) == length else None
