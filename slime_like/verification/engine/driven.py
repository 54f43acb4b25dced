"""An engine without a cluster, with an event loop to run it and a sender of weights."""

import asyncio
import itertools
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from slime_like.interfaces import (
    BucketMetadata,
    Generation,
    GenerationRequest,
    Manifest,
    PromptInput,
    RolloutEngine,
    SamplingParams,
    UpdateReceipt,
    WeightBucket,
)
from slime_like.weights.transports.registry import open_sender

T = TypeVar("T")
Tamper = Callable[[BucketMetadata], None]


class DrivenEngine:
    """Runner of one started engine's coroutines on one loop; ``close`` stops the engine.

    Attributes:
        version: version of the weights that the engine should serve.
    """

    def __init__(self, engine: RolloutEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.version = 0
        self._loop = loop
        self._ids = itertools.count()
        self.sender = open_sender("shared_memory", f"engine-{uuid.uuid4().hex}")
        self.run(engine.connect("shared_memory", self.sender.rendezvous()))

    def run(self, call: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(call, timeout_s))

    def request(self, prompt: Sequence[int], **fields: Any) -> GenerationRequest:
        """Return a request with a new id. ``fields`` are sampling parameters, request options and ``prompt_fields``."""
        options = {"num_samples", "seed", "prompt_logprobs", "request_id"}
        request = {name: fields.pop(name) for name in options & set(fields)}
        request.setdefault("request_id", f"request-{next(self._ids)}")
        given = PromptInput(list(prompt), fields.pop("prompt_fields", {}))
        return GenerationRequest(prompt=given, sampling=SamplingParams(**fields), **request)

    def generate(self, prompt: Sequence[int], **fields: Any) -> list[Generation]:
        return self.run(self.engine.generate(self.request(prompt, **fields)))

    def generate_all(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:

        async def gather() -> list[list[Generation]]:
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        return self.run(gather())

    async def update(
        self,
        weights: Mapping[str, Tensor],
        buckets: int = 4,
        tamper: Tamper | None = None,
        manifest: Manifest | None = None,
    ) -> tuple[UpdateReceipt, dict[str, int]]:
        """Update all weights; return receipt and sent hashes. ``manifest`` defaults to that of ``weights``."""
        version = self.version + 1
        await self.engine.begin_update(version, manifest or Manifest.of(weights))
        sent = await self.send(list(weights.items()), buckets, tamper)
        receipt = await self.engine.finish_update(version)
        self.version = version
        return receipt, sent

    async def send(
        self, tensors: Sequence[tuple[str, Tensor]], buckets: int = 4, tamper: Tamper | None = None
    ) -> dict[str, int]:
        """Send the tensors in ``buckets`` buckets; return the sent hashes. ``tamper`` is called with each bucket."""
        sent: dict[str, int] = {}
        size = max(1, -(-len(tensors) // buckets))
        for start in range(0, len(tensors), size):
            metadata = self.sender.send(WeightBucket(list(tensors[start : start + size])))
            sent |= {entry.name: entry.checksum for entry in metadata.entries}
            if tamper is not None:
                tamper(metadata)
            try:
                await self.engine.update(metadata)
            finally:
                self.sender.release(metadata)
        return sent

    def flip_a_bit(self, metadata: BucketMetadata) -> None:
        """Damage the last tensor of a sent bucket in shared memory."""
        directory = Path(self.sender.rendezvous()["directory"])
        with (directory / metadata.location["segment"]).open("r+b") as segment:
            segment.seek(metadata.entries[-1].offset + 5)
            byte = segment.read(1)[0]
            segment.seek(-1, 1)
            segment.write(bytes([byte ^ 4]))

    def close(self) -> None:
        self.sender.close()
        self.run(self.engine.stop())


@contextmanager
def started(engine: RolloutEngine) -> Iterator[asyncio.AbstractEventLoop]:
    """Start the engine, and yield its event loop. When the block ends, tasks that are left in it are canceled."""
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield runner.get_loop()
