"""Commands on checkpoints with real ranks: ``score``, ``convert``, ``verify layouts`` and ``explain-gap``."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_like.commands.main import main
from slime_like.commands.root import run
from slime_like.data.dump import save_trajectories
from slime_like.errors import ConfigError
from slime_like.models.dimensions import ModelDimensions
from slime_like.verification.comparison import synthetic_batch
from tests.conftest import Tiny
from tests.support import processes
from tests.support.acceptance import some_in_acceptance
from tests.support.gap_faults import CASES, install, make_run
from tests.support.processes import succeed
from tests.support.rejections import Rejects
from tests.support.shared_cluster import train_together

BOUND = 1e-5
TIMEOUT_S = 270.0
# (prompt, response) lengths, with more tokens than one window.
LENGTHS = [(1 + 7 * index % 23, 1 + 11 * index % 31) for index in range(31)]


def write_rows(path: Path) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 264, (count,), generator=generator).tolist()

    rows: list[dict[str, Any]] = []
    for index, (prompt, response) in enumerate(LENGTHS):
        name = f"row-{index}" if index % 2 else index
        rows.append({"id": name, "prompt_tokens": tokens(prompt), "response_tokens": tokens(response)})
    for row in rows[::3]:
        row["temperature"] = 0.7
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@torch.no_grad()
def assert_scored_as_by(model_dir: Path, rows: list[dict[str, Any]], output: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager")
    scored = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in scored] == [row["id"] for row in rows]
    for row, found in zip(rows, scored, strict=True):
        tokens = torch.tensor([row["prompt_tokens"] + row["response_tokens"]])
        logits = model(input_ids=tokens).logits[0] / row.get("temperature", 1.0)
        distribution = torch.log_softmax(logits[len(row["prompt_tokens"]) - 1 : -1], dim=-1)
        logprobs = distribution.gather(1, torch.tensor(row["response_tokens"])[:, None]).squeeze(1)
        entropy = -(distribution.exp() * distribution).sum(1)
        for name, expected in (("logprobs", logprobs), ("entropy", entropy)):
            values = torch.tensor(found[name], dtype=torch.float64)
            torch.testing.assert_close(values, expected, rtol=0, atol=BOUND, msg=f"{name} of {row['id']}")


def test_a_hugging_face_model_is_scored_on_two_tensor_ranks(tiny: Tiny, tmp_path: Path) -> None:
    """It takes two windows and leaves only its output."""
    rows = write_rows(tmp_path / "in.jsonl")
    finished = succeed(
        [
            "score", str(tiny.model), "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"),
            "--model.dtype", "float32", "--trainer.parallel.tensor", "2", "--trainer.parallel.sequence", "true",
            "--trainer.target_tokens_per_batch", "64", "--logging.progress", "plain",
        ],
        tmp_path / "log",
        TIMEOUT_S,
    )  # fmt: skip
    assert_scored_as_by(tiny.model, rows, tmp_path / "out.jsonl")
    assert f"scored: {len(rows)} sequences, {sum(map(sum, LENGTHS))} tokens" in finished.stdout
    assert f"sequence {len(rows)}/{len(rows)} | tokens/s" in finished.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "log", "out.jsonl"]


def test_a_training_checkpoint_is_scored_under_another_layout(tiny: Tiny, trained: Path, tmp_path: Path) -> None:
    """The checkpoint is outside its run, and ``model.path`` has no weights. The run's export gives the same scores."""
    rows = write_rows(tmp_path / "in.jsonl")
    shutil.copytree(trained / "checkpoints" / "step-000002", tmp_path / "step")
    (tmp_path / "dimensions").mkdir()
    shutil.copy(tiny.model / "config.json", tmp_path / "dimensions")
    succeed(
        [
            "score", str(tmp_path / "step"), "--input", str(tmp_path / "in.jsonl"), "--output",
            str(tmp_path / "out.jsonl"), "--model.path", str(tmp_path / "dimensions"), "--model.dtype", "float32",
            "--trainer.parallel.pipeline", "2", "--trainer.target_tokens_per_batch", "256",
        ],
        tmp_path / "log",
        TIMEOUT_S,
    )  # fmt: skip
    assert_scored_as_by(trained / "hf", rows, tmp_path / "out.jsonl")


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


REPO = Path(__file__).parents[2]


def test_sound_layouts_are_the_same(tmp_path: Path) -> None:
    """The command creates its model."""
    finished = succeed(["verify", "layouts", "--layouts", "tp2-sp", "--steps", "1"], tmp_path / "log", TIMEOUT_S)
    rows = [line.split() for line in finished.stdout.splitlines() if "same" in line]
    assert [row[1] for row in rows] == ["single", "tp2-sp"]
    assert "tp2-sp: " not in finished.stdout  # nothing differs


def test_a_fault_of_one_layout_is_found_and_named(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gradient of 32 numbers is not summed, so logprobs and the first loss are right, but this gradient and the
    trained tensor are wrong. Without sequence parallelism, as in the baseline, the trainer is sound.

    The batch comes from saved rollouts, which lack a trainer's logprobs.
    """
    rollouts = tmp_path / "rollouts.pt"
    save_trajectories(rollouts, synthetic_batch(ModelDimensions.from_checkpoint(tiny.model), seed=3))
    installed = tmp_path / "site" / "faulty-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[slime_like.backends]\nfaulty = tests.end_to_end.faulty_backend:FaultyTrainer\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{installed.parent}:{REPO}")
    finished = processes.run(
        ["verify", "layouts", "--model", str(tiny.model), "--layouts", "tp2-sp", "--steps", "1",
         "--trainer.backend", "faulty", "--batch", str(rollouts), "--trainer.target_tokens_per_batch", "192",],
        tmp_path / "log",
        TIMEOUT_S,
    )  # fmt: skip
    assert finished.code == 1, finished.stdout + finished.stderr
    assert finished.left_behind == []
    (table_row,) = [line for line in finished.stdout.splitlines() if "DIFFERS" in line]
    assert " tp2-sp " in table_row
    sentences = [line for line in finished.stdout.splitlines() if line.startswith("tp2-sp: ")]
    (gradient,) = [line for line in sentences if "the gradient of" in line]
    assert gradient.startswith("tp2-sp: the gradient of layer 1, self_attn.q_norm.weight deviates by"), sentences
    assert "gradients differ" not in gradient  # it is the only one
    assert any(line.startswith("tp2-sp: layer 1, self_attn.q_norm.weight deviates by") for line in sentences), sentences
    assert not any("logprob" in line or "loss of" in line for line in sentences), sentences


QUICK = ("reversed tensor",)


@pytest.mark.parametrize(
    "name",
    some_in_acceptance(CASES, lambda name: name not in QUICK),
)
def test_the_cause_is_named(
    name: str, tiny: Tiny, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, run_dir = CASES[name], tmp_path / "run"
    install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{REPO}")
    make_run(case, tiny, run_dir)
    (run_dir / "checkpoints").symlink_to(trained / "checkpoints")
    finished = succeed(["explain-gap", str(run_dir), "--step", str(case.step)], tmp_path / "log")
    *table, sentence = finished.stdout.splitlines()
    share, said = sentence.split(" % of the gap is ")
    assert said == (case.name or case.cause) and float(share) > 95, finished.stdout
    row = [line for line in table if line.startswith(case.cause)][-1]
    assert (case.finding or "it does not serve the weights it received") in row
    assert sorted(path.name for path in run_dir.iterdir() if path.name.startswith("explain")) == []
