"""Saved rollouts: loading, and rejection of unusable files."""

import random
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from slime_like.data.dump import dump_path, load_trajectories, save_trajectories
from slime_like.errors import DataError
from slime_like.models.dimensions import ModelDimensions
from slime_like.observability.records import PhaseClock
from slime_like.orchestration.run.sources import DumpedSource
from slime_like.verification.comparison import synthetic_batch
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import write_checkpoint

RANDOM = random.Random(0).randbytes(4096)
BROKEN: dict[str, tuple[object, str]] = {
    "random bytes": (RANDOM, "damaged-dump"),
    "the beginning of a pickle": (b"\x80\x02" + RANDOM, "damaged-dump"),
    "empty": (b"", "damaged-dump"),
    "text": (b"hello", "damaged-dump"),
    "a list": ([1, 2], "damaged-dump"),
    "no version": ({}, "damaged-dump"),
    "another version": ({"version": 9}, "dump-version"),
    "other fields": ({"version": 1, "trajectories": [{"x": 1}]}, "damaged-dump"),
    "nothing in it": ({"version": 1, "trajectories": []}, "empty-dump"),
}


@pytest.mark.parametrize(("content", "code"), BROKEN.values(), ids=BROKEN)
def test_a_broken_dump_is_named(tmp_path: Path, content: object, code: str) -> None:
    path = dump_path(tmp_path, 1)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(DataError) as caught:
        load_trajectories(path)
    assert (caught.value.code, caught.value.who) == (code, str(path))


def test_saved_rollouts_are_loaded_and_a_cut_file_is_not(tmp_path: Path, rejects: Rejects) -> None:
    batch = synthetic_batch(ModelDimensions.from_checkpoint(write_checkpoint(tmp_path / "model")))
    for row in batch[:2]:
        row.rollout_id = "0-0"
    path = dump_path(tmp_path, 12)
    save_trajectories(path, batch)
    for found, saved in zip(load_trajectories(path), batch, strict=True):
        for field in fields(saved):
            value, expected = getattr(found, field.name), getattr(saved, field.name)
            same = torch.equal(value, expected) if isinstance(expected, torch.Tensor) else value == expected
            assert same, field.name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with rejects(DataError, "damaged-dump"):
        load_trajectories(path)


def test_rollouts_of_a_model_with_other_tokens_are_refused(tmp_path: Path) -> None:
    batch = synthetic_batch(ModelDimensions.from_checkpoint(write_checkpoint(tmp_path / "model")))
    save_trajectories(dump_path(tmp_path, 1), batch)
    largest = max(int(ids.max()) for each in batch for ids in (each.prompt_tokens, each.response_tokens))
    assert len(DumpedSource(tmp_path, largest + 1).next_batch(1, PhaseClock())) == len(batch)
    with pytest.raises(DataError, match=rf"step-000001\.pt: contains token id {largest}, but model.path has ids 0 to"):
        DumpedSource(tmp_path, largest).next_batch(1, PhaseClock())
