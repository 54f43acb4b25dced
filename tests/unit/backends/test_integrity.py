"""Identify a checkpoint and its damaged files without reading tensors."""

from pathlib import Path

import pytest

from backends.common.checkpoint.integrity import Checksums, Piece
from backends.fsdp.checkpoint_writer import PLAIN_FILES as FSDP_FILES
from backends.megatron.checkpoint_writer import PLAIN_FILES as MEGATRON_FILES
from slime_like.errors import CheckpointError

OLDER = "resume from a checkpoint before checkpoint"
AGAIN = "convert the model again"


@pytest.mark.parametrize(("written", "read"), [(MEGATRON_FILES, FSDP_FILES), (FSDP_FILES, MEGATRON_FILES)])
def test_a_checkpoint_of_the_other_backend_is_no_damaged_one(
    written: tuple[str, ...], read: tuple[str, ...], tmp_path: Path
) -> None:
    for name in written:
        (tmp_path / name).write_text(name)
    Checksums.of_directory(tmp_path, {}, written).write()
    checksums = Checksums.read(tmp_path)
    checksums.verify_plain_files(written)
    with pytest.raises(CheckpointError, match=r"was written by another trainer\.backend, .* use the one that wrote it"):
        checksums.verify_plain_files(read)
    (tmp_path / written[-1]).unlink()
    with pytest.raises(CheckpointError, match=rf"not a whole training checkpoint \({written[-1]} is missing\)"):
        checksums.verify_plain_files(written)


def _stored(checkpoint: Path, beside: str) -> Path:
    """Weights of three tensors in a data file of 90 bytes and a plain file of 5, and what tells whose they are."""
    trainer = checkpoint / "trainer"
    trainer.mkdir(parents=True)
    (checkpoint / beside).write_text("{}")
    (trainer / "data").write_bytes(bytes(90))
    (trainer / "plain").write_bytes(b"plain")
    pieces = [Piece(name, offset, 30, 0) for name, offset in (("a", 0), ("b from [0, 0] on", 30), ("c", 60))]
    Checksums.of_directory(trainer, {"data": pieces}, ["plain"]).write()
    return trainer


def _verify(trainer: Path) -> None:
    checksums = Checksums.read(trainer)
    checksums.verify_plain_files(["plain"])
    checksums.verify_lengths()


LENGTHS = [
    ("data", 0, "data is empty: it has 0 of the 90 bytes that were written, and lacks a, b, ... (3 in all)"),
    ("data", 30, "data is cut off: it has 30 of the 90 bytes that were written, and lacks b, c"),
    ("data", 89, "data is cut off: it has 89 of the 90 bytes that were written, and lacks c"),
    ("data", 91, "data has 91 bytes, though 90 were written"),
    ("data", None, "files that its index lists are missing: data"),
    ("plain", 0, "plain is empty: it has 0 of the 5 bytes that were written"),
    ("plain", 4, "plain is cut off: it has 4 of the 5 bytes that were written"),
    ("plain", 6, "plain has 6 bytes, though 5 were written"),
    ("checksums.json", 0, "checksums.json is empty"),
    ("checksums.json", 9, "checksums.json cannot be read: JSONDecodeError"),
]


@pytest.mark.parametrize(("beside", "remedy"), [("state.json", OLDER), ("conversion.json", AGAIN)])
@pytest.mark.parametrize(("name", "length", "reason"), LENGTHS, ids=[f"{name} {length}" for name, length, _ in LENGTHS])
def test_a_file_of_another_length_names_what_it_lacks_and_the_remedy(
    name: str, length: int | None, reason: str, beside: str, remedy: str, tmp_path: Path
) -> None:
    trainer = _stored(tmp_path / "checkpoint", beside)
    _verify(trainer)
    if length is None:
        (trainer / name).unlink()
    else:
        (trainer / name).write_bytes((trainer / name).read_bytes()[:length].ljust(length, b"x"))
    with pytest.raises(CheckpointError) as caught:
        _verify(trainer)
    assert str(caught.value) == f"{trainer}: is damaged ({reason}); {remedy}"


@pytest.mark.parametrize(("beside", "remedy"), [("state.json", "use another one"), ("conversion.json", AGAIN)])
def test_missing_checksums_name_the_remedy(beside: str, remedy: str, tmp_path: Path) -> None:
    trainer = _stored(tmp_path / "checkpoint", beside)
    (trainer / "checksums.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        _verify(trainer)
    absent = "not a whole training checkpoint (checksums.json is missing)"
    assert str(caught.value) == f"{trainer}: {absent}; {remedy}"
