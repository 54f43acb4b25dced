"""An engine under test: a loop to run it in, a sender to feed it, and Hugging Face's model to judge it by."""

import asyncio
import itertools
import os
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from slime_like.config import DataConfig, ModelConfig, RolloutConfig, RunConfig
from slime_like.errors import EngineError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import (
    BucketMetadata,
    Generation,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    UpdateReceipt,
    WeightBucket,
)
from slime_like.weights.transport import TransportSettings
from slime_like.weights.transports.registry import open_sender

MAX_NEW_TOKENS = 700
TOLERANCE = 1e-4
RARE_ID = 263
"""Its logit is always 0, far below the largest: at a low temperature it is never sampled."""
NO_STOP = (RARE_ID,)

T = TypeVar("T")


def run_config(
    model: Path, run_dir: Path, *, dtype: Literal["float32", "bfloat16"] = "float32", **rollout: Any
) -> RunConfig:
    defaults: dict[str, Any] = {"start_timeout_s": 300, "request_timeout_s": 60, "samples_per_prompt": 4}
    return RunConfig(
        run_dir=run_dir,
        model=ModelConfig(path=model, dtype=dtype),
        data=DataConfig(max_prompt_tokens=100),
        rollout=RolloutConfig(**({"max_new_tokens": MAX_NEW_TOKENS} | defaults | rollout)),
    )


class Reference:
    """Hugging Face's own forward of one checkpoint: unbatched, uncached, float32.

    Args:
        rounded_to: what its weights are rounded to before that; ``weights`` are what a trainer of this precision sends.
    """

    def __init__(self, directory: Path, rounded_to: torch.dtype = torch.float32) -> None:
        read = load_file(directory / "model.safetensors")
        self.weights = {name: tensor.to(rounded_to) for name, tensor in read.items()}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=rounded_to, attn_implementation="eager"
        ).float()
        self.directory = directory

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], response: Sequence[int] = ()) -> Tensor:
        """(len(response) + 1, V): what follows the prompt, and each response token."""
        return self._model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 :]

    def logprobs(self, prompt: Sequence[int], response: np.ndarray, temperature: float) -> np.ndarray:
        logits = self.logits(prompt, response.tolist())[:-1] / (temperature or 1.0)
        return logits.log_softmax(-1).gather(1, torch.from_numpy(response)[:, None])[:, 0].numpy()


def tiny_pair(family: str, root: Path) -> list[Reference]:
    """Two models that differ in their seed."""
    directories = [root / f"model{seed}" for seed in (0, 1)]
    for seed, directory in enumerate(directories):
        make_tiny_model(directory, family, seed=seed)
    return [Reference(directory) for directory in directories]


class EngineUnderTest:
    """Runs coroutines of one engine on one loop, and remembers which weights it ought to have."""

    def __init__(self, engine: RolloutEngine, references: Sequence[Reference], loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.references = references
        self.current = 0
        self.version = 0
        self._loop = loop
        self._ids = itertools.count()
        self.sender = open_sender("shared_memory", f"engine-test-{uuid.uuid4().hex}")
        self.run(engine.connect("shared_memory", self.sender.rendezvous()))

    @property
    def reference(self) -> Reference:
        return self.references[self.current]

    def run(self, call: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(call, timeout_s))

    def request(self, prompt: Sequence[int], **fields: Any) -> GenerationRequest:
        options = {"num_samples", "seed", "prompt_logprobs", "request_id"}
        request = {name: fields.pop(name) for name in options & set(fields)}
        request.setdefault("request_id", f"request-{next(self._ids)}")
        return GenerationRequest(prompt_tokens=list(prompt), sampling=SamplingParams(**fields), **request)

    def generate(self, prompt: Sequence[int], **fields: Any) -> list[Generation]:
        return self.run(self.engine.generate(self.request(prompt, **fields)))

    def generate_all(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        async def gather() -> list[list[Generation]]:
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        return self.run(gather())

    async def load(self, which: int, buckets: int = 4) -> tuple[UpdateReceipt, dict[str, int]]:
        """A whole update to the weights of reference ``which``; the receipt, and the hashes that were sent."""
        self.version += 1
        await self.engine.begin_update(self.version)
        sent = await self.send(list(self.references[which].weights.items()), buckets)
        receipt = await self.engine.finish_update(self.version)
        self.current = which
        return receipt, sent

    async def send(
        self,
        tensors: list[tuple[str, Tensor]],
        buckets: int = 4,
        tamper: Callable[[BucketMetadata], None] | None = None,
    ) -> dict[str, int]:
        sent: dict[str, int] = {}
        for part in _parts(tensors, buckets):
            metadata = self.sender.send(WeightBucket(part))
            sent |= {entry.name: entry.checksum for entry in metadata.entries}
            if tamper is not None:
                tamper(metadata)
            try:
                await self.engine.update(metadata)
            finally:
                self.sender.release(metadata)
        return sent

    @contextmanager
    def over(self, transport: str, settings: TransportSettings) -> Iterator[None]:
        """Updates inside go over another transport."""
        usual, self.sender = self.sender, open_sender(transport, f"engine-test-{uuid.uuid4().hex}", settings)
        try:
            self.run(self.engine.connect(transport, self.sender.rendezvous()))
            yield
        finally:
            self.sender.close()
            self.sender = usual

    def close(self) -> None:
        """End the engine: none of its processes is left, and it is not alive."""
        own = self.run(self.engine.health()).process_ids
        self.sender.close()
        self.run(self.engine.stop())
        assert not (set(own) - {os.getpid()}) & set(psutil.pids())
        assert not self.run(self.engine.health()).alive
        with pytest.raises(EngineError):
            self.generate([3, 4], max_new_tokens=1)


@contextmanager
def started(engine: RolloutEngine, references: Sequence[Reference]) -> Iterator[EngineUnderTest]:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    under_test = EngineUnderTest(engine, references, loop)
    try:
        yield under_test
    finally:
        under_test.close()
        loop.close()


def _parts(tensors: list[tuple[str, Tensor]], count: int) -> Iterator[list[tuple[str, Tensor]]]:
    size = -(-len(tensors) // count)
    for start in range(0, len(tensors), size):
        yield tensors[start : start + size]


def check_logprobs(reference: Reference, prompt: list[int], generation: Generation, temperature: float = 1.0) -> None:
    assert len(generation.token_ids) == len(generation.logprobs) == len(generation.weight_versions)
    if len(generation.token_ids):
        expected = reference.logprobs(prompt, generation.token_ids, temperature)
        # A division by the temperature scales the float noise of the logits, too.
        assert np.abs(generation.logprobs - expected).max() < TOLERANCE * max(1.0, 0.5 / (temperature or 1.0))


def flip_a_bit(engine: EngineUnderTest, metadata: BucketMetadata) -> None:
    directory = Path(engine.sender.rendezvous()["directory"])
    with (directory / metadata.location["segment"]).open("r+b") as segment:
        segment.seek(metadata.entries[-1].offset + 5)
        byte = segment.read(1)[0]
        segment.seek(-1, 1)
        segment.write(bytes([byte ^ 4]))
