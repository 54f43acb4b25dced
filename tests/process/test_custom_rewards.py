"""Custom reward functions, which a reward worker imports before a run starts: what is wrong with them is reported."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_like.checks.check import check
from slime_like.config.reading.load import load_config
from tests.unit.checks.checkpoint import sound_flags


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sound ones; modules in ``tmp_path`` are found by the command and by the workers."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return sound_flags(tmp_path)


# a user's module with a function `f`, and its options
HEAD = (
    "from functools import partial; from slime_like.interfaces.reward import RewardResult, group_reward; "
    "g = lambda *given: 1.0; filled = lambda f: g"
)
UNUSABLE: list[tuple[str, dict[str, Any]]] = [
    ("def f(response: str, answer='a'): ...", {}),
    ("def f(prompt, response, answer, extra, /): ...", {"extra": 1}),
    ("def f(*, prompt, response, answer): ...", {}),
    ("@group_reward\ndef f(prompt, responses): ...", {}),
    ("async def f(prompt, response, answer): ...", {}),
    ("def f(prompt, response, answer, *, scale: float = 2.0): ...", {"scales": 1}),
    ("def f(prompt, response, answer, *, scale): ...", {}),
    ("def f(response, prompt, answer): ...", {}),
    ("@group_reward\ndef f(answer, responses, prompt, *, scale=1): ...", {}),
    ("def f(data_source, solution_str, ground_truth, extra_info=None): return 1.0", {}),
    ("def f(prompts, completions, answer, **kwargs): return [1.0]", {}),
    ("def f(completions, **kwargs): return [1.0]", {}),
    ("f = 3", {}),
    ("f: object = ['a']", {}),
    ("def f(prompt, response, answer)\n    pass", {}),
    ("return f", {}),
    ("def f(*arguments, response, prompt, answer): ...", {}),
    ("class f: ...", {}),
    ("def f(prompt, response, answer): ...\nraise LookupError('no such table')", {}),
    ("from not_there import f", {}),
    ("def f(prompt, response, answer): ...\nraise SystemExit('I will not')", {}),
    # the call with a row of the data
    ("def f(prompt, response, answer): ...", {}),
    ("def f(prompt, response, answer): return 'right'", {}),
    ("def f(prompt, response, answer): return 1, 2, 3", {}),
    ("def f(prompt, response, answer): return {'points': 1.0}", {}),
    ("def f(prompt, response, answer): return float('nan')", {}),
    ("def f(prompt, response, answer): return prompt.no_such_method()", {}),
    ("def f(prompt, response, answer): import os; os._exit(3)", {}),
    ("@group_reward\ndef f(prompt, responses, answer): return 1.0", {}),
    ("@group_reward\ndef f(prompt, responses, answer): return [1.0]", {}),
    ("@group_reward\ndef f(prompt, responses, answer): return [None for _ in responses]", {}),
]
USABLE: list[tuple[str, dict[str, Any]]] = [
    ("f = 3\nf = filled(f)", {}),
    ("f = partial(g, 3)", {}),
    ("def f(answer, completion, gold): return True", {}),
    ("def f(prompt, response, answer) -> float: return float(response == answer)", {}),
    ("def f(prompt, response, answer) -> tuple[float, bool]: return 0.5, True", {}),
    ("def f(prompt, response, answer) -> dict: return {'score': 0.5, 'why': 'half'}", {}),
    ("def f(prompt, response, answer, *, scale=1) -> RewardResult: return RewardResult(1.0, True)", {"scale": 2}),
    ("def f(prompt, response, answer, **options) -> 'RewardResult': return RewardResult(1.0, True)", {"scale": 2}),
    ("def f(*arguments): return 1", {}),
    ("@group_reward\ndef f(prompt, responses, answer) -> list[float]: return [1.0 for _ in responses]", {}),
    (
        "@group_reward\ndef f(prompt, responses, answer) -> list[RewardResult]: return [(1, True) for _ in responses]",
        {},
    ),
]


def problems_of(source: str, options: dict[str, Any], flags: list[str], directory: Path) -> list[str]:
    (directory / "own_rewards.py").write_text(f"{HEAD}\n{source}\n")
    functions = json.dumps([{"name": "own_rewards:f", "options": options}])
    problems = list(map(str, check(load_config(None, [*flags, "--reward.functions", functions]))))
    assert "own_rewards" not in sys.modules
    return [problem.replace(str(directory), "<modules>") for problem in problems]


@pytest.mark.parametrize(("source", "options"), USABLE, ids=[source for source, _ in USABLE])
def test_a_usable_reward_has_no_problem(tmp_path: Path, flags: list[str], source: str, options: dict[str, Any]) -> None:
    assert problems_of(source, options, flags, tmp_path) == []


@pytest.mark.parametrize(("source", "options"), UNUSABLE, ids=[source for source, _ in UNUSABLE])
def test_an_unusable_reward_is_imported_by_a_worker_and_rejected(
    tmp_path: Path, flags: list[str], source: str, options: dict[str, Any]
) -> None:
    [problem] = problems_of(source, options, flags, tmp_path)
    assert problem.startswith("reward.functions.0.name=own_rewards:f")


def test_the_import_of_a_custom_reward_has_a_bound(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "own_rewards.py").write_text("import time\ndef f(prompt, response, answer): ...\ntime.sleep(1000)\n")
    flags += ["--reward.functions", "[{name: 'own_rewards:f'}]", "--reward.start_timeout_s", "0.5"]
    assert list(map(str, check(load_config(None, flags)))) == [
        "reward.functions.0.name=own_rewards:f: a reward worker was not ready within reward.start_timeout_s=0.5 s: "
        "it wrote nothing"
    ]
