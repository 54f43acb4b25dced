"""Rows and rewards from tasks of reasoning-gym."""

import json
from itertools import product
from pathlib import Path

import pytest

from slime_like.commands.main import main
from slime_like.commands.make import task_rows
from slime_like.errors import ConfigError
from slime_like.sandbox.rewards.answers import reasoning_gym as reward
from tests.process.conftest import python
from tests.support.rejections import Rejects

library = pytest.importorskip("reasoning_gym", reason="the extra tasks is not installed")


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.acceptance)])
def test_tasks_judge_their_own_answers_as_right_and_nonsense_as_wrong(every: int) -> None:
    """Rows are read from JSON. Some tasks have no answer."""
    judged = 0
    for task in ("arc_agi", "rearc"):  # they compare with tuples, which JSON lacks
        with pytest.raises(ConfigError):
            next(task_rows(task, 2, seed=5))
    lenient = {"game_of_life_halting"}  # whatever is not "true" counts as "false"
    for task in sorted(set(library.factory.DATASETS) - {"composite", "arc_agi", "rearc"})[::every]:
        for row in map(json.dumps, task_rows(task, 2, seed=5)):
            answer = json.loads(row)["answer"]
            own = json.loads(answer)["answer"]
            assert reward("", "<answer>no such thing</answer>", answer).reward < 1.0 or task in lenient, task
            if own is not None:
                judged += 1
                assert reward("", f"First <answer>x</answer>.\n<answer> {own} </answer>", answer).success, task
    assert judged > 120 / every


FIRST_CALLS = """
import sys
from slime_like.sandbox.rewards.worker import _prepare
given = {
    "math_verify": ["\\\\boxed{12}", "12"],
    "json_schema": ['{"a": 1}', '{"type": "object", "properties": {"a": {"type": "integer"}}}'],
    "reasoning_gym": ["<answer>2</answer>", '{"task": "leg_counting", "question": "", "answer": "2", "metadata": {}}'],
    "exact_match": ["yes", "yes"], "gsm8k": ["#### 4", "4"], "multiple_choice": ["(B)", "B"],
}
for name, (response, answer) in given.items():
    handle, _ = _prepare({"functions": [{"field": "f", "name": name, "options": {}}]})
    before = set(sys.modules)
    (sample,) = handle({"prompt": "", "response": response, "answer": answer})["samples"]
    print(name, [won for *_, won in sample["scores"]], sorted(set(sys.modules) - before))
"""


def test_the_first_response_is_rewarded_without_waiting_for_imports() -> None:
    """A response's time is limited, and on a busy machine an import takes longer."""
    lines = python(FIRST_CALLS).splitlines()
    assert len(lines) == 6 and all(line.endswith(" [1.0] []") for line in lines), lines


def test_the_command_writes_the_same_rows_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--count", "5", "--seed", "3"]
    for name in ("a.jsonl", "b.jsonl"):
        assert main(["make-tasks", "chain_sum", str(tmp_path / name), *arguments]) == 0
    assert "different" not in capsys.readouterr().out
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert len(rows) == 5
    arguments = ["--count", "1", "--set", "max_terms=2", "--plain"]
    assert main(["make-tasks", "chain_sum", str(tmp_path / "c.jsonl"), *arguments]) == 0
    row = json.loads((tmp_path / "c.jsonl").read_text())
    assert [message["role"] for message in row["prompt"]] == ["user"]
    assert json.loads(row["answer"])["metadata"]["num_terms"] == 2


def test_options_of_the_reward() -> None:
    answer = next(iter(task_rows("chain_sum", 1, seed=1)))["answer"]
    right = json.loads(answer)["answer"]
    assert reward("", f"<final>{right}</final>", answer, pattern="<final>(.*)</final>").success
    assert reward("", f" {right}\n", answer, pattern=None).success
    assert reward("", f"4 + 5 = {right}, not 1{right}. It is {right}.", answer, pattern=r"-?\d+").success
    assert reward("", right, answer).metadata == {"reason": "no match of the pattern"}
    for wrong in ("46", "{}", "[1]", "text"):
        with pytest.raises(ValueError, match="make-tasks"):
            reward("", "<answer>1</answer>", wrong)


@pytest.mark.parametrize(
    "arguments",
    [
        ("chain_sm", "a.jsonl"), ("chain_sum", "a.txt"), ("chain_sum", "no/such/a.jsonl"),
        ("chain_sum", "a.jsonl", "--set", "max_terms"),
        ("chain_sum", "a.jsonl", "--set", "max_terms=x"), ("chain_sum", "a.jsonl", "--set", "nonsense=1"),
        ("chain_sum", "a.jsonl", "--set", "max_terms=1"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_unusable_arguments_are_rejected(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    task, out, *options = arguments
    assert main(["make-tasks", task, str(tmp_path / out), *options]) == 2
    assert list(tmp_path.iterdir()) == []


def _questions(path: Path) -> list[str]:
    return [json.loads(json.loads(line)["answer"])["question"] for line in path.read_text().splitlines()]


def test_held_out_rows_differ_from_training_rows(
    tmp_path: Path, rejects: Rejects, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library's seeds n and n + 1 share all rows but one, and a task with 200 questions repeats them."""
    seeds = [{row["answer"] for row in task_rows("chain_sum", 50, seed)} for seed in (1, 2)]
    assert not seeds[0] & seeds[1]
    small = ["--plain", "--set", "min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1"]
    train, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    assert main(["make-tasks", "chain_sum", str(train), "--count", "100", *small]) == 0
    different = len(set(_questions(train)))
    assert 50 < different < 100 and f"\ndifferent prompts: {different} of 100\n" in capsys.readouterr().out
    rest = ["make-tasks", "chain_sum", str(held), "--exclude", str(train), *small]
    assert main([*rest, "--count", "100"]) == 0
    assert len(_questions(held)) == 100 and not set(_questions(train)) & set(_questions(held))
    text = "State the final answer to the following arithmetic problem: {} {} {} ="
    every = {text.format(*question) for question in product(range(10), "+-", range(10))}
    with rejects(ConfigError, "task-exhausted"):
        list(task_rows("chain_sum", 5, 1, settings=dict(pair.split("=") for pair in small[2:]), other=every))
    before = held.read_bytes()
    assert main([*rest, "--count", "1"]) == 2 and held.read_bytes() == before  # the old file stays
    held.unlink()
    for text in ("no JSON", '{"answer": "4"}'):
        train.write_text(text)
        assert main([*rest, "--count", "1"]) == 2
    assert main(["make-tasks", "chain_sum", str(held), "--exclude", str(tmp_path / "none.jsonl")]) == 2
