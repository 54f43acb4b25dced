"""Every wrong configuration and data row, given to the command as a user gives it: refused, in the expected words."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slime_like.commands.main import main
from slime_like.config.reading.fields import value_text
from tests.conftest import Tiny
from tests.unit.checks.checkpoint import sound_flags, write_checkpoint
from tests.unit.checks.test_check import FAULTS
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
        Case("FILE:", _FAILED, [f"--data.{name}={value_text(value)}" for name, value in changes.items()], rows=content)
        for content, changes, _ in FAULTY
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
    assert (
        printed.err == f"slime-like: {file}:1: the key 'answer' stands twice in one object; keep one [repeated-key]\n"
    )


BAD_ROW = "FILE:1: the answer 'answer' is missing; give text or a number, or set data.answer_key"
FOREIGN = "MODEL/config.json: "
NO_TOKENIZER = "MODEL: holds no tokenizer (tokenizer_config.json is missing); copy the checkpoint's own there"
NO_ROWS = "FILE: no rows; give a file with rows"
# what stands in the held-out file, whether the model is foreign, flags, and all problems expected in one list
TOGETHER: list[tuple[str, bool, list[str], list[str]]] = [
    ('{"prompt": "a"}', False, ["--rollout.top_p", "0.5"], ["rollout.top_p=0.5 cuts the distribution", BAD_ROW]),
    ('{"prompt": "a"}', False, ["--rollout.top_p", "5"], ["--rollout.top_p=5 is out of range", BAD_ROW]),
    ('{"prompt": "a"}', False, ["--rollout.topp", "5"], ["--rollout.topp is unknown", BAD_ROW]),
    (
        '{"prompt": "a"}',
        True,
        ["--rollout.top_p", "5"],
        ["--rollout.top_p=5 is out of range", FOREIGN, NO_TOKENIZER, BAD_ROW],
    ),
    ("", True, ["--rollout.engine", "x"], ["rollout.engine=x is unknown", FOREIGN, NO_TOKENIZER, NO_ROWS]),
    ('{"prompt": "a", "answer": "b"}', True, ["--steps", "0"], ["--steps=0 is out of range", FOREIGN, NO_TOKENIZER]),
]


@pytest.mark.parametrize(("rows", "foreign", "flags", "sentences"), TOGETHER, ids=[" ".join(c[2]) for c in TOGETHER])
def test_bad_files_are_reported_together_with_wrong_settings(
    rows: str,
    foreign: bool,
    flags: list[str],
    sentences: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sound, file = sound_flags(tmp_path), tmp_path / "eval.jsonl"
    file.write_text(rows)
    if foreign:
        write_checkpoint(tmp_path / "model", architectures=["GPT2LMHeadModel"], model_type="gpt2")
        (tmp_path / "model" / "tokenizer_config.json").unlink()
    assert main(["train", *sound, "--evaluation.files", str(file), *flags]) == _REFUSED
    first, *problems = capsys.readouterr().err.splitlines()
    assert first == f"slime-like: {len(sentences)} problems", problems
    for sentence in sentences:
        expected = sentence.replace("FILE", str(file)).replace("MODEL", str(tmp_path / "model"))
        assert any(problem.startswith(f"  - {expected}") for problem in problems), (expected, problems)


@pytest.mark.parametrize("flags", [["--rollout.top_p", "2"], ["--rollout.engine", "x"]], ids=" ".join)
def test_further_problems_are_reported_without_a_tokenizer(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which would be imported for seconds."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["train", *sound_flags(tmp_path), *flags]) == _REFUSED
    assert capsys.readouterr().err.count("\n") == 1


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
