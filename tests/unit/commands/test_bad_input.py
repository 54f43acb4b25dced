"""Wrong settings and rows give one line on standard error before anything starts."""

import re
from pathlib import Path
from typing import Any

import pytest

from slime_like.commands.main import main
from tests.conftest import Tiny
from tests.unit.checks.checkpoint import sound_flags

_REFUSED = 2


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_bad_held_out_row_is_rejected_before_ray_starts(
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


# One case for each stage that rejects: a flag, a field, a combination of fields, a check.
STAGES = [
    ("--steps", "flag-value"),
    ("--rollout.top_p 5", "field-range"),
    ("--rollout.top_k 600", "fields-conflict"),
    ("--model.path nowhere", "model.path"),
]


def test_conflicts_and_checks_are_in_one_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--rollout.top_k 600 --critic.lam 1 --model.path nowhere"
    assert main(["train", *sound_flags(tmp_path), *flags.split()]) == _REFUSED
    printed = re.findall(r"  - ([\w.]+)[= ].*\[([\w.-]+)\]$", capsys.readouterr().err, re.MULTILINE)
    conflicts = [("rollout.top_p", "fields-conflict"), ("critic.lam", "fields-conflict")]
    assert printed == [*conflicts, ("model.path", "model.path")]


@pytest.mark.parametrize(("flags", "code"), STAGES)
def test_a_wrong_setting_gets_one_line(
    flags: str, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *sound_flags(tmp_path), *flags.split()]) == _REFUSED
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.endswith(f" [{code}]\n")
    assert not (tmp_path / "run").exists()
