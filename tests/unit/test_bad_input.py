"""Every wrong configuration and data row, given to the command as a user gives it: refused, in the expected words."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slime_like.cli import main
from slime_like.config.fields import value_text
from tests.conftest import Tiny
from tests.unit.config.checkpoint import sound_flags
from tests.unit.config.test_check import FAULTS
from tests.unit.config.test_load import HEAD, REFUSED
from tests.unit.data.test_prompts import CONFIG, FAULTY

_REFUSED, _FAILED = 2, 1


@dataclass(frozen=True)
class Case:
    """What is given, and the exit code and sentence that must come back.

    In flags and sentence TMP stands for the test's directory, FILE for the configuration or the data file.
    """

    sentence: str
    code: int
    flags: list[str] = field(default_factory=list)
    yaml: str | None = None
    rows: str | None = None

    def __str__(self) -> str:
        return self.sentence[:70]


CASES = [
    *(Case(sentence, _REFUSED, flags) for flags, sentence in FAULTS),
    *(Case(sentence, _REFUSED, flags, yaml=HEAD + text) for text, flags, sentence in REFUSED),
    *(
        Case(sentence, _FAILED, [f"--data.{name}={value_text(value)}" for name, value in changes.items()], rows=content)
        for content, changes, sentence in FAULTY
    ),
    Case("--tensor is unknown; did you mean --", _REFUSED, ["--tensor", "2"]),
    Case("resume: TMP is no checkpoint (state.json is missing)", _FAILED, ["--resume", "TMP"], rows=""),
]


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_bad_row_to_evaluate_on_is_refused_as_early_as_one_to_train_on(
    command: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(**arguments: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", start)
    file = tmp_path / "eval.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2", "answer": "3"}\n')
    assert main([command, *tiny.rl_flags(tmp_path / "run", "--evaluation.files", str(file))[1:]]) == _FAILED
    printed = capsys.readouterr()
    assert printed.err == f"slime-like: {file}:1: the key 'answer' stands twice in one object; keep one\n"


def test_there_are_many_of_them() -> None:
    assert len(CASES) >= 80


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bad_input_is_refused_in_the_expected_words(
    case: Case, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before Ray, a trainer or an engine starts: nothing in here takes long enough to start one."""
    arguments: list[str] = []
    flags = [flag.replace("TMP", str(tmp_path)) for flag in case.flags]
    file = tmp_path / ("run.yaml" if case.yaml is not None else "rows.jsonl")
    if case.yaml is not None:
        file.write_text(case.yaml)
        arguments.append(str(file))
    elif case.rows is not None:
        file.write_text(case.rows)
        limits = [f"--data.max_prompt_tokens={CONFIG.max_prompt_tokens}", "--data.shuffle=false"]
        arguments += tiny.rl_flags(tmp_path / "run", "--data.train", str(file), *limits)[1:]
    else:
        arguments += sound_flags(tmp_path)
    code = main(["train", *arguments, *flags])
    printed = capsys.readouterr()
    expected = case.sentence.replace("FILE", str(file)).replace("TMP", str(tmp_path))
    assert code == case.code
    assert printed.err.startswith(f"slime-like: {expected}"), printed.err
    assert printed.out == ""
    assert code != _REFUSED or not (tmp_path / "run").exists()
