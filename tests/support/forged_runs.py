"""Files as another program, an editor or an attacker might leave them."""

import random

VALUES: list[str] = [
    "null", "true", "3", "-1", "0", "5e-324", "1e308", "-1e308", "1e999", "NaN", "-Infinity", "1" * 400, "1" * 5000,
    '"text"', '""', "[]", "{}", "[1, [2]]", '{"a": 1}', "[" * 100_000, '{"a":' * 5_000, "[" * 600 + "]" * 600,
    '"\\ud800"', '"' + "x" * 10_000 + '"',
]  # fmt: skip


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """Cut off, overwritten in the middle, or replaced by a few bytes."""
    at, some = draw.randrange(len(content) + 1), draw.randbytes(draw.randrange(1, 9))
    return draw.choice([content[:at], content[:at] + some + content[at + len(some) :], some])
