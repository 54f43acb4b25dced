"""Checkpoints of another backend and damaged files are identified without reading tensors."""

from pathlib import Path

import pytest

from backends.common.checkpoint.integrity import ByteRange, Checksums
from backends.fsdp.checkpoint import PLAIN_FILES as FSDP_FILES
from backends.megatron.checkpoint_writer import PLAIN_FILES as MEGATRON_FILES
from slime_like.errors import CheckpointError
from tests.support.rejections import Rejects


@pytest.mark.parametrize(("written", "read"), [(MEGATRON_FILES, FSDP_FILES), (FSDP_FILES, MEGATRON_FILES)])
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
