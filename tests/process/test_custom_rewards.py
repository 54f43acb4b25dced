"""Custom reward functions, which a reward worker imports and calls once before a run starts."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_like.checks.check import check
from slime_like.config.reading.load import load_config
from tests.unit.checks.checkpoint import sound_flags

Problems = Callable[..., list[str]]


@pytest.fixture
def problems_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Problems:
    """Check a module with a function ``f``, which the command and the workers can find."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = [*sound_flags(tmp_path), "--reward.functions", "[{name: 'own_rewards:f'}]"]

    def problems(source: str, *others: str) -> list[str]:
        (tmp_path / "own_rewards.py").write_text(source)
        found = list(map(str, check(load_config(None, [*flags, *others]))))
        assert "own_rewards" not in sys.modules
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
    problems = problems_of(source, "--reward.start_timeout_s", "0.5" if "sleep" in source else "60")
    for problem, words in zip(problems, found, strict=True):
        assert problem.startswith("reward.functions.0.name=own_rewards:f") and words in problem
