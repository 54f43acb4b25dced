"""Buckets as files of a shared directory.

Each file is written under a temporary name and then renamed, so a receiver never opens a partial file. It is removed
when every receiver has finished with it.
"""

import errno
import mmap
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketMetadata, TensorEntry, WeightBucket
from slime_like.weights.transport import Receiver, Sender, TransportSettings, bucket_nbytes, read_bucket, write_bucket
from slime_like.weights.transports.names import check_name, check_session

NAME = "directory"
_APPEARS_S = 10.0
"""Time for a renamed file to appear on another host of a network file system."""
_LOOK_EVERY_S = 0.05


class DirectorySender(Sender):
    """Sender that writes one file per bucket."""

    def __init__(self, _: str, session: str, settings: TransportSettings) -> None:
        assert settings.directory is not None  # the configuration requires it
        check_session(session)
        self._directory = settings.directory
        self._session = session
        # Process ids repeat across hosts.
        self._prefix = f"{session}.{uuid.uuid4().hex[:12]}"
        self._written = 0
        self._in_flight: set[str] = set()

    def rendezvous(self) -> dict[str, Any]:
        return {"session": self._session, "directory": str(self._directory.resolve())}

    def send(self, bucket: WeightBucket) -> BucketMetadata:
        """Write ``bucket``.

        Raises:
            WeightSyncError: the disk is full or rejects the write. The partial file is removed.
        """
        name = f"{self._prefix}.{self._written}"
        self._written += 1
        partial = self._directory / f"{name}.partial"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            entries, hash_s = _write(partial, bucket)
            partial.rename(self._directory / name)
        except OSError as error:
            with suppress(FileNotFoundError, NotADirectoryError):
                partial.unlink()
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise WeightSyncError(
                f"sync.directory={self._directory} cannot store a weight bucket of {bucket_nbytes(bucket)} bytes: "
                f"{os.strerror(error.errno) if error.errno else error}",
                code="directory-refuses",
                remedy="free some space or lower sync.bucket_mb" if full else "choose a writable directory",
            ) from error
        self._in_flight.add(name)
        return BucketMetadata(NAME, {"file": name}, entries, hash_s)

    def release(self, metadata: BucketMetadata) -> None:
        name = metadata.location["file"]
        self._in_flight.remove(name)
        (self._directory / name).unlink(missing_ok=True)

    def close(self) -> None:
        for name in self._in_flight:
            (self._directory / name).unlink(missing_ok=True)
        self._in_flight.clear()


class DirectoryReceiver(Receiver):
    """Receiver that maps the files named by buckets. Mappings end with the last tensor that views them."""

    def __init__(self, _: str, rendezvous: Mapping[str, Any], worker: int) -> None:
        self._session = rendezvous["session"]
        check_session(self._session)
        self._directory = Path(rendezvous["directory"])

    def receive(self, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        name = metadata.location["file"]
        check_name(name, self._session)
        return read_bucket(metadata.entries, _read(self._directory / name))


def _write(path: Path, bucket: WeightBucket) -> tuple[tuple[TensorEntry, ...], float]:
    """Write with write calls, not a mapping: network file systems send written data to the server on close."""
    data = torch.zeros(max(bucket_nbytes(bucket), 1), dtype=torch.uint8)
    entries, hash_s = write_bucket(bucket, data)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        left = data.numpy().data
        while left:
            left = left[os.write(file.fileno(), left) :]
    return entries, hash_s


def _read(path: Path) -> Tensor:
    """Map the file's bytes, (n,) uint8. The mapping is private, so writes never reach the sender's file."""
    deadline = time.monotonic() + _APPEARS_S
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            break
        except FileNotFoundError as error:
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"weight bucket {path} is missing: its sender closed or died, or sync.directory is not the same "
                    "directory on both hosts",
                    code="bucket-gone",
                ) from error
            time.sleep(_LOOK_EVERY_S)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(descriptor)
