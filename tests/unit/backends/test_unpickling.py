"""Checkpoints of trainers: forged, damaged and foreign files, and disks that refuse."""

import io
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from backends.common.checkpoint.integrity import ByteRange, Checksums
from backends.common.checkpoint.stored import read_index
from backends.common.checkpoint.writing import Box, Part, translate_disk_errors, write_data_file, write_index
from backends.fsdp.checkpoint import COMMON, FsdpConverter, open_stored
from backends.megatron.checkpoint import PLAIN_FILES
from slime_like.config import RunConfig
from slime_like.errors import CheckpointError
from slime_like.interfaces.conversion import ConversionOptions, TensorInfo
from tests.support.forged import Program, forge_object, pieces_of, torchs_index
from tests.support.rejections import Rejects


def _state() -> dict[str, Any]:
    return {"weight": torch.arange(6.0).view(2, 3), "half": torch.ones(4, dtype=torch.bfloat16), "random": ["state"]}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    directory = tmp_path / "stored"
    checkpoint.save(_state(), storage_writer=FileSystemWriter(directory), no_dist=True)
    (directory / "common.json").write_text('{"format": 1}')
    return _signed(directory)


def _signed(directory: Path, pieces: dict[str, list[ByteRange]] | None = None) -> Path:
    """Write the checksums of what is there."""
    plain = [".metadata", "common.json"]
    Checksums.of_directory(directory, pieces_of(directory) if pieces is None else pieces, plain).write()
    return directory


def _load(directory: Path, ours: bool) -> dict[str, Any]:
    """Load with our reader, or with torch's."""
    state = {"weight": torch.zeros(2, 3), "half": torch.zeros(4, dtype=torch.bfloat16), "random": []}
    if not ours:
        checkpoint.load(state, storage_reader=FileSystemReader(directory), no_dist=True)
        return state
    tensors = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
    found = open_stored(directory)
    found.read(Part(name, each, tuple(each.shape), (0,) * each.ndim) for name, each in tensors.items())
    return tensors | {"random": found.read_object("random")}


def test_a_checkpoint_is_read_like_by_torch(stored: Path) -> None:
    with (stored / ".metadata").open("rb") as file:
        found, expected = read_index(file), torchs_index(stored)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    for ours in (True, False):
        state = _load(stored, ours)
        assert all(torch.equal(state[name], _state()[name]) for name in ("weight", "half"))
    assert state["random"] == ["state"]


@pytest.mark.parametrize("name", ["random", "weight"])
def test_an_object_that_is_a_program_is_not_executed(stored: Path, tmp_path: Path, name: str, rejects: Rejects) -> None:
    """torch's reader does execute the same files, whether an object or a tensor was replaced."""
    executed = tmp_path / "executed"
    forge_object(stored, name, Program(executed))
    with rejects(CheckpointError, "checkpoint-damaged"):
        open_stored(_signed(stored)).read_object(name)
    assert not executed.exists()
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
def test_only_torchs_index_is_accepted(forged: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        read_index(io.BytesIO(forged))


def _place(field: str, value: Any) -> Callable[[Metadata], None]:
    return lambda index: setattr(next(iter(index.storage_data.values())), field, value)


def _entry(field: str, value: Any) -> Callable[[Metadata], None]:
    return lambda index: setattr(index.state_dict_metadata["weight"], field, value)


def _enlarge(entry: Any) -> None:
    """Claim a petabyte."""
    entry.size = entry.chunks[0].sizes = torch.Size([2**24, 2**24])


PARTS: list[Callable[[Metadata], None]] = [
    *(_place("offset", value) for value in (-1, "0", None)),
    *(_place("length", value) for value in (-1, None)),
    *(_place("relative_path", value) for value in ("../state.json", "/etc/passwd", "", "a\0b", "x" * 5000, 3, None)),
    *(_entry("chunks", value) for value in ([3], None)),
    *(_entry("size", value) for value in (torch.Size([1, 1]), torch.Size([6]), (2, 3))),
    lambda index: index.state_dict_metadata.pop("weight").chunks.clear() or index.state_dict_metadata.update(weight=3),
    lambda index: _enlarge(index.state_dict_metadata["weight"]),
    lambda index: index.storage_data.clear(),
    lambda index: index.storage_data.update(weight=3),
    lambda index: setattr(index, "storage_data", None),
]


@pytest.mark.parametrize("forge", PARTS, ids=range(len(PARTS)))
def test_the_parts_of_an_index_must_fit(stored: Path, forge: Callable[[Metadata], None]) -> None:
    index = torchs_index(stored)
    read_index(io.BytesIO(pickle.dumps(index)))
    forge(index)
    with pytest.raises(pickle.UnpicklingError):
        read_index(io.BytesIO(pickle.dumps(index)))


@pytest.mark.parametrize("what", ["unlisted", "pipe"])
def test_data_files_must_be_files_that_the_checksums_list(stored: Path, what: str, rejects: Rejects) -> None:
    """Reading a pipe would never end."""
    if what == "pipe":
        (stored / "__0_0.distcp").unlink()
        os.mkfifo(stored / "__0_0.distcp")
    else:
        _signed(stored, {})
    with rejects(CheckpointError, "checkpoint-damaged"):
        open_stored(stored)


def test_every_element_of_a_tensor_must_be_stored(stored: Path, rejects: Rejects) -> None:
    """torch's reader would leave the last row uninitialized."""
    index = torchs_index(stored)
    index.state_dict_metadata["weight"].size = torch.Size([3, 3])
    (stored / ".metadata").write_bytes(pickle.dumps(index))
    with rejects(CheckpointError, "checkpoint-damaged") as caught:
        open_stored(_signed(stored))
    assert "6 of 9 elements" in str(caught.value)


@pytest.mark.parametrize("lost", [True, False])
def test_every_element_must_be_written_once(lost: bool, tmp_path: Path, rejects: Rejects) -> None:
    box, pieces = Box("weight", "float32", (2, 3), (0, 0), (1, 3)), [ByteRange("weight", 0, 12, 0)]
    with rejects(CheckpointError, "tensors-not-written"):
        write_index(tmp_path, [("a", [box], pieces), ("b", [] if lost else [box], [] if lost else pieces)], {})


def test_values_and_weights_must_have_their_types(stored: Path, rejects: Rejects, tmp_path: Path) -> None:
    (stored / "common.json").write_text("3")
    with rejects(CheckpointError, "checkpoint-damaged"):
        open_stored(_signed(stored))

    class Forged(FsdpConverter):
        def _open(self, checkpoint: Path) -> Any:
            return SimpleNamespace(tensors={"a": TensorInfo("bool", (1,))}, groups=[["a"]])

    config = RunConfig.model_validate({"run_dir": tmp_path, "steps": 1, "model": {"path": tmp_path}})
    options = ConversionOptions("auto", 10**6, 1, allow_nan=False)
    with rejects(CheckpointError, "checkpoint-damaged"):
        Forged(config.model, config.trainer).to_hugging_face(tmp_path, tmp_path / "out", options, lambda *_: None)


@pytest.mark.parametrize(("written", "read"), [(PLAIN_FILES, (COMMON,)), ((COMMON,), PLAIN_FILES)])
def test_a_checkpoint_of_another_backend_is_not_called_damaged(
    written: tuple[str, ...], read: tuple[str, ...], tmp_path: Path, rejects: Rejects
) -> None:
    for name in written:
        (tmp_path / name).write_text(name)
    Checksums.of_directory(tmp_path, {}, written).write()
    checksums = Checksums.read(tmp_path)
    checksums.verify_plain_files(written)
    with rejects(CheckpointError, "checkpoint-of-another-backend"):
        checksums.verify_plain_files(read)
    (tmp_path / written[-1]).unlink()
    with rejects(CheckpointError, "checkpoint-not-whole"):
        checksums.verify_plain_files(written)


def _verify(trainer: Path) -> None:
    checksums = Checksums.read(trainer)
    checksums.verify_plain_files(["plain"])
    checksums.verify_lengths()


LENGTHS = [
    *(("data", length) for length in (0, 30, 89, 91, None)),
    *(("plain", length) for length in (0, 4, 6)),
    *(("checksums.json", length) for length in (0, 9, None)),
]


@pytest.mark.parametrize("beside", ["state.json", "conversion.json"])
@pytest.mark.parametrize(("name", "length"), LENGTHS)
def test_a_file_of_another_length_is_rejected(
    name: str, length: int | None, beside: str, tmp_path: Path, rejects: Rejects
) -> None:
    trainer = tmp_path / "checkpoint" / "trainer"
    trainer.mkdir(parents=True)
    (trainer.parent / beside).write_text("{}")
    (trainer / "data").write_bytes(bytes(90))
    (trainer / "plain").write_bytes(b"plain")
    pieces = [ByteRange(piece, offset, 30, 0) for piece, offset in (("a", 0), ("b from [0, 0] on", 30), ("c", 60))]
    Checksums.of_directory(trainer, {"data": pieces}, ["plain"]).write()
    _verify(trainer)
    if length is None:
        (trainer / name).unlink()
    else:
        (trainer / name).write_bytes((trainer / name).read_bytes()[:length].ljust(length, b"x"))
    with rejects(CheckpointError, f"checkpoint-{'not-whole' if (name, length) == LENGTHS[-1] else 'damaged'}"):
        _verify(trainer)


FULL = Path("/dev/full")
"""Device on which every write fails like on a full disk (Linux)."""

ENTRIES = [
    ([Part("weight", torch.zeros(100_000), (100_000,), (0,))], {}),
    ([], {"state": bytes(100_000)}),
]


@pytest.mark.parametrize(("parts", "objects"), ENTRIES, ids=["tensor", "object"])
def test_a_full_disk_is_reported_with_the_systems_message(
    parts: list[Part], objects: dict[str, bytes], rejects: Rejects
) -> None:
    usage = os.statvfs(FULL)
    with rejects(CheckpointError, "write-refused") as caught, translate_disk_errors(FULL):
        write_data_file(FULL, parts, objects)
    ((free, size),) = re.findall(r"No space left on device; (\d+) of (\d+) bytes are free", str(caught.value))
    assert int(size) == usage.f_blocks * usage.f_frsize
    assert 0 <= int(free) <= int(size)


def test_only_the_disks_errors_are_reported_as_such(tmp_path: Path) -> None:
    unwritable = Part("weight", torch.empty(3, device="meta"), (3,), (0,))
    with pytest.raises(NotImplementedError), translate_disk_errors(tmp_path):
        write_data_file(tmp_path / "file", [unwritable], {})
