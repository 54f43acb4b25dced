"""The command line: exit codes, and what goes where."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from slime_like import __version__
from slime_like.cli import FAMILIES, main
from slime_like.config import RunConfig
from slime_like.config.fields import all_fields
from slime_like.data import tiny_model
from slime_like.errors import ConfigError, DataError, SlimeLikeError, TrainerError
from tests.unit.config.checkpoint import write_checkpoint


@pytest.fixture
def sound(tmp_path: Path) -> list[str]:
    """A command that passes every check."""
    write_checkpoint(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "run.yaml").write_text("data: {max_prompt_tokens: 512}")
    flags = ["--run_dir", "run", "--model.path", "model", "--data.train", "train.jsonl"]
    return ["train", str(tmp_path / "run.yaml"), *flags]


class Loop:
    """Stands where ``slime_like.train`` would be imported: its ``train`` keeps the configuration, then raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        self.seen: list[RunConfig] = []
        self._error = error
        module = ModuleType("slime_like.train")
        module.train = self._train  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "slime_like.train", module)

    def _train(self, config: RunConfig) -> None:
        self.seen.append(config)
        raise self._error


ENDS: list[tuple[BaseException, int, str]] = [
    (SlimeLikeError("it broke; mend it"), 1, "slime-like: it broke; mend it\n"),
    (TrainerError("rank 3, step: NaN loss"), 1, "slime-like: rank 3, step: NaN loss\n"),
    (DataError("a.jsonl:3: no prompt"), 1, "slime-like: a.jsonl:3: no prompt\n"),
    (ConfigError(["a=1 is wrong"]), 2, "slime-like: a=1 is wrong\n"),
    (ConfigError(["a=1", "b=2"]), 2, "slime-like: 2 problems\n  - a=1\n  - b=2\n"),
    (KeyboardInterrupt(), 130, "slime-like: interrupted\n"),
]


@pytest.mark.parametrize(("error", "code", "text"), ENDS, ids=[type(case[0]).__name__ + str(case[1]) for case in ENDS])
def test_an_error_is_a_sentence_and_an_exit_code(
    tmp_path: Path,
    sound: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    loop = Loop(monkeypatch, error)
    assert main(sound) == code
    assert capsys.readouterr() == ("", text)
    assert loop.seen[0].run_dir == tmp_path / "run"
    assert loop.seen[0].data.max_prompt_tokens == 512


def test_a_bug_keeps_its_traceback(tmp_path: Path, sound: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Loop(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        main(sound)


def test_nothing_starts_on_a_refused_configuration(
    tmp_path: Path, sound: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    loop = Loop(monkeypatch, AssertionError("started"))
    assert main([*sound, "--model.path", "nowhere", "--rollout.top_p", "0.5"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("slime-like: 2 problems\n  - model.path=")
    assert main(["train"]) == 2
    assert main(["train", "--steps", "1"]) == 2
    assert main(["train", "absent.yaml"]) == 2
    assert loop.seen == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("argv", [["train", "--help"], ["train", "x.yaml", "-h"]])
def test_help_of_train_explains_every_field(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in all_fields().items():
        assert f"--{name} (" in text
        assert " ".join(field.description.split()) in text


def test_version_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"slime-like {__version__}\n"
    for argv in ([], ["polish"], ["make-tiny-model"], ["make-tiny-model", "x", "--famly", "qwen3"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2


def test_make_tiny_model_writes_model_and_data_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tiny"
    command = ["make-tiny-model", str(out), "--family", "qwen2", "--seed", "3"]
    assert main(command) == 0
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    for name in ("model.safetensors", "tokenizer.json", "data/train.jsonl", "data/sft.jsonl", "data/eval.jsonl"):
        assert (out / name).is_file()
    before = (out / "data/train.jsonl").read_bytes()
    capsys.readouterr()
    assert main(command) == 2
    assert capsys.readouterr().err == (
        f"slime-like: OUT={out} is not empty; give another directory, or --force to write into it\n"
    )
    assert main([*command[:-1], "4", "--force"]) == 0
    assert (out / "data/train.jsonl").read_bytes() != before
    assert main(["make-tiny-model", str(out / "config.json")]) == 2


def test_families_are_those_of_the_tiny_model() -> None:
    assert set(FAMILIES) == set(tiny_model._FAMILIES)
