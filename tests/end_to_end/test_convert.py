"""`slime-like convert` before and after a run. A converted checkpoint equals the run's export."""

import shutil
from pathlib import Path

import pytest

from slime_like.commands.main import main
from slime_like.commands.root import run
from slime_like.errors import ConfigError
from tests.conftest import Tiny
from tests.end_to_end.test_score import assert_scored_as_by, write_rows
from tests.support.processes import succeed
from tests.support.rejections import Rejects
from tests.support.shared_cluster import train_together


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of two runs: ``run`` has only converted weights, and ``factors`` trains factors."""
    root = tmp_path_factory.mktemp("runs")
    converted = ["--model.path", str(root / "model"), "--model.weights", str(root / "converted"), "--steps", "1"]
    assert main(["convert", "to-megatron", str(tiny.model), converted[3], "--trainer.parallel.tensor", "2"]) == 0
    shutil.copytree(tiny.model, root / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    factors = ["--model.lora.rank", "4", "--steps", "2", "--trainer.optimizer.lr", "0.01"]
    train_together(
        [
            tiny.sft_flags(root / "run", *converted, "--trainer.parallel.pipeline", "2"),
            tiny.sft_flags(root / "factors", *factors, "--trainer.parallel.tensor", "2"),
        ],
        root,
    )
    return root


def test_from_hugging_face_through_a_run_and_back(
    tiny: Tiny, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export is compared bit for bit."""
    converted, run_dir, back = runs / "converted", runs / "run", tmp_path / "back"
    assert main(["convert", "check", str(converted), str(tiny.model)]) == 0
    assert main(["convert", "to-hf", str(run_dir / "checkpoints" / "latest"), str(back)]) == 0
    assert main(["convert", "check", str(back), str(run_dir / "hf")]) == 0
    assert capsys.readouterr().out.count("bit for bit") == 2
    assert main(["convert", "check", str(back), str(converted)]) == 1  # it has been trained
    assert "values:" in capsys.readouterr().out
    files = {file.name for file in back.iterdir()}
    assert files == {file.name for file in tiny.model.iterdir()} and "tokenizer.json" in files


def test_factors_through_a_run_and_back(
    tiny: Tiny, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rejects: Rejects
) -> None:
    """The converted adapter is the exported one, and the merged model's logprobs are the checkpoint's scores."""
    run_dir, adapter, merged = runs / "factors", tmp_path / "adapter", tmp_path / "merged"
    checkpoint = str(run_dir / "checkpoints" / "latest")
    with rejects(ConfigError, "wrong-checkpoint"):
        run(["convert", "to-hf", checkpoint, str(adapter), "--model.lora.alpha", "7"])
    assert main(["convert", "to-hf", checkpoint, str(adapter)]) == 0
    assert main(["convert", "check", str(adapter), str(run_dir / "hf")]) == 0
    assert main(["convert", "check", str(adapter), checkpoint]) == 0
    assert capsys.readouterr().out.count("bit for bit") == 2
    assert (adapter / "adapter_config.json").read_text() == (run_dir / "hf" / "adapter_config.json").read_text()
    assert main(["convert", "to-hf", checkpoint, str(merged), "--merge"]) == 0
    assert main(["convert", "check", str(merged), str(tiny.model)]) == 1
    rows = write_rows(tmp_path / "in.jsonl")
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    succeed(["score", checkpoint, *files, "--trainer.parallel.pipeline", "2"], tmp_path / "score", 270.0)
    assert_scored_as_by(merged, rows, tmp_path / "out.jsonl")
