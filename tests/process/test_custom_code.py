"""Custom rewards and environments, which a worker imports and tries before a run starts."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_like.checks.check import check
from slime_like.config.reading.load import load_config
from slime_like.errors import Problem
from tests.unit.checks.checkpoint import sound_flags

Problems = Callable[..., list[Problem]]


@pytest.fixture
def problems_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Problems:
    """Check a run with a module ``own_code``, which the command and the workers can find."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def problems(source: str, *flags: str) -> list[Problem]:
        (tmp_path / "own_code.py").write_text(source)
        found = check(load_config(None, [*sound_flags(tmp_path), *flags]))
        assert "own_code" not in sys.modules
        return found

    return problems


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(prompt, response, answer): return response == answer", []),
        ("def f(prompt, response, answer, row): return float(row['prompt'] in prompt)", []),
        ("def f(prompt, response): ...", [""]),
        ("def f(prompt, response, answer): ...\nraise SystemExit('I will not')", [""]),
        ("def f(prompt, response, answer): import os; os._exit(3)", [""]),
        ("def f(prompt, response, answer): return 'right'", [""]),
        ("import time\ntime.sleep(1000)\n", ["not ready within reward.start_timeout_s=0.5 s: it wrote nothing"]),
    ],
)
def test_a_reward_is_tried_within_a_bound(problems_of: Problems, source: str, found: list[str]) -> None:
    bound = ("--reward.start_timeout_s", "0.5" if "sleep" in source else "60")
    problems = problems_of(source, "--reward.functions", "[{name: 'own_code:f'}]", *bound)
    for problem, words in zip(map(str, problems), found, strict=True):
        assert problem.startswith("reward.functions.0.name=own_code:f") and words in problem


ENVIRONMENT = """
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
def test_an_environments_options_and_the_first_row_are_tried(
    problems_of: Problems, tmp_path: Path, options: dict[str, Any], secret: str, words: list[str]
) -> None:
    """A reset may raise, or return a state that is not expressible in JSON."""
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "2+3", "answer": "5", "environment": {"secret": secret}}) + "\n")
    flags = ["--data.train", str(data), "--data.environment_key", "environment"]
    flags += ["--rollout.environment.name", "own_code:Rounds", "--rollout.environment.template", "{observation}"]
    problems = problems_of(ENVIRONMENT, *flags, "--rollout.environment.options", json.dumps(options))
    assert [problem.code for problem in problems] == ["rollout.environment-custom"] * bool(words)
    assert all(word in str(problem) for problem in problems for word in ("own_code:Rounds", *words))
