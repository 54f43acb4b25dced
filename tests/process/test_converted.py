"""Damaged small files of a converted checkpoint, which every command finds."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_like.checks.check import check
from slime_like.commands.main import main
from slime_like.config.reading.load import load_config
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.models.converted import converted_problem
from tests.unit.checks.checkpoint import sound_flags


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted checkpoint."""
    root = tmp_path_factory.mktemp("converted")
    make_tiny_model(root / "hf", "qwen3")
    assert main(["convert", "to-megatron", str(root / "hf"), str(root / "meg")]) == 0
    return root / "meg"


@pytest.fixture
def converted(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "meg"))


def _replace_by_a_pipe(path: Path) -> None:
    """Make a file that could be read forever."""
    path.unlink()
    os.mkfifo(path)


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_every_flipped_byte_of_the_description_is_found(converted: Path) -> None:
    assert converted_problem(converted) is None
    description = converted / "conversion.json"
    sound = description.read_bytes()
    for position in range(len(sound)):
        _flip(description, position)
        problem = converted_problem(converted)
        assert problem is not None and "(conversion.json has changed)" in problem, position
        description.write_bytes(sound)


def test_every_file_of_the_model_is_recorded(converted: Path) -> None:
    names = sorted(file.name for file in (converted / "model").iterdir())
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(names)
    for name in names:
        _flip(converted / "model" / name, -3)
    faults = ", ".join(f"model/{name} has changed" for name in names)
    assert converted_problem(converted) == f"is damaged ({faults}); restore the files, or convert the model again"


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda meg: _flip(meg / "model" / "tokenizer.json", 1000), "model/tokenizer.json has changed"),
    (lambda meg: (meg / "model" / "tokenizer.json").unlink(), "model/tokenizer.json is missing"),
    (lambda meg: (meg / "model" / "tokenizer.json").write_bytes(b""), "model/tokenizer.json is empty: it has 0 of "),
    (lambda meg: (meg / "conversion.json").unlink(), "conversion.json is missing"),
    (lambda meg: _replace_by_a_pipe(meg / "conversion.json"), "conversion.json is missing"),
]


@pytest.mark.parametrize(("damage", "fault"), DAMAGE, ids=[case[1] for case in DAMAGE])
def test_every_command_rejects_the_damaged_checkpoint(
    converted: Path, tmp_path: Path, damage: Callable[[Path], object], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sound, other = sound_flags(tmp_path), tmp_path / "tokens.jsonl"
    other.write_text("{}\n")
    commands = [
        ["convert", "check", str(converted), str(converted)],
        ["convert", "to-hf", str(converted), "out"],
        ["score", str(converted), "--input", str(other), "--output", str(tmp_path / "scores.jsonl")],
    ]
    source = shutil.copytree(converted / "model", tmp_path / "source")
    damage(converted)
    for command in commands:
        assert main(command) == 2
        assert capsys.readouterr().err.startswith(f"slime-like: CHECKPOINT={converted} is damaged ({fault}")
    given = ["--model.path", str(source), "--model.weights", str(converted), "--algorithm.loss", "sft"]
    [problem] = check(load_config(None, [*sound, *given]))
    assert problem.text.startswith(f"model.weights={converted} is damaged ({fault}")


def test_a_run_from_the_damaged_checkpoints_model_is_rejected(converted: Path, tmp_path: Path) -> None:
    given = ["--model.path", str(converted / "model"), "--model.weights", str(converted), "--algorithm.loss", "sft"]
    flags = [*sound_flags(tmp_path), *given]
    assert check(load_config(None, flags)) == []
    _flip(converted / "model" / "tokenizer.json", 1000)
    fault = "damaged (model/tokenizer.json has changed); "
    [problem] = check(load_config(None, flags))
    assert problem.text.startswith(f"model.weights={converted} is {fault}")
    alone = [*sound_flags(tmp_path), "--model.path", str(converted / "model")]
    start = f"model.path={converted / 'model'} belongs to a checkpoint that is {fault}"
    assert any(problem.text.startswith(start) for problem in check(load_config(None, alone)))
