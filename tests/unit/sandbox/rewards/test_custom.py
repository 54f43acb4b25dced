"""Custom reward functions in a worker: usable ones, rejection at the start or at a call, and what they return."""

import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_like.config.rollout import RewardConfig, RewardFunction
from slime_like.errors import ConfigError, RewardError
from slime_like.interfaces.user_code import RewardResult, as_result
from slime_like.sandbox.rewards import math_answer
from slime_like.sandbox.rewards.pool import FailureCounter
from slime_like.sandbox.rewards.worker import _prepare
from slime_like.sandbox.serving import Handler, ItemFailed
from tests.support.rejections import Rejects

HEAD = (
    "from functools import partial; from slime_like.interfaces.user_code import RewardResult, group_reward; "
    "g = lambda *given: 1.0; filled = lambda f: g"
)
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
    ("@group_reward\ndef f(prompt, responses, answer): return [(1, True) for _ in responses]", {}),
]
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
]
FAILING = [
    "def f(prompt, response, answer): ...",
    "def f(prompt, response, answer): return float('nan')",
    "def f(prompt, response, answer): return prompt.no_such_method()",
    "def f(prompt, response, answer): return RewardResult('1.0', True)",
    "def f(prompt, response, answer): return RewardResult(1.0, None)",
    "def f(prompt, response, answer): return RewardResult(1.0, True, ['x'])",
    "def f(prompt, response, answer): return RewardResult(1.0, True, {'x': object()})",
    "@group_reward\ndef f(prompt, responses, answer): return 1.0",
    "@group_reward\ndef f(prompt, responses, answer): return [1.0]",
    "@group_reward\ndef f(prompt, responses, answer): return [None for _ in responses]",
]


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))

    def prepared(source: str, options: dict[str, Any]) -> Handler:
        (tmp_path / "own_rewards.py").write_text(f"{HEAD}\n{source}\n")
        monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
        handle, _ = _prepare({"functions": [{"field": "reward", "name": "own_rewards:f", "options": options}]})
        return handle

    return prepared


def item(source: str) -> dict[str, Any]:
    group = {"responses": ["r", "r"]} if "group_reward" in source else {"response": "r"}
    return {"prompt": "p", "answer": "r", **group}


@pytest.mark.parametrize(("source", "options"), USABLE, ids=[source for source, _ in USABLE])
def test_a_usable_reward_gives_rewards(prepare: Any, source: str, options: dict[str, Any]) -> None:
    samples = prepare(source, options)(item(source))["samples"]
    assert {sample["scores"][0][2] for sample in samples} == {1.0} and len(samples) == 1 + ("group_" in source)


@pytest.mark.parametrize("row", ["row", "*, row", "*, row=None"])
def test_a_function_that_asks_for_the_row_gets_it(prepare: Any, row: str) -> None:
    given = {"level": 3, "extra": {"x": [1, None]}}
    for source, options, expected in (
        (f"def f(prompt, response, answer, {row}): return row['level'] + len(row['extra'])", {}, 4.0),
        (f"@group_reward\ndef f(prompt, responses, answer, {row}): return [row['level']] * 2", {}, 3.0),
        (f"def f(prompt, response, answer, {row}): return row", {"row": 7}, 7.0),
    ):
        samples = prepare(source, options)(item(source) | {"row": json.dumps(given)})["samples"]
        assert {sample["scores"][0][1] for sample in samples} == {expected}


@pytest.mark.parametrize(("source", "options"), UNUSABLE, ids=[source for source, _ in UNUSABLE])
def test_an_unusable_reward_is_rejected_at_the_start(
    prepare: Any, rejects: Rejects, tmp_path: Path, source: str, options: dict[str, Any]
) -> None:
    with rejects(ConfigError, "config") as caught:
        prepare(source, options)
    assert str(caught.value).startswith(f"reward.name=own_rewards:f ({tmp_path}/own_rewards.py")


@pytest.mark.parametrize("source", FAILING)
def test_a_wrong_result_names_the_function(prepare: Any, tmp_path: Path, source: str) -> None:
    with pytest.raises(ItemFailed) as caught:
        prepare(source, {})(item(source))
    answer = caught.value.answer
    assert (answer["reason"], answer["function"]) == ("error", "own_rewards:f")
    assert f"({tmp_path}/own_rewards.py:" in answer["detail"]
    assert "fault" not in answer


@pytest.mark.parametrize(("answer", "fault"), [("46", "response"), ("(" * 30, None)])
def test_an_included_function_fails_because_of_the_response_or_of_the_row(
    monkeypatch: pytest.MonkeyPatch, answer: str, fault: str | None
) -> None:
    """It fails on an easy response, too, if the row is to blame."""
    checked = math_answer._why_wrong

    def hostile(response: str, *given: Any) -> str | None:
        if response == "hostile":
            raise RecursionError
        return checked(response, *given)

    monkeypatch.setattr(math_answer, "_why_wrong", hostile)
    handle, _ = _prepare({"functions": [{"field": "reward.functions.0", "name": "math_verify", "options": {}}]})
    with pytest.raises(ItemFailed) as caught:
        handle({"prompt": "", "response": "hostile", "answer": answer, "row": None})
    assert (caught.value.answer["reason"], caught.value.answer.get("fault")) == ("error", fault)


HUNG = {"reason": "timeout"}


def counter(function: str, workers: int) -> FailureCounter:
    functions = (RewardFunction(name=function, options={"pattern": "a"} if function == "format" else {}),)
    return FailureCounter(RewardConfig(functions=functions, timeout_s=5.0, workers=workers), responses=512)


@pytest.mark.parametrize(("name", "bounds"), [("format", [5.0] * 16 + [0.5] * 184), ("majority", [5.0] * 200)])
def test_a_step_of_hostile_answers(name: str, bounds: list[float]) -> None:
    """Two workers: 16 whole timeouts, 184 short ones if functions are quick, then nothing, until the next step."""
    failures, found, hung = counter(name, workers=2), [], list[str | None]([None])
    for _ in range(512):
        found.append(failures.timeout_s)
        answer = failures.record(hung, "", HUNG if found[-1] else failures.refusal)
        assert answer["reason"] == ("timeout" if found[-1] else "budget")
    assert found == bounds + [0.0] * 312
    assert failures.timeout_s == 5.0


@pytest.mark.parametrize(("other", "fault"), [("format", {"fault": "response"}), ("judge", {})])
def test_responses_that_are_not_scored_are_what_the_ones_before_were(other: str, fault: dict[str, str]) -> None:
    failures, hung = counter("format", workers=1), list[str | None]([None])
    for number in range(100):
        late = number == 50 and other == "judge"
        about = {"function": "judge"} if late else {"function": "math_verify", "fault": "response"}
        failures.record(hung, "", HUNG | about)
    assert {name: text for name, text in failures.refusal.items() if name == "fault"} == fault


def test_responses_that_hang_end_the_run_unless_a_prompt_or_they_themselves_are_at_fault(rejects: Rejects) -> None:
    def hang(failures: FailureCounter, prompts: str, **about: str) -> None:
        hung = list[str | None]()
        for prompt in prompts:
            failures.record(hung, prompt, HUNG | about)

    for prompts in ("abcdefgh", "a" * 8):
        with rejects(RewardError, "reward-function-fails"):
            hang(counter("judge", workers=1), prompts)
    failures = counter("judge", workers=1)
    failures.record([], "a", {"samples": []})
    hang(failures, "a" * 8)  # other prompts had answers
    for _ in range(4):
        hang(failures, "abcdefgh")  # outages, which may pass
    with rejects(RewardError, "reward-function-fails"):
        hang(failures, "abcdefgh")
    hang(counter("format", workers=1), "abcdefgh", fault="response")


@pytest.mark.parametrize(
    ("returned", "result"),
    [
        (RewardResult(0.5, False), RewardResult(0.5, False)),
        (1.0, RewardResult(1.0, True)),
        (0, RewardResult(0.0, False)),
        (-0.5, RewardResult(-0.5, False)),
        (True, RewardResult(1.0, True)),
        (np.float32(0.25), RewardResult(0.25, True)),
        (torch.tensor(2.0), RewardResult(2.0, True)),
        ((0.5, False), RewardResult(0.5, False)),
        ({"score": 0.5}, RewardResult(0.5, True)),
        ({"reward": -1, "success": True}, RewardResult(-1.0, True)),
        (OrderedDict(reward=0.0, score=3, why="late"), RewardResult(0.0, False, {"score": 3, "why": "late"})),
    ],
    ids=str,
)
def test_a_result_in_any_form(returned: Any, result: RewardResult) -> None:
    found = as_result(returned)
    assert RewardResult(float(found.reward), bool(found.success), found.metadata) == result


@pytest.mark.parametrize(
    "returned",
    [
        None, "1.0", b"1", [], [1.0], [0.0, 1.0], (1, 2, 3), {}, {"points": 1}, ("1", True), (1.0, None),
        {"score": "1"}, {1}, [[1], 2],
    ],
    ids=str,
)  # fmt: skip
def test_any_other_value_is_rejected(returned: Any) -> None:
    with pytest.raises(TypeError):
        as_result(returned)
