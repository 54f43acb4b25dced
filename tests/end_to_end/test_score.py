"""`slime-like score` on real ranks gives the logprobs of Hugging Face's model in float64."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.conftest import Tiny
from tests.support.processes import succeed

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
