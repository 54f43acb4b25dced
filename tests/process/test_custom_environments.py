"""A custom environment, which a worker creates and resets before a run starts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_like.checks.check import check
from slime_like.config.reading.load import load_config
from tests.unit.checks.checkpoint import sound_flags

SOURCE = """
class Rounds:
    def __init__(self, rounds: int = 3):
        if rounds > 9:
            raise ValueError("at most 9")

    def reset(self, task):
        if task.fields.get("secret") == "none":
            raise LookupError(f"no secret for {task.prompt} and {task.answer}")
        return {"limit": {1, 2}} if task.fields.get("secret") == "set" else {"limit": 1}

    def step(self, state, response): ...
"""


@pytest.mark.parametrize(
    ("options", "secret", "words"),
    [
        ({"rounds": 9}, "7", []),
        ({"turns": 3}, "7", ["cannot be called with its options", "turns"]),
        ({"rounds": 10}, "7", ["at most 9"]),
        ({}, "none", ["cannot be reset for the first row", "no secret for 2+3 and 5"]),
        ({}, "set", ["first row", "JSON"]),
    ],
)
def test_options_and_the_first_row_are_tried_by_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], secret: str, words: list[str]
) -> None:
    """A reset may raise, or return a state that is not expressible in JSON."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "rounds_of.py").write_text(SOURCE)
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "2+3", "answer": "5", "environment": {"secret": secret}}) + "\n")
    flags = [*sound_flags(tmp_path), "--data.train", str(data), "--data.environment_key", "environment"]
    flags += ["--rollout.environment.name", "rounds_of:Rounds", "--rollout.environment.template", "{observation}"]
    problems = check(load_config(None, [*flags, "--rollout.environment.options", json.dumps(options)]))
    assert [problem.code for problem in problems] == ["rollout.environment-custom"] * bool(words)
    assert all(word in str(problem) for problem in problems for word in ("rounds_of:Rounds", *words))
    assert "rounds_of" not in sys.modules
