"""Wrong settings and rows, as a user gives them: one line on standard error before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from slime_like.commands.main import main
from slime_like.commands.root import run
from slime_like.errors import ConfigError
from tests.conftest import Tiny
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import sound_flags

_REFUSED = 2


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_bad_row_to_evaluate_on_is_refused_as_early_as_one_to_train_on(
    command: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(**arguments: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", start)
    file = tmp_path / "eval.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2", "answer": "3"}\n')
    assert main([command, *tiny.rl_flags(tmp_path / "run", "--evaluation.files", str(file))[1:]]) == _REFUSED
    problem = "this is not valid JSON (the key 'answer' occurs twice in one object)"
    sentence = f"{file}:1: {problem}; give one object per line [not-json]"
    assert capsys.readouterr().err == f"slime-like: {sentence}\n"


# One of each stage that rejects: a flag, a field, a combination of fields, a check.
STAGES = [
    ("--steps", "flag-value"),
    ("--rollout.top_p 5", "field-range"),
    ("--rollout.top_k 600", "fields-conflict"),
    ("--model.path nowhere", "model.path"),
]


@pytest.mark.parametrize(("flags", "code"), STAGES)
def test_a_wrong_setting_gets_one_line(
    flags: str, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *sound_flags(tmp_path), *flags.split()]) == _REFUSED
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.endswith(f" [{code}]\n")
    assert not (tmp_path / "run").exists()


def test_the_sentence_names_what_is_there_instead(
    tmp_path: Path, rejects: Rejects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's name on the hub, and a flag of another framework."""
    monkeypatch.chdir(tmp_path)
    for flags, code, remedy in (
        (["--model.path", "Qwen/Qwen2.5-0.5B"], "model.path", "`hf download Qwen/Qwen2.5-0.5B"),
        (["--rollout-batch-size", "8"], "field-unknown", "remove it"),
    ):
        with rejects(ConfigError, code) as caught:
            run(["train", *sound_flags(tmp_path), *flags])
        assert remedy in str(caught.value)
