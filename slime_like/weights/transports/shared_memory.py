"""Buckets in POSIX shared memory, inside one host.

The sender owns two segments under ``/dev/shm`` and writes them in turn, so it can gather the next bucket while engines
still read the last one. Segments are plain files with mode 0600. Their pages are reserved on creation, so a full
/dev/shm raises an error instead of a SIGBUS later. Python's ``multiprocessing.shared_memory`` is not used: its resource
tracker removes segments when any attached process ends.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketMetadata, WeightBucket
from slime_like.system.pinning import LockedMemory
from slime_like.weights.transport import Receiver, Sender, TransportSettings, bucket_nbytes, read_bucket, write_bucket
from slime_like.weights.transports.names import SHARED_MEMORY, buckets_in_flight, check_name, check_session

NAME = "shared_memory"
_GRANULE = 1 << 20


class SharedMemorySender(Sender):
    """Sender that writes buckets into two segments in turn. Use from one thread.

    ``rest`` keeps the segments, because their pages are expensive to allocate.
    """

    def __init__(self, _: str, session: str, settings: TransportSettings) -> None:
        check_session(session)
        self._session = session
        self._new = new_segments(session)
        self._segments: list[SharedSegment | None] = [None, None]
        self._in_flight: dict[str, int] = {}
        self._turn = 0

    def rendezvous(self) -> dict[str, Any]:
        return {"session": self._session, "directory": str(SHARED_MEMORY)}

    def send(self, bucket: WeightBucket) -> BucketMetadata:
        """Copy ``bucket`` into the next segment.

        Raises:
            WeightSyncError: both segments wait for their ``release``, or /dev/shm is too small.
        """
        if self._turn in self._in_flight.values():
            raise buckets_in_flight(self._session)
        segment, nbytes = self._segments[self._turn], bucket_nbytes(bucket)
        if segment is None or segment.nbytes < nbytes:
            if segment is not None:  # too small for the bucket
                segment.remove()
                self._segments[self._turn] = None
            segment = self._segments[self._turn] = self._new(nbytes)
        entries, hash_s = write_bucket(bucket, segment.buffer)
        self._in_flight[segment.name] = self._turn
        self._turn = 1 - self._turn
        return BucketMetadata(NAME, segment.handle, entries, hash_s)

    def release(self, metadata: BucketMetadata) -> None:
        del self._in_flight[metadata.location["segment"]]

    def close(self) -> None:
        for segment in self._segments:
            if segment is not None:
                segment.remove()
        self._segments = [None, None]
        self._in_flight.clear()


class SharedMemoryReceiver(Receiver):
    """Receiver that maps segments named by buckets. It serves any number of senders of its session."""

    def __init__(self, _: str, rendezvous: Mapping[str, Any], worker: int) -> None:
        self._segments = SegmentMap(rendezvous["session"], Path(rendezvous["directory"]))

    def receive(self, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        return read_bucket(metadata.entries, self._segments.open(metadata.location))

    def close(self) -> None:
        self._segments.clear()


def new_segments(session: str) -> Callable[[int], SharedSegment]:
    """Return a function that creates one sender's segments of at least so many bytes."""
    # The process id is not enough: a receiver may still map segments of an earlier sender of this process.
    prefix, numbers = f"{session}.{os.getpid()}.{uuid.uuid4().hex[:8]}", itertools.count()
    return lambda nbytes: SharedSegment.create(
        SHARED_MEMORY / f"{prefix}.{next(numbers)}", -(-max(nbytes, 1) // _GRANULE) * _GRANULE
    )


class SegmentMap:
    """Segments of one session that a receiver has mapped."""

    def __init__(self, session: str, directory: Path = SHARED_MEMORY) -> None:
        check_session(session)
        self._session, self._directory = session, directory
        self._mapped: dict[str, SharedSegment] = {}

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        """Map the segment of ``handle``, (n,) uint8."""
        # Unmap segments that their sender has replaced, so their memory is freed.
        for name in [name for name, segment in self._mapped.items() if not segment.path.exists()]:
            self._mapped.pop(name).let_go()
        name = handle["segment"]
        check_name(name, self._session)
        if name not in self._mapped:
            self._mapped[name] = SharedSegment.open(self._directory / name, handle["nbytes"])
        return self._mapped[name].buffer

    def clear(self) -> None:
        for segment in self._mapped.values():
            segment.let_go()
        self._mapped.clear()


class SharedSegment:
    """A mapped file, locked for CUDA until ``let_go``. The mapping lives as long as any tensor that views it."""

    def __init__(self, path: Path, descriptor: int, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # as long as this process maps the file; see ``remove_stale``
        try:
            self._memory = LockedMemory(mmap.mmap(descriptor, nbytes))
        except RuntimeError as error:
            raise WeightSyncError(
                f"CUDA cannot lock {nbytes} bytes of shared memory ({error})",
                code="not-pinned",
                who="weight sync",
                remedy="or lower sync.bucket_mb",
            ) from error
        self.buffer = self._memory.tensor(0, nbytes)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def handle(self) -> dict[str, Any]:
        return {"segment": self.name, "nbytes": self.nbytes}

    @classmethod
    def create(cls, path: Path, nbytes: int) -> SharedSegment:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return cls(path, descriptor, nbytes)
        except WeightSyncError:
            path.unlink()
            raise
        except OSError as error:
            path.unlink()
            if error.errno != errno.ENOSPC:
                raise
            free = os.statvfs(path.parent)
            raise WeightSyncError(
                f"{path.parent} is too small for a weight bucket: {nbytes} bytes needed (twice, for two buckets in "
                f"turn), {free.f_bavail * free.f_frsize} bytes free",
                code="shared-memory-full",
                remedy="enlarge it (docker: --shm-size) or lower sync.bucket_mb",
            ) from error
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path, nbytes: int) -> SharedSegment:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise WeightSyncError(
                f"shared-memory segment {path} is gone: its sender closed or died, or runs on another host",
                code="bucket-gone",
                remedy=f"the {NAME} transport needs trainer and engine on one host",
            ) from error
        try:
            return cls(path, descriptor, nbytes)
        finally:
            os.close(descriptor)

    def let_go(self) -> None:
        """Unlock the memory. Nothing is copied from or to it afterwards."""
        self._memory.let_go()

    def remove(self) -> None:
        self.let_go()
        with suppress(FileNotFoundError):  # cleanup() of the same session may have been faster
            self.path.unlink()
