"""The Ray actor around one trainer rank: it holds the step's packs, so that they cross the cluster once."""

from __future__ import annotations

import random
import resource
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
import torch
from torch import Tensor

from slime_like.algorithms.packing.pack import pack_sequences, real_tokens, unpack_response_logprobs
from slime_like.config import RunConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import (
    BucketMetadata,
    RankCoordinates,
    RankPlacement,
    ScoredLogprobs,
    TrainerBackend,
    WeightBucket,
    load_backend,
)
from slime_like.orchestration.cluster.node import node_address, use_cluster_interface
from slime_like.system.network import is_free
from slime_like.trajectory import GRPOStats, PackedTrajectory, UnscoredTrajectory
from slime_like.weights.transport import Sender, TransportSettings
from slime_like.weights.transports.registry import open_sender

Minibatch = list[PackedTrajectory]
Scores = list[ScoredLogprobs]


_RENDEZVOUS_PORTS = range(21_000, 32_000)


@dataclass(frozen=True, slots=True)
class FrozenLogprobs:
    """(response_len,) logprobs of one sequence as frozen at the start of the step; no reference without a KL term."""

    policy: Tensor
    reference: Tensor | None

    @property
    def required_reference(self) -> Tensor:
        if self.reference is None:
            raise TrainerError("a sequence has no reference logprobs; score the batch with the reference first")
        return self.reference


@dataclass(frozen=True, slots=True)
class StreamedStep:
    """One optimizer step whose windows were streamed.

    Attributes:
        stats: its figures; ``None`` from ranks that do not have them.
        busy_s: seconds spent on it, waiting for windows not included.
        reference_s: of these, seconds spent on reference logprobs.
    """

    stats: GRPOStats | None
    busy_s: float
    reference_s: float


class TrainerRank:
    """One rank. Plain Python: Ray makes an actor of it."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._backend: TrainerBackend | None = None
        self._coordinates: RankCoordinates | None = None
        self._minibatches: list[Minibatch] = []
        self._busy_s = self._scoring_s = 0.0
        self._sender: Sender | None = None
        self._buckets: Iterator[WeightBucket] | None = None
        self._in_flight: deque[BucketMetadata] = deque()

    # -------------------------------------------------------------------------------------------------------- start
    def address(self) -> tuple[str, int]:
        """This node's address in the cluster and a port that is free on it, for the rendezvous of all ranks.

        Raises:
            TrainerError: the port that the configuration names is taken.
        """
        host = node_address()
        port = self._config.trainer.rendezvous_port
        if port is not None and not is_free(host, port):
            raise TrainerError(
                f"trainer.rendezvous_port={port} is taken on {host}; give another one, or none to have a free one "
                "chosen"
            )
        return host, port or _free_port(host)

    def device(self) -> str:
        """The GPU that Ray gave this rank, as ``CUDA_VISIBLE_DEVICES`` names it; "" on a CPU."""
        return ",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))

    def sees(self, witness: Path, timeout_s: float) -> tuple[bool, str]:
        """Is ``witness`` there, at the latest after ``timeout_s`` seconds? And this node's address."""
        deadline = time.monotonic() + timeout_s
        while not witness.exists() and time.monotonic() < deadline:  # network file systems show a new file late
            time.sleep(0.1)
        return witness.exists(), node_address()

    def setup(self, placement: RankPlacement) -> RankCoordinates:
        self._coordinates = self._open_backend(placement).setup()
        return self._coordinates

    def setup_for_scoring(self, placement: RankPlacement, checkpoint: Path | None) -> RankCoordinates:
        self._coordinates = self._open_backend(placement).setup_for_scoring(checkpoint)
        return self._coordinates

    def _open_backend(self, placement: RankPlacement) -> TrainerBackend:
        use_cluster_interface(gloo=True)
        backend_class = load_backend(self._config.trainer.backend)
        self._backend = backend_class(self._config, placement)
        return self._backend

    @property
    def backend(self) -> TrainerBackend:
        if self._backend is None:
            raise RuntimeError(f"trainer rank {self._rank} is used before setup")
        return self._backend

    # ----------------------------------------------------------------------------------------------------- training
    def load_batch(self, minibatches: list[Minibatch]) -> None:
        """Take this replica's micro-batches of the step, by minibatch."""
        self._minibatches = minibatches
        for pack in (pack for minibatch in minibatches for pack in minibatch):
            pack.old_logprobs = None  # kept rollouts may bring those of the step they were kept from

    def score_batch(self, weights: Literal["policy", "reference"]) -> None:
        """Fill ``old_logprobs`` (policy) or ``ref_logprobs`` (reference) of the loaded packs, frozen for the step."""
        self._freeze([pack for minibatch in self._minibatches for pack in minibatch], weights)

    def _freeze(self, packs: list[PackedTrajectory], weights: Literal["policy", "reference"]) -> None:
        scored = self.backend.score(packs, weights)
        if scored is None:
            return
        for pack, values in zip(packs, scored, strict=True):
            if weights == "policy":
                pack.old_logprobs = values.logprobs
            else:
                pack.ref_logprobs = values.logprobs

    def score(self, packs: list[PackedTrajectory], weights: Literal["policy", "reference"]) -> Scores | None:
        """Logprobs and entropies of ``packs`` on the host, from one rank of every replica; ``None`` from the others."""
        scored = self.backend.score(packs, weights)
        place = self._coordinates
        if scored is None or place is None or place.tensor > 0 or place.context > 0:
            return None
        return [ScoredLogprobs(values.logprobs.cpu(), values.entropy.cpu()) for values in scored]

    def set_advantages(self, advantages: dict[str, float]) -> None:
        """Replace the advantages of every loaded pack; each sequence of the batch must be named."""
        for pack in (pack for minibatch in self._minibatches for pack in minibatch):
            own = torch.tensor([advantages[name] for name in pack.sequence_ids], dtype=torch.float32)
            pack.advantages = own.to(pack.response_lens.device).repeat_interleave(pack.response_lens)

    def train_minibatch(self, index: int, denominator: float) -> GRPOStats | None:
        """One optimizer step over the minibatch ``index`` of the loaded batch."""
        packs = self._minibatches[index]
        self.backend.begin_step(denominator, real_tokens(packs))
        self.backend.accumulate(packs, last=True)
        return self.backend.finish_step(denominator)

    def begin_stream(self) -> None:
        """Start an optimizer step whose windows are not all known yet."""
        started = time.perf_counter()
        self._minibatches = [[]]
        self._scoring_s = 0.0
        self.backend.begin_step()
        self._busy_s = time.perf_counter() - started

    def train_window(self, packs: list[PackedTrajectory], last: bool) -> None:
        """Score what the loss needs scored, then accumulate; the weights are those of the start of the step.

        Args:
            packs: this replica's micro-batches of one window.
            last: no window follows in this step.
        """
        started = time.perf_counter()
        self._minibatches[0] += packs
        for pack in packs:
            pack.old_logprobs = None  # as in load_batch
        if not self._config.supervised:
            self._score_window(packs)
        self.backend.accumulate(packs, last=last)
        self._busy_s += time.perf_counter() - started

    def _score_window(self, packs: list[PackedTrajectory]) -> None:
        if self._config.algorithm.scores_policy:
            self._freeze(packs, "policy")
        if self._config.reference_in_trainer:
            started = time.perf_counter()
            self._freeze(packs, "reference")
            self._scoring_s += time.perf_counter() - started

    def finish_stream(self, denominator: float) -> StreamedStep:
        """The update of everything that ``train_window`` was given since ``begin_stream``."""
        started = time.perf_counter()
        stats = self.backend.finish_step(denominator)
        return StreamedStep(stats, self._busy_s + time.perf_counter() - started, self._scoring_s)

    def response_logprobs(self, sequence_ids: list[str]) -> dict[str, FrozenLogprobs]:
        """Policy and reference logprobs of those of the named sequences that this rank holds and has seen."""
        wanted = set(sequence_ids)
        found: dict[str, FrozenLogprobs] = {}
        for pack in (pack for minibatch in self._minibatches for pack in minibatch):
            if pack.old_logprobs is None or wanted.isdisjoint(pack.sequence_ids):
                continue
            policy = unpack_response_logprobs(pack, pack.old_logprobs)
            frozen = pack.ref_logprobs
            reference = [None] * len(policy) if frozen is None else unpack_response_logprobs(pack, frozen)
            for name, own, other in zip(pack.sequence_ids, policy, reference, strict=True):
                if name in wanted:
                    found.setdefault(name, FrozenLogprobs(own.cpu(), None if other is None else other.cpu()))
        return found

    def probe(self, sequences: list[list[int]]) -> np.ndarray | None:
        """Teacher-forced logprobs at temperature 1 of every token but the first, all sequences end to end."""
        pack = pack_sequences([_as_trajectory(tokens, index) for index, tokens in enumerate(sequences)])
        scored = self.backend.score([pack], "policy")
        return None if scored is None else scored[0].logprobs.cpu().numpy()

    # ------------------------------------------------------------------------------------------------------ weights
    def open_transport(self, name: str, session: str, delta: bool) -> dict[str, Any] | None:
        """Open the sending side of the weight transport, anew if it was open; returns what receivers need to join.

        ``None`` from ranks that send nothing: only the first of a pipeline stage does.
        """
        if self._sender is not None:
            self._sender.close()
            self._in_flight.clear()
            self._sender = None
        place = self._coordinates
        if place is None or (place.data, place.context, place.tensor) != (0, 0, 0):
            return None
        sync = self._config.sync
        settings = TransportSettings(node_address(), sync.directory, sync.timeout_s, delta)
        self._sender = open_sender(name, session, settings)
        return self._sender.rendezvous()

    def begin_export(self) -> None:
        """Start over. Engines have loaded whatever was sent before, or the transport was opened anew."""
        self._release(keep=0)
        self._buckets = self.backend.export_weights()

    def begin_gradient_export(self, index: int, denominator: float) -> None:
        """Make the gradients of the loaded batch's minibatch ``index`` what ``next_tensors`` gives; update nothing."""
        packs = self._minibatches[index]
        self.backend.begin_step(denominator, real_tokens(packs))
        self.backend.accumulate(packs, last=True)
        self._buckets = self.backend.export_gradients(denominator)

    def next_bucket(self) -> BucketMetadata | None:
        """Gather and send the next bucket; ``None`` when this rank has none to send, or no more.

        Ranks that only take part in a gather yield empty buckets in step with the one that sends.
        At most one earlier bucket may still be in the engines' hands: the caller waits for the last but one first.
        """
        if self._buckets is None:
            raise RuntimeError(f"trainer rank {self._rank}: next_bucket before begin_export")
        self._release(keep=1)
        bucket = next(self._buckets, None)
        if bucket is None or not bucket.tensors:
            return None
        if self._sender is None:
            raise RuntimeError(f"trainer rank {self._rank} exports weights, but only first ranks of stages may")
        self._in_flight.append(self._sender.send(bucket))
        return self._in_flight[-1]

    def next_tensors(self) -> dict[str, Tensor] | None:
        """The next bucket itself of the weights or gradients begun, on the host; ``None`` as in ``next_bucket``."""
        if self._buckets is None:
            raise RuntimeError(f"trainer rank {self._rank}: next_tensors before begin_export")
        bucket = next(self._buckets, None)
        if bucket is None or not bucket.tensors:
            return None
        # A bucket is valid until the next one only, and may hold views of a larger buffer.
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in bucket.tensors}

    def _release(self, keep: int) -> None:
        while self._sender is not None and len(self._in_flight) > keep:
            self._sender.release(self._in_flight.popleft())

    # -------------------------------------------------------------------------------------------------- checkpoints
    def save(self, directory: Path) -> None:
        self.backend.save(directory)

    def start_save(self, directory: Path) -> None:
        self.backend.start_save(directory)

    def is_save_written(self) -> bool:
        return self.backend.is_save_written()

    def finish_save(self) -> None:
        self.backend.finish_save()

    def load(self, directory: Path) -> None:
        self.backend.load(directory)

    def save_weights(self, directory: Path) -> None:
        self.backend.save_weights(directory)

    def load_weights(self, directory: Path, weights: Literal["policy", "reference"]) -> None:
        self.backend.load_weights(directory, weights)

    def export_hf(self, directory: Path) -> None:
        self.backend.export_hf(directory)

    # -------------------------------------------------------------------------------------------------------- turns
    def offload(self, keep_weights: bool) -> None:
        self.backend.offload(keep_weights)

    def onload(self) -> None:
        self.backend.onload()

    # ---------------------------------------------------------------------------------------------------------- end
    def peak_memory_bytes(self) -> int:
        """Peak resident memory of this process."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def shutdown(self) -> None:
        if self._sender is not None:
            self._sender.close()
        if self._backend is not None:
            self._backend.shutdown()


def _free_port(host: str) -> int:
    """A free port below the range that the kernel hands out by itself, so that nobody is given it before we listen."""
    ports = random.SystemRandom().sample(_RENDEZVOUS_PORTS, 50)
    for port in ports:
        if is_free(host, port):
            return port
    raise TrainerError(
        f"no free port among 50 tried between {_RENDEZVOUS_PORTS[0]} and {_RENDEZVOUS_PORTS[-1]} on {host}"
    )


def _as_trajectory(tokens: list[int], index: int) -> UnscoredTrajectory:
    response = torch.tensor(tokens[1:], dtype=torch.int64)
    return UnscoredTrajectory(
        prompt_tokens=torch.tensor(tokens[:1], dtype=torch.int64),
        response_tokens=response,
        prompt_len=1,
        response_len=len(response),
        logprobs=None,
        answer="",
        sequence_id=f"probe-{index}",
        policy_version=0,
        group_id=index,
        loss_mask=torch.ones(len(response), dtype=torch.bool),
    )
