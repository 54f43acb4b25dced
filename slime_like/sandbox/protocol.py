"""Length-prefixed JSON over a pipe, between a pool and its workers. Nothing is ever unpickled."""

import json
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct(">I")


def encode(message: dict[str, Any]) -> bytes:
    """Four bytes of length, big-endian, then the message as ASCII JSON."""
    body = json.dumps(message, allow_nan=False).encode("ascii")
    return _LENGTH.pack(len(body)) + body


def read_message(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message of a blocking stream, ``None`` at its end."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


def take_messages(buffer: bytearray) -> list[dict[str, Any]]:
    """Remove every complete message from the front of ``buffer`` and return them."""
    messages = []
    start = 0
    while len(buffer) >= start + _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer, start)
        end = start + _LENGTH.size + length
        if len(buffer) < end:
            break
        messages.append(json.loads(bytes(buffer[start + _LENGTH.size : end])))
        start = end
    del buffer[:start]
    return messages
