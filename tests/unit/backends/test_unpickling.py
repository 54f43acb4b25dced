"""Forged checkpoints are data: what torch's own reader executes is refused, with checksums that fit."""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from backends.common.checkpoint.integrity import Checksums, VerifyingReader
from backends.common.checkpoint.unpickling import read_index
from tests.support.forged import Program, forge_object, pieces_of, torchs_index


def _state() -> dict[str, Any]:
    return {"weight": torch.arange(6.0).view(2, 3), "half": torch.ones(4, dtype=torch.bfloat16), "random": "state"}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    directory = tmp_path / "stored"
    checkpoint.save(_state(), storage_writer=FileSystemWriter(directory), no_dist=True)
    return directory


def _load(directory: Path, ours: bool) -> dict[str, Any]:
    """By our reader, with the checksums of whatever is there, or by torch's."""
    reader = (
        VerifyingReader(directory, Checksums(directory, pieces_of(directory), {}))
        if ours
        else FileSystemReader(directory)
    )
    state = {"weight": torch.zeros(2, 3), "half": torch.zeros(4, dtype=torch.bfloat16), "random": ""}
    checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


def test_what_was_written_is_read_as_torch_reads_it(stored: Path) -> None:
    with (stored / ".metadata").open("rb") as file:
        found, expected = read_index(file), torchs_index(stored)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    for ours in (True, False):
        state = _load(stored, ours)
        assert all(torch.equal(state[name], _state()[name]) for name in ("weight", "half"))
        assert state["random"] == "state"


@pytest.mark.parametrize("name", ["random", "weight"])
def test_an_object_that_is_a_program_is_not_executed(stored: Path, tmp_path: Path, name: str) -> None:
    """The same files do execute with torch's reader, be it the object that is forged, or a tensor turned into one."""
    executed = tmp_path / "executed"
    forge_object(stored, name, Program(executed))
    with pytest.raises(CheckpointException) as caught:
        _load(stored, ours=True)
    assert "is no plain data" in str(caught.value) and not executed.exists()
    _load(stored, ours=False)
    assert executed.exists()


def test_an_index_that_is_a_program_is_not_executed(stored: Path, tmp_path: Path) -> None:
    executed = tmp_path / "executed"
    index = torchs_index(stored)
    index.planner_data = Program(executed)
    (stored / ".metadata").write_bytes(pickle.dumps(index))
    with (stored / ".metadata").open("rb") as file, pytest.raises(pickle.UnpicklingError):
        read_index(file)
    assert not executed.exists()
    FileSystemReader(stored).read_metadata()
    assert executed.exists()


@pytest.mark.parametrize(
    "forged",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.",  # a dotted name
        b"\x80\x04\x8c\x1atorch.distributed.checkpoint\x8c\x08Metadata\x93.",
        b"cbuiltins\ngetattr\n.",
        pickle.dumps({"a": 1}),
    ],
)
def test_only_torchs_index_is_one(forged: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        read_index(io.BytesIO(forged))
