"""On a failing disk, the error has the system's message, not torch's."""

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from backends.common.checkpoint.writing import refused_by_disk, write_data_file
from slime_like.errors import CheckpointError
from tests.support.rejections import Rejects

FULL = Path("/dev/full")
"""Device on which every write fails like on a full disk (Linux)."""

TENSOR = (WriteItem(MetadataIndex("weight"), WriteItemType.TENSOR), torch.zeros(100_000))
OBJECT = (WriteItem(MetadataIndex("state"), WriteItemType.BYTE_IO), io.BytesIO(bytes(100_000)))


@pytest.mark.parametrize("entries", [[TENSOR], [OBJECT]], ids=["tensor", "object"])
def test_a_full_disk_is_reported_with_the_systems_message(entries: list[tuple[Any, Any]], rejects: Rejects) -> None:
    usage = os.statvfs(FULL)
    with rejects(CheckpointError, "write-refused") as caught, refused_by_disk(FULL):
        write_data_file(FULL, "__0_0.distcp", entries)
    ((free, size),) = re.findall(r"No space left on device; (\d+) of (\d+) bytes are free", str(caught.value))
    assert int(size) == usage.f_blocks * usage.f_frsize
    assert 0 <= int(free) <= int(size)


def test_a_ranks_error_is_reported_without_its_traceback(tmp_path: Path, rejects: Rejects) -> None:
    path = tmp_path / "gone" / "__1_0.distcp"
    with rejects(CheckpointError, "write-refused") as caught, refused_by_disk(path):
        raise CheckpointException("write", {1: _wrap_exception(OSError(5, "Input/output error"))})
    assert str(caught.value).startswith(f"{path}: could not be written (Input/output error; ")


def test_other_errors_are_not_reported_as_disk_errors(tmp_path: Path) -> None:
    unwritable = (TENSOR[0], torch.empty(3, device="meta"))
    with pytest.raises(NotImplementedError), refused_by_disk(tmp_path):
        write_data_file(tmp_path / "file", "file", [unwritable])
