"""`slime-like score` before anything starts: which checkpoint, which model, which files; and what it writes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from slime_like.commands.main import main
from slime_like.commands.score import find_weights
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config, save_config
from slime_like.data.token_rows import TokenRow
from slime_like.errors import ConfigError
from slime_like.interfaces import ScoredLogprobs
from slime_like.score import _whole_or_nothing, output_line, windows
from tests.unit.checks.checkpoint import write_checkpoint
from tests.unit.orchestration.trainer.test_scoring import sequence


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face directory, a run with one checkpoint, and an input."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model")
    (tmp_path / "dimensions").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "dimensions")
    step = tmp_path / "run" / "checkpoints" / "step-000002"
    (step / "trainer").mkdir(parents=True)
    (step / "state.json").write_text('{"step": 2, "backend": "megatron"}')
    (step.parent / "latest").symlink_to(step.name)
    config = RunConfig(run_dir=tmp_path / "run", model={"path": tmp_path / "model", "dtype": "float32"})
    save_config(config, tmp_path / "run" / "config.yaml")
    (tmp_path / "in.jsonl").write_text('{"id": 1, "prompt_tokens": [1], "response_tokens": [2]}\n')
    return tmp_path


def test_a_hugging_face_directory_is_the_model(root: Path) -> None:
    source = find_weights(Path("model"), [])
    assert source.flags == ("--model.path", "model") and source.weights is None


@pytest.mark.parametrize("name", ["step-000002", "latest"])
def test_the_run_says_what_model_a_checkpoint_is_of(root: Path, name: str) -> None:
    """The user's flags come after these and win."""
    source = find_weights(root / "run" / "checkpoints" / name, [])
    config = load_config(None, ["--run_dir", "x", *source.flags, "--model.dtype", "bfloat16"])
    assert config.model.path == root / "model" and config.model.dtype == "bfloat16"
    assert load_config(None, ["--run_dir", "x", *source.flags]).model.dtype == "float32"
    assert source.weights == root / "run" / "checkpoints" / "step-000002" / "trainer"


@pytest.mark.parametrize("flag", [["--model.path", "model"], ["--model.path=model"]])
def test_a_checkpoint_without_its_run_needs_the_model(root: Path, flag: list[str]) -> None:
    (root / "run" / "config.yaml").unlink()
    step = root / "run" / "checkpoints" / "step-000002"
    assert find_weights(step, flag).flags == ()
    with pytest.raises(
        ConfigError, match=r"does not say its model's dimensions.*config\.yaml does not exist; give --mo"
    ):
        find_weights(step, [])


REFUSED: list[tuple[list[str], str]] = [
    ([], "CHECKPOINT is missing; it comes first"),
    (["--input", "in.jsonl", "--output", "out.jsonl"], "CHECKPOINT is missing"),
    (["nowhere"], "CHECKPOINT=nowhere is no directory"),
    (["run"], "CHECKPOINT=run is a run directory; give its hf/, or checkpoints/latest in it"),
    (["run/checkpoints"], "is neither a Hugging Face directory (no config.json) nor a training checkpoint"),
    (["model", "--model.path", "model"], "--model.path: CHECKPOINT=model is the model already"),
    (
        ["model", "--trainer.parallel.tensor", "3"],
        "trainer.parallel.tensor=3 does not divide the model's 16 attention heads",
    ),
    (["model", "--trainer.backend", "none_such"], "trainer.backend=none_such is unknown; use one of: "),
    (
        ["run/checkpoints/step-000002", "--trainer.backend", "fsdp"],
        "was written by megatron, whose files only it reads, and trainer.backend=fsdp; set trainer.backend=megatron",
    ),
    (["model", "--trainer.paralel.tensor", "2"], "--trainer.paralel.tensor is unknown"),
    (["model", "--input", "in.txt"], "--input in.txt is of an unknown type; give a .jsonl or .parquet file"),
    (["model", "--input", "none.jsonl"], "--input none.jsonl does not exist"),
    (["model", "--output", "model"], "--output model is a directory"),
    (["model", "--output", "no/out.jsonl"], "--output no/out.jsonl: its directory does not exist"),
    (["model", "--output", "./in.jsonl"], "--output in.jsonl is the input"),
    (["model", "--output", "/dev/null"], "--output /dev/null is a device or a pipe, and would be replaced; give a"),
    (["model", "--output", "/proc/out.jsonl"], "--output /proc/out.jsonl: its directory cannot be written to"),
    (["model", "--run_dir", "in.jsonl"], "in.jsonl is a file; give a directory"),
    (["dimensions"], "dimensions holds no *.safetensors file, so the model has no weights"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(case[0]) or "none" for case in REFUSED])
def test_refusals(root: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = [] if not arguments or arguments[0].startswith("--") else ["--input", "in.jsonl", "--output", "out.jsonl"]
    assert main(["score", *arguments[:1], *files, *arguments[1:]]) == 2
    out, error = capsys.readouterr()
    assert out == "" and message in error
    assert not (root / "out.jsonl").exists()


def test_a_bad_row_is_rejected_before_anything_starts(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (root / "in.jsonl").open("a") as file:
        file.write('{"id": 2, "prompt_tokens": [1], "response_tokens": [300]}\n')
    assert main(["score", "model", "--input", "in.jsonl", "--output", "out.jsonl"]) == 1
    assert capsys.readouterr().err == (
        "slime-like: in.jsonl:2: 'response_tokens' has the id 300, but the model has ids 0 to 299 [data]\n"
    )
    (root / "in.jsonl").write_text("\n")
    assert main(["score", "model", "--input", "in.jsonl", "--output", "out.jsonl"]) == 1
    assert capsys.readouterr().err == "slime-like: in.jsonl: holds no row; give at least one [empty-input]\n"


def test_windows_are_bounded_and_lose_nothing() -> None:
    rows = [TokenRow(index, sequence(index, *pair)) for index, pair in enumerate([(1, 3), (2, 2), (9, 9), (1, 1)])]
    assert [[row.id for row in window] for window in windows(rows, 8)] == [[0, 1], [2], [3]]
    assert [[row.id for row in window] for window in windows(rows, 100)] == [[0, 1, 2, 3]]
    assert list(windows([], 8)) == []


def test_numbers_are_short_and_exact() -> None:
    values = torch.randn(500) * torch.logspace(-20, 3, 500)
    text = output_line("a", ScoredLogprobs(values, values.abs()))
    row = json.loads(text)
    assert list(row) == ["id", "logprobs", "entropy"] and row["id"] == "a"
    assert np.array_equal(np.array(row["logprobs"], dtype=np.float32), values.numpy())
    assert np.array_equal(np.array(row["entropy"], dtype=np.float32), values.abs().numpy())
    assert max(len(repr(value)) for value in row["logprobs"]) <= 15
    assert output_line(7, ScoredLogprobs(torch.tensor([-0.1]), torch.tensor([2.0]))) == (
        '{"id": 7, "logprobs": [-0.1], "entropy": [2.0]}\n'
    )


def test_the_output_appears_whole_or_not_at_all_and_behind_its_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "out.jsonl", tmp_path / "out.jsonl"
    target.write_text("earlier")
    link.symlink_to(target)
    with pytest.raises(KeyboardInterrupt), _whole_or_nothing(link) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert target.read_text() == "earlier"
    with _whole_or_nothing(link) as file:
        file.write("whole")
        assert target.read_text() == "earlier"
    assert link.is_symlink() and target.read_text() == "whole"
    assert list(target.parent.iterdir()) == [target]
