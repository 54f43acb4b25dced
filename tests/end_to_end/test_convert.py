"""`slime-like convert` before and after a run: weights to start from, and the export of a checkpoint."""

import shutil
from pathlib import Path

import pytest

from slime_like.commands.main import main
from tests.conftest import Tiny
from tests.support.processes import run


def test_from_hugging_face_through_a_run_and_back(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has only the converted weights. Its export is compared bit for bit."""
    converted, run_dir, back = tmp_path / "converted", tmp_path / "run", tmp_path / "back"
    assert main(["convert", "to-megatron", str(tiny.model), str(converted), "--trainer.parallel.tensor", "2"]) == 0
    assert main(["convert", "check", str(converted), str(tiny.model)]) == 0
    shutil.copytree(tiny.model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    flags = ["--model.path", str(tmp_path / "model"), "--model.weights", str(converted), "--steps", "1"]
    finished = run(tiny.sft_flags(run_dir, *flags, "--trainer.parallel.pipeline", "2"), tmp_path / "log")
    assert finished.code == 0, finished.stderr
    assert main(["convert", "to-hf", str(run_dir / "checkpoints" / "latest"), str(back)]) == 0
    assert main(["convert", "check", str(back), str(run_dir / "hf")]) == 0
    assert capsys.readouterr().out.count("bit for bit") == 2
    assert main(["convert", "check", str(back), str(converted)]) == 1  # it has been trained
    assert "values:" in capsys.readouterr().out
    files = {file.name for file in back.iterdir()}
    assert files == {file.name for file in tiny.model.iterdir()} and "tokenizer.json" in files
