"""``WeightSync`` in one process: a real transformers engine, real transports, and Hugging Face's model as the trainer.

Only calls of Ray actors are replaced by direct calls.
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor

from rollout.transformers.engine import TransformersEngine
from slime_like.checks.engines import chosen_transport
from slime_like.config import RunConfig
from slime_like.interfaces import BucketMetadata, Manifest, WeightBucket, WeightExport
from slime_like.orchestration.rollout.engines import DeviceSwitch
from slime_like.orchestration.rollout.sync_probe import Probe
from slime_like.orchestration.weight_sync import WeightSync
from slime_like.weights.quantization import quantize_export
from slime_like.weights.transport import Sender, TransportSettings
from slime_like.weights.transports.registry import open_sender
from tests.support.pending import Later, OneRank

T = TypeVar("T")
SESSION = f"local-sync-test-{uuid.uuid4().hex}"
"""Unique to this test process, because another one would remove its buckets."""


class LocalTrainers(OneRank):
    """Several senders, like the stages of a pipeline, each with its part of ``weights``.

    ``weights`` may change between syncs, like in training.
    """

    def __init__(self, model: Path, directory: Path, num_senders: int = 2, tensors_per_bucket: int = 5) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.senders: list[Sender] = []
        self._directory = directory
        self._num_senders = num_senders
        self._per_bucket = tensors_per_bucket
        self._streams: list[Iterator[WeightBucket]] = []
        self._in_flight: list[tuple[Sender, BucketMetadata]] = []

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def exported(self) -> dict[str, Tensor]:
        """Return the weights to send. Mutation tests replace this."""
        return self.weights

    def start(self, phase: str, method: Callable[..., Any], *arguments: Any) -> Later[list[Any]]:
        return Later(lambda: getattr(self, method.__name__)(*arguments))

    def open_transport(self, name: str, session: str, delta: bool) -> list[dict[str, Any]]:
        self.close()
        settings = TransportSettings(directory=self._directory, timeout_s=20.0, delta=delta)
        self.senders = [open_sender(name, session, settings) for _ in range(self._num_senders)]
        return [sender.rendezvous() for sender in self.senders]

    def begin_export(self) -> list[Manifest]:
        self._release()
        tensors = list(self.exported().items())
        share = -(-len(tensors) // self._num_senders)
        self._streams = [self._buckets(tensors[rank * share : (rank + 1) * share]) for rank in range(self._num_senders)]
        return [Manifest.of(dict(tensors[rank * share : (rank + 1) * share])) for rank in range(self._num_senders)]

    def next_bucket(self) -> list[BucketMetadata | None]:
        self._release()
        return [self._send(sender, next(s, None)) for sender, s in zip(self.senders, self._streams, strict=True)]

    def end_export(self) -> None:
        self._release()
        for sender in self.senders:
            sender.rest()

    def probe(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Teacher-forced logprobs by Hugging Face's forward pass."""
        with torch.inference_mode():
            parts = []
            for tokens in sequences:
                ids = torch.tensor([tokens])
                logprobs = self.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
                parts.append(logprobs.gather(1, ids[0, 1:, None])[:, 0])
        return [torch.cat(parts).numpy()]

    def close(self) -> None:
        self._in_flight.clear()
        for sender in self.senders:
            sender.close()

    def _buckets(self, tensors: list[tuple[str, Tensor]]) -> Iterator[WeightBucket]:
        for start in range(0, len(tensors), self._per_bucket):
            yield WeightBucket(tensors[start : start + self._per_bucket])

    def _send(self, sender: Sender, bucket: WeightBucket | None) -> BucketMetadata | None:
        if bucket is None:
            return None
        metadata = sender.send(bucket)
        self._in_flight.append((sender, metadata))
        return metadata

    def _release(self) -> None:
        """Release all buckets. The engine has finished them, because nothing overlaps here."""
        while self._in_flight:
            sender, metadata = self._in_flight.pop(0)
            sender.release(metadata)


class QuantizedTrainers(LocalTrainers):
    """Trainers that send 8-bit matrices, as ``RankExport`` does."""

    def begin_export(self) -> list[Manifest]:
        parts = zip(super().begin_export(), self._streams, strict=True)
        exports = [quantize_export(WeightExport(manifest, stream)) for manifest, stream in parts]
        self._streams = [export.buckets for export in exports]
        return [export.manifest for export in exports if export.manifest is not None]


@dataclass
class Answers(Generic[T]):
    """Answers that have already arrived."""

    values: list[T]
    references: ClassVar[dict[str, Any]] = {}

    def result(self) -> list[T]:
        return self.values


class LocalEngines:
    """One engine in this process, which never dies, in place of ``Engines``."""

    instances: ClassVar[list[str]] = ["engine 0"]
    dead = ()

    def __init__(self, engine: TransformersEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self._loop = loop

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(call, 60))

    def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        self.run(self.engine.connect(transport, rendezvous))

    def ask(self, method: str, *arguments: Any, phase: str) -> Answers[Any]:
        """Call the engine's method like ``EngineActor``, and wait."""
        if method == "begin_update":
            version, manifests = arguments
            return Answers([self.run(self.engine.begin_update(version, Manifest.joined(manifests.result())))])
        if method == "update":
            for bucket in arguments[0]:
                self.run(self.engine.update(bucket))
            return Answers([None])
        return Answers([self.run(getattr(self.engine, method)(arguments[0]))])

    def find_dead(self, error: Exception) -> bool:
        return False

    def admit(self) -> None: ...


def new_sync(config: RunConfig, trainers: LocalTrainers, engines: LocalEngines) -> WeightSync:
    mixed: Any = (trainers, engines)
    transport = chosen_transport(config, on_cuda=False, num_hosts=1)
    rounded = config.sync.quantization != "none"
    probe = Probe(config.model, config.sync.probe_tolerance, config.max_model_len, (), rounded)
    sync = WeightSync(config.sync, transport, config.model.dtype, probe, mixed[0], mixed[1], DeviceSwitch(), SESSION)
    sync.connect()
    return sync
