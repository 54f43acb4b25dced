"""Rows of token ids: reading, and every rejection of a row."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.config import TrainerConfig
from slime_like.data.token_rows import TokenRows
from slime_like.errors import DataError
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import write_checkpoint

SOUND: dict[str, Any] = {"id": "a", "prompt_tokens": [1, 2], "response_tokens": [3, 0, 7]}


def rows_of(directory: Path, *rows: Any, context: int = 1, budget: int = 16) -> TokenRows:
    write_checkpoint(directory / "model", vocab_size=8, max_position_embeddings=64)
    (directory / "rows.jsonl").write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    trainer = TrainerConfig(target_tokens_per_batch=budget, parallel={"context": context})  # type: ignore[arg-type]
    return TokenRows(directory / "rows.jsonl", directory / "model", trainer)


def test_rows_are_read(tmp_path: Path) -> None:
    """Ids may be numbers, the default temperature is 1, unknown keys are ignored, and rows can be read again."""
    rows = rows_of(tmp_path, SOUND, "", {**SOUND, "id": 5, "temperature": 0.7, "note": "x"})
    assert rows.count() == 2
    for _ in range(2):
        (name, first), (other, second) = rows
        assert (name, other) == ("a", 5)
        assert first.prompt_tokens.tolist() == [1, 2]
        assert first.response_tokens.tolist() == [3, 0, 7]
        assert (first.prompt_len, first.response_len) == (2, 3)
        assert (first.temperature, second.temperature) == (1.0, 0.7)
        assert second.sequence_id.endswith("rows.jsonl:3")
        assert torch.equal(first.loss_mask, torch.ones(3, dtype=torch.bool))


BAD: list[tuple[Any, str]] = [
    ({**SOUND, "id": None}, "bad-id"),
    ({**SOUND, "id": True}, "bad-id"),
    ({"id": 1, "response_tokens": [1]}, "bad-token-ids"),
    ({**SOUND, "prompt_tokens": []}, "empty-tokens"),
    ({**SOUND, "response_tokens": []}, "empty-tokens"),
    ({**SOUND, "response_tokens": [1.0]}, "bad-token-ids"),
    ({**SOUND, "response_tokens": [True]}, "bad-token-ids"),
    ({**SOUND, "response_tokens": "12"}, "bad-token-ids"),
    ({**SOUND, "response_tokens": [7, 8]}, "unknown-token-id"),
    ({**SOUND, "prompt_tokens": [-1]}, "unknown-token-id"),
    ({**SOUND, "temperature": 0}, "bad-temperature"),
    ({**SOUND, "temperature": "1"}, "bad-temperature"),
    ('{"id": 1, "prompt_tokens": [1], "response_tokens": [1], "temperature": 1e999}', "bad-temperature"),
    ({**SOUND, "response_tokens": [1] * 15}, "over-token-budget"),
    ({**SOUND, "response_tokens": [1] * 70}, "too-long"),
]


@pytest.mark.parametrize(("row", "code"), BAD, ids=[code for _, code in BAD])
def test_a_bad_row_is_named(tmp_path: Path, rejects: Rejects, row: Any, code: str) -> None:
    with rejects(DataError, code):
        rows_of(tmp_path, SOUND, row).count()


def test_padding_for_context_parallelism_counts(tmp_path: Path, rejects: Rejects) -> None:
    """Five tokens become sixteen on eight context ranks; seventeen become thirty-two."""
    assert rows_of(tmp_path, SOUND, context=8).count() == 1
    with rejects(DataError, "over-token-budget"):
        rows_of(tmp_path, {**SOUND, "response_tokens": [1] * 15}, context=8, budget=17).count()


def test_a_row_has_no_placeholders_of_images(tmp_path: Path, rejects: Rejects) -> None:
    """Without a tower, the same ids are ordinary tokens."""
    assert rows_of(tmp_path, SOUND).count() == 1
    config = tmp_path / "model" / "config.json"
    language = json.loads(config.read_text()) | {"model_type": "qwen3_vl_text"}
    tower = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "text_config": language}
    config.write_text(json.dumps(tower | {"image_token_id": 7}))
    with rejects(DataError, "not-text"):
        TokenRows(tmp_path / "rows.jsonl", tmp_path / "model", TrainerConfig(target_tokens_per_batch=16)).count()
