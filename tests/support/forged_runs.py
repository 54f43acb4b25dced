"""Run directories as another program, an editor or an attacker might leave them."""

import json
import random
from pathlib import Path
from typing import Any

from slime_like.observability.metrics import METRICS_FILE
from slime_like.observability.tables import SAMPLE_TABLE, TOKEN_TABLE

VALUES: list[str] = [
    "null", "true", "3", "-1", "0", "5e-324", "1e308", "-1e308", "1e999", "NaN", "-Infinity", "1" * 400, "1" * 5000,
    '"text"', '""', "[]", "{}", "[1, [2]]", '{"a": 1}', "[" * 100_000, '{"a":' * 5_000, "[" * 600 + "]" * 600,
    '"\\ud800"', '"' + "x" * 10_000 + '"',
]  # fmt: skip
FILES = (METRICS_FILE, f"tables/{SAMPLE_TABLE}.jsonl", f"tables/{TOKEN_TABLE}.jsonl", "config.yaml", "driver.log")


def forge_file(run_dir: Path, draw: random.Random) -> str:
    """Change one file of a run, and return its name: some bytes, a line, or a value of a line."""
    name = draw.choice(FILES)
    path = run_dir / name
    if path.is_symlink() or (path.exists() and not path.is_file()):  # damaged before
        return name
    content = path.read_bytes() if path.exists() else b""
    lines = content.decode(errors="replace").splitlines()
    if draw.random() < 0.3 or not lines:
        path.write_bytes(damaged_bytes(content, draw))
        return name
    number = draw.randrange(len(lines))
    if path.suffix == ".jsonl":
        lines[number] = _forged_line(lines[number], draw)
    else:
        lines[number] = lines[number].partition(":")[0] + ": " + draw.choice(VALUES)[:500]
    path.write_text("\n".join(lines) + "\n", errors="backslashreplace")
    return name


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """Cut off, overwritten in the middle, or replaced by a few bytes."""
    at, some = draw.randrange(len(content) + 1), draw.randbytes(draw.randrange(1, 9))
    return draw.choice([content[:at], content[:at] + some + content[at + len(some) :], some])


def _forged_line(line: str, draw: random.Random) -> str:
    try:
        row: dict[str, Any] = dict(json.loads(line))
    except (ValueError, TypeError, RecursionError):  # forged before
        return draw.choice(VALUES)
    value, name = draw.choice(VALUES), draw.choice([*row, "step", "new"])
    if draw.random() < 0.2:
        return value
    rest = {key: kept for key, kept in row.items() if key != name}
    return f"{json.dumps(rest)[:-1]}, {json.dumps(name)}: {value}}}"
