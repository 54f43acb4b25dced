"""Kept rollouts: what is read back, and what is rejected."""

import random
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from slime_like.data.dump import dump_path, load_trajectories, save_trajectories
from slime_like.errors import DataError
from slime_like.models.dimensions import ModelDimensions
from slime_like.observability.phases import PhaseClock
from slime_like.orchestration.run.sources import DumpedSource
from slime_like.verification.batch import synthetic_batch
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
def test_a_broken_dump_is_one_sentence_with_its_place(tmp_path: Path, content: object, code: str) -> None:
    path = dump_path(tmp_path, 1)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(DataError) as caught:  # with a sentence of torch's
        load_trajectories(path)
    assert (caught.value.code, caught.value.who) == (code, str(path))
    assert "\n" not in str(caught.value)


def test_what_was_saved_comes_back_and_a_cut_file_does_not(tmp_path: Path) -> None:
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
    with pytest.raises(DataError) as caught:
        load_trajectories(path)
    assert caught.value.code == "damaged-dump"


def test_a_dump_of_the_first_layout_of_the_code_is_read(tmp_path: Path) -> None:
    """The file was written before rollouts had several rows: each row is its own rollout."""
    path = Path(__file__).parent / "dumps" / "version-1.pt"
    full, bare = load_trajectories(path)
    values = {field.name: getattr(full, field.name) for field in fields(full)}
    found = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    conversation = {"turns": [[0, 1], [1, 2]], "steps": [{"k": 1}]}
    tokens = {"prompt_tokens": [5, 0, 7], "response_tokens": [3, 9], "prompt_len": 3, "response_len": 2}
    logprobs = {"logprobs": [-0.25, -1.5], "ref_logprobs": [-0.5, -1.25], "old_logprobs": [-0.125, -2.0]}
    rewards = {"rewards": [1.0, 0.5], "successes": [1.0, 0.0], "advantages": 0.75, "loss_mask": [True, False]}
    names = {"answer": "12", "group_id": 10**12, "policy_version": 4, "weight_versions": [4, 5]}
    names |= {"sequence_id": "3-0", "rollout_id": "3-0"}
    rest = {
        "token_weight": 1 / 3,
        "temperature": 0.7,
        "finish_reason": "length",
        "conversation": None,
        "support_ids": None,
        "support_sizes": None,
    }
    metadata = {"func_names": ["a", "b"], "conversation": conversation}
    assert found == tokens | logprobs | rewards | names | rest | {"reward_metadata": metadata}
    absent = (bare.logprobs, bare.ref_logprobs, bare.old_logprobs, bare.weight_versions)
    assert absent == (None, None, None, None) and (bare.group_id, bare.answer) == (8, "é")

    saved = dump_path(tmp_path, 1)
    save_trajectories(saved, [full, bare])
    before, after = (torch.load(each, weights_only=True)["trajectories"] for each in (path, saved))
    assert [row.keys() for row in after] == [
        row.keys() | {"rollout_id", "support_ids", "support_sizes"} for row in before
    ]


def test_rollouts_of_a_model_with_other_tokens_are_refused(tmp_path: Path) -> None:
    batch = synthetic_batch(ModelDimensions.from_checkpoint(write_checkpoint(tmp_path / "model")))
    save_trajectories(dump_path(tmp_path, 1), batch)
    largest = max(int(ids.max()) for each in batch for ids in (each.prompt_tokens, each.response_tokens))
    assert len(DumpedSource(tmp_path, largest + 1).next_batch(1, PhaseClock())) == len(batch)
    with pytest.raises(DataError, match=rf"step-000001\.pt: contains token id {largest}, but model.path has ids 0 to"):
        DumpedSource(tmp_path, largest).next_batch(1, PhaseClock())
