"""Hooks of an engine into the bookkeeping that all engines share."""

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

from slime_like.interfaces import BucketMetadata, PauseMode

Running = TypeVar("Running")
MemoryPart = Literal["weights", "kv_cache"]
MEMORY_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")


class EngineHooks(Generic[Running]):
    """Called by ``EngineBase``, once the call itself has been found to be right; ``Running`` is a started engine."""

    async def _start(self) -> None:
        """Start within a bound set by the caller, which calls ``stop`` if it raises or is cancelled."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End the engine and every process it started, by process id, within seconds. May be called twice."""
        raise NotImplementedError

    def _alive(self) -> Running:
        """Raises ``EngineError`` where the engine has not been started, or has died."""
        raise NotImplementedError

    async def _is_alive(self) -> bool:
        """Asks, within a bound, whatever does the work."""
        raise NotImplementedError

    def _own_process_ids(self) -> tuple[int, ...]:
        return ()

    async def _freeze(self, mode: PauseMode) -> None:
        raise NotImplementedError

    async def _thaw(self) -> None:
        raise NotImplementedError

    async def _begin_update(self) -> None: ...

    async def _update(self, bucket: BucketMetadata) -> None:
        """Fetch, hash and load a bucket that has been checked; if it fails the update has failed."""
        raise NotImplementedError

    async def _received(self) -> tuple[dict[str, int], float]:
        """Hashes of all that the open update has brought, and the seconds they took."""
        raise NotImplementedError

    async def _finish_update(self, version: int) -> None:
        """The update is whole: serve it, and flush every cache."""
        raise NotImplementedError

    async def _close_update(self) -> None:
        """Give up an update that the engine still holds open."""

    async def _give_memory_back(self, parts: Sequence[MemoryPart]) -> None:
        raise NotImplementedError

    async def _take_memory(self, parts: Sequence[MemoryPart]) -> None:
        raise NotImplementedError
