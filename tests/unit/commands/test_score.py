"""`slime-like score` before anything starts: checkpoint, model and files. Also the lines that it writes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from slime_like.commands.command import find_weights
from slime_like.commands.root import run
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config, save_config
from slime_like.errors import ConfigError, DataError
from slime_like.score import output_line, windows
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import write_checkpoint
from tests.unit.orchestration.trainer.test_scoring import sequence

ROW = '{"id": 1, "prompt_tokens": [1], "response_tokens": [2]}\n'


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
    (tmp_path / "in.jsonl").write_text(ROW)
    return tmp_path


@pytest.mark.parametrize("name", ["step-000002", "latest"])
def test_a_runs_configuration_names_the_model_of_its_checkpoint(root: Path, name: str) -> None:
    """The user's flags come later and override these. A Hugging Face directory is the model itself."""
    assert find_weights(Path("model"), []) == (("--model.path", "model"), None)
    model, weights = find_weights(root / "run" / "checkpoints" / name, [])
    config = load_config(None, ["--run_dir", "x", *model, "--model.dtype", "bfloat16"])
    assert config.model.path == root / "model" and config.model.dtype == "bfloat16"
    assert load_config(None, ["--run_dir", "x", *model]).model.dtype == "float32"
    assert weights == root / "run" / "checkpoints" / "step-000002" / "trainer"


@pytest.mark.parametrize("flag", [["--model.path", "model"], ["--model.path=model"]])
def test_a_checkpoint_without_its_run_needs_the_model(root: Path, rejects: Rejects, flag: list[str]) -> None:
    (root / "run" / "config.yaml").unlink()
    step = root / "run" / "checkpoints" / "step-000002"
    assert find_weights(step, flag)[0] == ()
    with rejects(ConfigError, "model-unknown"):
        find_weights(step, [])


REFUSED: list[tuple[str, str]] = [
    ("nowhere", "wrong-checkpoint"),
    ("run", "wrong-checkpoint"),
    ("model --model.path model", "flag-excluded"),
    ("model --trainer.backend none_such", "trainer.backend"),
    ("run/checkpoints/step-000002 --trainer.backend fsdp", "model.weights"),
    ("model --output ./in.jsonl", "file-unusable"),
    ("model --run_dir in.jsonl", "run_dir"),
    ("dimensions", "model.weight-files"),
]


@pytest.mark.parametrize(("arguments", "code"), REFUSED, ids=[case[0] for case in REFUSED])
def test_refusals(root: Path, rejects: Rejects, arguments: str, code: str) -> None:
    checkpoint, *more = arguments.split()
    with rejects(ConfigError, code):
        run(["score", checkpoint, "--input", "in.jsonl", "--output", "out.jsonl", *more])
    assert not (root / "out.jsonl").exists()


INPUTS: list[tuple[str, str | None, str]] = [
    ("in.jsonl", "\n", "empty-input"),
    ("in.jsonl", f'{ROW}{{"id": 2, "prompt_tokens": [1], "response_tokens": [300]}}\n', "unknown-token-id"),
    ("in.txt", None, "file-type"),
    ("none.jsonl", None, "file-not-readable"),
]


@pytest.mark.parametrize(("name", "text", "code"), INPUTS)
def test_an_unusable_input_is_rejected_before_anything_starts(
    root: Path, rejects: Rejects, name: str, text: str | None, code: str
) -> None:
    if text is not None:
        (root / name).write_text(text)
    with rejects(DataError, code):
        run(["score", "model", "--input", name, "--output", "out.jsonl"])


def test_windows_are_bounded_and_lose_nothing() -> None:
    rows = [(index, sequence(index, *pair)) for index, pair in enumerate([(1, 3), (2, 2), (9, 9), (1, 1)])]
    assert [[name for name, _ in window] for window in windows(rows, 8)] == [[0, 1], [2], [3]]
    assert [[name for name, _ in window] for window in windows(rows, 100)] == [[0, 1, 2, 3]]
    assert list(windows([], 8)) == []


def test_numbers_are_short_and_exact() -> None:
    values = torch.randn(500) * torch.logspace(-20, 3, 500)
    text = output_line("a", {"old_logprobs": values, "entropy": values.abs()})
    row = json.loads(text)
    assert list(row) == ["id", "logprobs", "entropy"] and row["id"] == "a"
    assert np.array_equal(np.array(row["logprobs"], dtype=np.float32), values.numpy())
    assert np.array_equal(np.array(row["entropy"], dtype=np.float32), values.abs().numpy())
    assert max(len(repr(value)) for value in row["logprobs"]) <= 15
    assert output_line(7, {"old_logprobs": torch.tensor([-0.1]), "entropy": torch.tensor([2.0])}) == (
        '{"id": 7, "logprobs": [-0.1], "entropy": [2.0]}\n'
    )
