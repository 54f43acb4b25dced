"""Which checkpoint it is, told from the files that a trainer reads as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.common.integrity import Checksums
from backends.fsdp.checkpoint_writer import PLAIN_FILES as FSDP_FILES
from backends.megatron.verified_reading import PLAIN_FILES as MEGATRON_FILES
from slime_like.errors import CheckpointError


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
