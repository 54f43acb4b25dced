"""Megatron's distributed checkpointing, made to compare every piece that it loads with its checksum."""

import contextlib
from pathlib import Path

from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader

from backends.common.checkpoint.integrity import Checksums, VerifyingReader
from backends.megatron.patch import Patch, applied

PLAIN_FILES = (".metadata", "common.pt", "metadata.json")
"""What Megatron and torch write beside the data files; every rank reads them as a whole."""


class _Reader(VerifyingReader, CachedMetadataFileSystemReader):
    """Megatron's reader, which reads the metadata once."""


def verified_reading(checksums: Checksums) -> contextlib.AbstractContextManager[None]:
    """Inside, Megatron's distributed checkpointing loads only pieces that are as they were written."""

    def reader(checkpoint_dir: str | Path, cache_metadata: bool = False) -> _Reader:
        return _Reader(checkpoint_dir, checksums)

    return applied(Patch(torch_strategy, "_get_filesystem_reader", reader))
