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


# a user's module with a function `f`, its options, and how the only problem begins and ends (none: it can be used)
OWN_HEAD = (
    "import slime_like.interfaces.reward as rewards; from functools import partial; from slime_like.interfaces.reward "
    "import RewardResult, group_reward; here = True; g = lambda *given: None; filled = lambda f: g"
)
GIVEN = "but is called with prompt, response and answer before its options; give it these three parameters first"
GROUP = "but is called with prompt, responses and answer before its options; give it these three parameters first"
OWN_REWARDS: list[tuple[str, dict[str, Any], str | None, str]] = [
    (
        "def f(response: str, answer='a'): ...",
        {},
        "NAME (PLACE:2) does not fit: reward function 'own_rewards:f' takes (response: str, answer='a'), ",
        GIVEN,
    ),
    ("def f(prompt, response, answer, extra, /): ...", {"extra": 1}, "OPTIONS={'extra': 1} do not fit: ", "(PLACE:2)"),
    ("def f(*, prompt, response, answer): ...", {}, "NAME (PLACE:2) does not fit: reward function", GIVEN),
    ("@group_reward\ndef f(prompt, responses): ...", {}, "NAME (PLACE:2) does not fit: reward function", GROUP),
    ("@rewards.group_reward\ndef f(): ...", {}, "NAME (PLACE:2) does not fit: reward function", GROUP),
    ("async def f(prompt, response, answer): ...", {}, "NAME (PLACE:2) is an `async def`, which ", "a plain `def`"),
    (
        "def f(prompt, response, answer, *, scale: float = 2.0): ...",
        {"scales": 1},
        "OPTIONS={'scales': 1} do not fit: options of reward function 'own_rewards:f': got an unexpected keyword "
        "argument 'scales'; it takes scale: float = 2.0",
        "(PLACE:2)",
    ),
    ("def f(prompt, response, answer, *, scale): ...", {}, "OPTIONS={} do not fit: options of reward", "(PLACE:2)"),
    (
        "def f(prompt, response, answer) -> float: ...",
        {},
        "NAME (PLACE:2) is annotated to return float",
        "RewardResult",
    ),
    ("def f(prompt, response, answer) -> 'int': ...", {}, "NAME (PLACE:2) is annotated to return int", "RewardResult"),
    (
        "def f(prompt, response, answer) -> None: ...",
        {},
        "NAME (PLACE:2) is annotated to return None",
        "a RewardResult",
    ),
    ("def f(prompt, response, answer) -> tuple[float, bool]: ...", {}, "NAME (PLACE:2) is annotated", "a RewardResult"),
    (
        "@group_reward\ndef f(prompt, responses, answer) -> list[float]: ...",
        {},
        "NAME (PLACE:2) is annotated to return list[float]; return a list of RewardResults, ",
        "one for each response",
    ),
    (
        "def f(response, prompt, answer): ...",
        {},
        "NAME (PLACE:2) does not fit: reward function 'own_rewards:f' takes (response, prompt, answer), but is given "
        "prompt, response and answer by position; ",
        "put its parameters in this order",
    ),
    (
        "@group_reward\ndef f(answer, responses, prompt, *, scale=1): ...",
        {},
        "NAME (PLACE:2) does not fit: reward function 'own_rewards:f' takes (answer, responses, prompt), ",
        "but is given prompt, responses and answer by position; put its parameters in this order",
    ),
    ("f = 3", {}, "NAME is 3 (PLACE:2), which cannot be called; correct the name", ""),
    ("f: object = ['a']", {}, "NAME is ['a'] (PLACE:2), which cannot be called; correct the name", ""),
    (
        "def f(prompt, response, answer)\n    pass",
        {},
        "NAME cannot be imported: PLACE:2: SyntaxError: ",
        "; correct it",
    ),
    ("return f", {}, "NAME cannot be imported: PLACE:2: SyntaxError: 'return' outside function", "; correct it"),
    ("f = 3\nf = filled(f)", {}, None, ""),
    ("f = partial(g, 3)", {}, None, ""),
    ("def f(answer, completion, gold): ...", {}, None, ""),
    ("def f(*arguments, response, prompt, answer): ...", {}, "OPTIONS={} do not fit: ", "(PLACE:2)"),
    ("def f(prompt, response, answer, *, scale=1) -> RewardResult: ...", {"scale": 2}, None, ""),
    ("def f(prompt, response, answer, **options) -> 'RewardResult': ...", {"scale": 2}, None, ""),
    ("def f(*arguments): ...", {}, None, ""),
    ("@group_reward\ndef f(prompt, responses, answer) -> list[RewardResult]: ...", {}, None, ""),
    ("@filled\ndef f(response): ...", {}, None, ""),
    ("def f(response): ...\nf = filled(f)", {}, None, ""),
    ("if here:\n    def f(prompt, response, answer): ...\nelse:\n    def f(response): ...", {}, None, ""),
    ("class f: ...", {}, "NAME does not fit: reward function 'own_rewards:f' takes (), ", GIVEN),
    (
        "def f(prompt, response, answer): ...\nraise LookupError('no such table')",
        {},
        "NAME (PLACE:3) cannot be used: reward function 'own_rewards:f': importing own_rewards fails with LookupError "
        "(no such table); ",
        "correct that module",
    ),
    (
        "from not_there import f",
        {},
        "NAME (PLACE:2) cannot be used: reward function 'own_rewards:f' cannot be imported (No module named ",
        "'not_there'); give `package.module:name`",
    ),
    (
        "def f(prompt, response, answer): ...\nraise SystemExit('I will not')",
        {},
        "NAME: a reward worker ended while starting: I will not",
        "",
    ),
]


@pytest.mark.parametrize(("source", "options", "start", "end"), OWN_REWARDS, ids=[case[0] for case in OWN_REWARDS])
def test_a_custom_reward_is_imported_by_a_worker_and_judged(
    tmp_path: Path,
    flags: list[str],
    source: str,
    options: dict[str, Any],
    start: str | None,
    end: str,
) -> None:
    file = tmp_path / "own_rewards.py"
    file.write_text(f"{OWN_HEAD}\n{source}\n")
    functions = json.dumps([{"name": "own_rewards:f", "options": options}])
    problems = list(map(str, check(load_config(None, [*flags, "--reward.functions", functions]))))
    assert "own_rewards" not in sys.modules
    if start is None:
        assert problems == []
        return
    [problem] = problems
    start = start.replace("NAME", "reward.functions.0.name=own_rewards:f")
    start = start.replace("OPTIONS", "reward.functions.0.options")
    assert problem.startswith(start.replace("PLACE", str(file))), problem
    assert problem.endswith(end.replace("PLACE", str(file))), problem


def test_the_import_of_a_custom_reward_has_a_bound(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "own_rewards.py").write_text("import time\ndef f(prompt, response, answer): ...\ntime.sleep(1000)\n")
    flags += ["--reward.functions", "[{name: 'own_rewards:f'}]", "--reward.start_timeout_s", "0.5"]
    assert list(map(str, check(load_config(None, flags)))) == [
        "reward.functions.0.name=own_rewards:f: a reward worker was not ready within reward.start_timeout_s=0.5 s: "
        "it wrote nothing"
    ]
