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


def test_a_usable_reward_has_no_problem(problems_of: Problems) -> None:
    assert problems_of("def f(prompt, response, answer): return response == answer") == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(prompt, response): ...",
        "def f(prompt, response, answer): ...\nraise SystemExit('I will not')",
        "def f(prompt, response, answer): import os; os._exit(3)",
        "def f(prompt, response, answer): return 'right'",
    ],
)
def test_an_unusable_reward_is_rejected(problems_of: Problems, source: str) -> None:
    [problem] = problems_of(source)
    assert problem.startswith("reward.functions.0.name=own_rewards:f")


def test_the_import_of_a_custom_reward_has_a_bound(problems_of: Problems) -> None:
    assert problems_of("import time\ntime.sleep(1000)\n", "--reward.start_timeout_s", "0.5") == [
        "reward.functions.0.name=own_rewards:f: the reward worker was not ready within reward.start_timeout_s=0.5 s: "
        "it wrote nothing"
    ]
