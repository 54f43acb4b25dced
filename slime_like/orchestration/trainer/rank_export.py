"""Export of weights and gradients from one rank, in buckets."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slime_like.config import RunConfig
from slime_like.interfaces import BucketMetadata, Manifest, WeightBucket
from slime_like.orchestration.cluster.node import node_address
from slime_like.orchestration.trainer.rank_training import RankTraining
from slime_like.plugins.options import load_option
from slime_like.system.heartbeat import beat
from slime_like.weights.fingerprint import Fingerprint
from slime_like.weights.transport import Sender, TransportSettings
from slime_like.weights.transports.registry import COLOCATED, open_sender

_KEEP = 1.125
"""Size of a kept buffer relative to a bucket. Alignment makes a full buffer slightly larger."""


class RankExport(RankTraining):
    """Part of ``TrainerRank`` that gathers buckets and sends them to the engines or to the driver."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._sender: Sender | None = None
        self._buckets: Iterator[WeightBucket] = iter(())
        self._stream: Iterator[BucketMetadata] | None = None
        self._in_flight: deque[BucketMetadata] = deque()

    def open_transport(self, name: str, session: str, delta: bool) -> dict[str, Any] | None:
        """Open the sending side of the weight transport, again if it is open. Return what receivers need to join.

        Returns ``None`` on ranks that send nothing. Only the first rank of a pipeline stage sends, or every rank to the
        engine on its own device. Collective.
        """
        self.close_transport()
        place, sync = self.place, self.config.sync
        gathers = (place.data, place.context, place.tensor) == (0, 0, 0)
        if not gathers and name != COLOCATED:
            return None
        settings = TransportSettings(
            address=node_address(),
            directory=sync.directory,
            timeout_s=sync.timeout_s,
            delta=delta,
            stage=place.pipeline,
            gathers=gathers,
            keep_nbytes=int(_KEEP * self.config.bucket_bytes(on_gpus=torch.cuda.is_available())),
        )
        self._sender = open_sender(name, session, settings)
        return self._sender.rendezvous()

    def begin_export(self) -> Manifest | None:
        """Start over. Engines must have loaded everything sent before, or the transport was opened again.

        Returns the manifest of what this rank gathers; ``None`` if it gathers nothing.
        """
        self._release(keep=0)
        export = self.backend.export_weights()
        if self._sender is not None and self.config.sync.quantization != "none":  # engines get it, not the driver
            export = load_option("quantized-export")(export)
        self._buckets = export.buckets
        stream = getattr(self._sender, "stream", None)  # only of senders on all ranks
        self._stream = None if stream is None else stream(self._next)
        return export.manifest

    def end_export(self) -> None:
        """Free the device memory of a finished export. Engines must have loaded and released everything."""
        self._release(keep=0)
        if self._sender is not None:
            self._sender.rest()

    def next_bucket(self) -> BucketMetadata | None:
        """Gather and send the next bucket. Return ``None`` if this rank has none to send, or no more.

        Ranks that only take part in a gather yield empty buckets in step with the sending rank. At most one earlier
        bucket may still be in use by the engines: the caller first waits for the last but one.
        """
        self._release(keep=1)
        if self._stream is not None:
            sent = next(self._stream, None)
        elif (bucket := self._next()) is None:
            return None
        else:
            assert self._sender is not None  # only ranks with a sender get tensors
            sent = self._sender.send(bucket)
        if sent is not None:
            self._in_flight.append(sent)
        return sent

    def next_tensors(self) -> dict[str, Tensor] | None:
        """Return the next bucket of the started weights or gradients on the host; ``None`` as in ``next_bucket``."""
        bucket = self._next()
        if bucket is None:
            return None
        # A bucket is only valid until the next one, and may hold views of a larger buffer.
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in bucket.tensors}

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Return the fingerprints of the weights that this rank gathers, by Hugging Face name. Collective."""
        export = self.backend.export_weights()
        return {name: Fingerprint.of(tensor) for bucket in export for name, tensor in bucket.tensors}

    def _next(self) -> WeightBucket | None:
        """Return the next bucket; ``None`` for an empty one and at the end."""
        bucket = next(self._buckets, None)
        beat()
        return bucket if bucket is not None and bucket.tensors else None

    def close_transport(self) -> None:
        """Close the sending side if it is open."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None
        self._in_flight.clear()

    def _release(self, keep: int) -> None:
        while self._sender is not None and len(self._in_flight) > keep:
            self._sender.release(self._in_flight.popleft())
