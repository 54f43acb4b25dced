"""Megatron's distributed checkpointing, made to compare every piece that it loads with its checksum."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader

from backends.common.checkpoint.integrity import Checksums, VerifyingReader

PLAIN_FILES = (".metadata", "common.pt", "metadata.json")
"""What Megatron and torch write beside the data files; every rank reads them as a whole."""


class _Reader(VerifyingReader, CachedMetadataFileSystemReader):
    """Megatron's reader, which reads the metadata once."""


@contextlib.contextmanager
def verified_reading(checksums: Checksums) -> Iterator[None]:
    """Inside, Megatron's distributed checkpointing loads only pieces that are as they were written."""

    def reader(checkpoint_dir: str | Path, cache_metadata: bool = False) -> _Reader:
        return _Reader(checkpoint_dir, checksums)

    original = torch_strategy._get_filesystem_reader
    torch_strategy._get_filesystem_reader = reader
    try:
        yield
    finally:
        torch_strategy._get_filesystem_reader = original
