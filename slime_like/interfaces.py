"""The borders of the system: what a trainer backend and a rollout engine must offer, and what crosses those borders.

Implementations are found by entry point (groups ``slime_like.backends`` and ``slime_like.engines``), so that a user's
own package can add one. Nothing here knows Ray, Megatron or an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from torch import Tensor

from slime_like.config.entry_points import BACKEND_GROUP as BACKEND_GROUP
from slime_like.config.entry_points import ENGINE_GROUP as ENGINE_GROUP
from slime_like.trajectory import GRPOStats, PackedTrajectory

if TYPE_CHECKING:
    from slime_like.config import RunConfig
    from slime_like.planning.estimate import RankEstimate, RankKind


# ------------------------------------------------------------------------------------------------------------- weights
@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor inside a bucket.

    Attributes:
        name: Hugging Face parameter name.
        dtype: torch dtype name without the prefix, e.g. "bfloat16".
        shape: full (unsharded) shape.
        offset, nbytes: where its bytes lie in the bucket.
        checksum: ``slime_like.weights.checksums.tensor_checksum`` of the bytes as sent.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class BucketFigures:
    """What one bucket cost its sender; told to nobody else.

    Attributes:
        wire_nbytes: bytes that travel to every receiver; fewer than the tensors' where only changes do.
        changed, elements: of the elements that were compared with the last sync, those that differ; 0 where none were.
        hash_s: seconds spent hashing.
    """

    wire_nbytes: int = 0
    changed: int = 0
    elements: int = 0
    hash_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BucketMetadata:
    """What an engine needs to fetch one bucket: small, picklable, sent by RPC while the bytes go by the transport.

    Attributes:
        transport: name of the transport that carries the bytes.
        location: the transport's own handle (a shared-memory name, a tag, ...).
        entries: the tensors inside, in order.
        figures: what it cost; not sent to engines.
    """

    transport: str
    location: dict[str, Any]
    entries: tuple[TensorEntry, ...]
    figures: BucketFigures = field(default_factory=BucketFigures, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclass(slots=True)
class WeightBucket:
    """Full, Hugging-Face-named tensors on their way out of a trainer rank; valid until the next one is asked for."""

    tensors: list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class UpdateReceipt:
    """An engine's word on one finished update.

    Attributes:
        version: what it serves now.
        checksums: the hash of every tensor's bytes as its worker received them.
        hash_s: seconds that the worker spent hashing; 0 where the engine does not measure it.
    """

    version: int
    checksums: dict[str, int]
    hash_s: float = 0.0


# ------------------------------------------------------------------------------------------------------------- engines
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample.

    Attributes:
        temperature: 0 means greedy.
        top_p, top_k: 1.0 and -1 switch them off. Other values are refused while ``training`` unless the adapter can
            still return logprobs over the whole vocabulary.
        max_new_tokens: length limit of the response.
        stop_token_ids: sampling one of these ends the response; it stays in it (EOS too).
        training: True for rollouts that will be trained on.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    training: bool = True


@dataclass(frozen=True, slots=True)
class ConversationTask:
    """What an environment is told of a prompt's row.

    Attributes:
        answer: ground truth.
        fields: the row's own settings, expressible in JSON.
    """

    answer: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Token ids in; ``num_samples`` generations out.

    Attributes:
        request_id: unique over the run, names the request in ``abort``.
        prompt_tokens: the prompt's ids.
        sampling: how to sample.
        num_samples: responses wanted.
        seed: seed of sample i is derived from ``(seed, i)``; the same seed gives the same ids on the same engine.
        prompt_logprobs: also return the teacher-forced logprob (temperature 1) of every prompt token but the first.
        task: makes a conversation of every sample where ``rollout.environment`` names one. Engines do not look at it:
            what reaches them is one request per turn.
    """

    request_id: str
    prompt_tokens: Sequence[int]
    sampling: SamplingParams
    num_samples: int = 1
    seed: int | None = None
    prompt_logprobs: bool = False
    task: ConversationTask | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """How a response of several turns came about.

    Attributes:
        turns: ``[start, end)`` of every turn in the response's tokens: those were sampled, the others are observations.
        reward: sum over the environment's steps.
        success: what its last step said.
        failure: ``reason``, ``function`` and ``detail`` of the step that had no outcome; ``None`` where all had one.
        metadata: of every step, in order.
    """

    turns: tuple[tuple[int, int], ...]
    reward: float = 0.0
    success: bool = False
    failure: Mapping[str, str] | None = None
    metadata: tuple[Mapping[str, Any], ...] = ()


@dataclass(slots=True)
class Generation:
    """One response. In a conversation, ``token_ids`` are all of it after the prompt, observations included.

    Attributes:
        token_ids: (n,) int64, the sampled ids themselves, EOS included.
        logprobs: (n,) float32, log-softmax of the temperature-scaled logits over the whole vocabulary at the sampled
            id; at temperature 0, of the unscaled logits. 0 on observations.
        weight_versions: (n,) int64, the weight version that sampled each token, on observations that of the turn
            before.
        finish_reason: "stop", "length" (in a conversation also: the turns were used up) or "abort".
        prompt_logprobs: (prompt_len - 1,) float32 if asked for.
        conversation: ``None`` where the response is a single turn of no environment.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    weight_versions: np.ndarray
    finish_reason: Literal["stop", "length", "abort"]
    prompt_logprobs: np.ndarray | None = None
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Alive, serving ``weight_version``, with ``outstanding_tokens`` still promised to requests."""

    alive: bool
    weight_version: int
    running_requests: int
    outstanding_tokens: int
    process_ids: tuple[int, ...] = field(default=())


PauseMode = Literal["abort", "wait", "keep"]


class RolloutEngine(Protocol):
    """One inference engine (of one or more devices). All methods are coroutines of one event loop.

    Errors: every method raises ``EngineError`` with one sentence; nothing is answered with made-up data.
    """

    def __init__(self, config: RunConfig, engine_index: int) -> None: ...

    async def start(self) -> None:
        """Load the model of ``config.model.path`` as weight version 0."""

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """All ``num_samples`` responses of one request, in sample order. Many requests may run at once."""

    async def abort(self, request_id: str | None = None) -> None:
        """End one request (or all): its ``generate`` returns what was sampled, finish reason "abort"."""

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling. "abort": end running requests; "wait": let them finish; "keep": freeze them."""

    async def resume(self) -> None:
        """Sample again. Requests frozen by "keep" go on under the current weights, their caches recomputed."""

    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        """Join the weight transport before the first update."""

    async def begin_update(self, version: int) -> None:
        """Open an update to ``version``."""

    async def update(self, bucket: BucketMetadata) -> None:
        """Fetch one bucket, hash its bytes as received, load it."""

    async def finish_update(self, version: int) -> UpdateReceipt:
        """Make the new weights current, flush every cache, return the hashes. Fails if a tensor is missing."""

    async def checksums(self) -> dict[str, int]:
        """Hashes received in the last finished update."""

    async def health(self) -> EngineHealth: ...

    async def sleep(self) -> None:
        """Give the device's memory back (colocated mode); running requests end as aborted, weights are remembered."""

    async def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        """Take it again. With "weights" alone the engine can be updated; it samples when both are back."""

    async def stop(self) -> None:
        """End the engine and every process it started."""


# ------------------------------------------------------------------------------------------------------------- trainer
@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where one trainer rank runs: its place in the world and how to meet the others.

    ``local_rank`` is the index of its device among those that its process can see.
    """

    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """A rank's place on every parallel axis, and each axis' size where others need it."""

    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    data_size: int


@dataclass(slots=True)
class ScoredLogprobs:
    """(R,) float32 response logprobs and entropies of one pack, in the pack's own order."""

    logprobs: Tensor
    entropy: Tensor


class TrainerBackend(Protocol):
    """One trainer rank. Every method is collective: all ranks call it, in the same order.

    Errors: ``TrainerError`` names the rank and the phase. A non-finite loss or gradient norm raises; it never updates.
    """

    def __init__(self, config: RunConfig, placement: RankPlacement) -> None: ...

    @staticmethod
    def check(config: RunConfig) -> list[str]:
        """Problems with this configuration that need neither device nor process group, each with a remedy."""

    @staticmethod
    def rank_kinds(config: RunConfig) -> list[RankKind]:
        """All ranks of the layout, those that hold and do the same together. Every rank stands in one kind."""

    @staticmethod
    def estimate(config: RunConfig, rank: int) -> RankEstimate:
        """Memory, work and traffic of one rank on GPUs, without one: in this process, touching no device.

        Needs ``config.json`` of ``config.model.path`` alone. Parameters, gradients and optimizer state are exact.
        """

    def setup(self) -> RankCoordinates:
        """Meet the other ranks, build this rank's shard, load ``config.model.path``."""

    def setup_for_scoring(self, checkpoint: Path | None = None) -> RankCoordinates:
        """As ``setup``, but without gradients, optimizer and reference; ``score`` and exports may follow.

        Args:
            checkpoint: directory that ``save`` wrote, under any layout, to take the weights from; ``config.model.path``
                then gives the dimensions only and needs no weights. None takes the weights from there, too.
        """

    def begin_step(self, denominator: float | None = None, tokens: int | None = None) -> None:
        """Zero the gradients and the step's sums.

        Both arguments are needed only where the objective has a term with a denominator of its own
        (``algorithm.moe_aux_loss_coef``), whose share in the gradient must be right while it is accumulated.

        Args:
            denominator: what ``finish_step`` will be given.
            tokens: real tokens of this replica's packs in the whole step (``algorithms.packing.real_tokens``).
        """

    def accumulate(self, micro_batches: Sequence[PackedTrajectory], last: bool = False) -> None:
        """Forward and backward of one window. Windows have the same number of micro-batches on every rank.

        Every context- and model-parallel rank of a replica is given the same full packs and takes its own part.
        Gradients are those of ``sum(token_weights * per_token_loss)``: nothing is divided yet.
        ``last`` says that no window of this step follows: communication may then start before ``finish_step``.
        Where ``algorithm.scores_policy`` is false, a pack without old logprobs is given those of this very pass.
        """

    def finish_step(self, denominator: float) -> GRPOStats | None:
        """Reduce gradients, scale by ``1 / denominator``, clip, step the optimizer and the schedule.

        Returns the step's figures on the ranks of the last pipeline stage, ``None`` elsewhere.
        """

    def score(
        self, micro_batches: Sequence[PackedTrajectory], weights: Literal["policy", "reference"] = "policy"
    ) -> list[ScoredLogprobs] | None:
        """Response logprobs and entropy of every pack, without gradient, at each sequence's own temperature.

        The result is whole on every rank of the last pipeline stage, ``None`` elsewhere.
        """

    def export_weights(self) -> Iterator[WeightBucket]:
        """Hugging-Face-named buckets of at most ``config.sync.bucket_mb``.

        Collective inside the tensor- and expert-parallel groups of a stage: all their ranks exhaust it in step. The
        one that sends yields tensors, those that only take part in its gathers yield empty buckets, others nothing.
        """

    def export_gradients(self, denominator: float) -> Iterator[WeightBucket]:
        """In place of ``finish_step``: the step's finished gradients, as ``export_weights`` gives weights, in float32.

        Reduced and divided by ``denominator``, not clipped. Nothing is updated: the next step begins anew.
        """

    def export_hf(self, directory: Path) -> None:
        """Write a complete Hugging Face checkpoint (sharded safetensors, index, config, tokenizer)."""

    def save(self, directory: Path) -> None:
        """Write this model, optimizer, scheduler and random state; the caller owns naming and atomicity."""

    def start_save(self, directory: Path) -> None:
        """As ``save``, of the state as it is now, but files may still be written while the trainer goes on.

        Asked for by ``checkpoint.async_save``. ``finish_save`` comes before the next one starts.
        """

    def is_save_written(self) -> bool:
        """Whether this rank has written its part of the save that was started. Not collective; never waits.

        Raises:
            CheckpointError: it could not.
        """

    def finish_save(self) -> None:
        """Wait for every rank's part, at most ``trainer.step_timeout_s``, and make the directory a whole save."""

    def load(self, directory: Path) -> None: ...

    def save_weights(self, directory: Path) -> None:
        """Write the weights alone, for ``load_weights`` and ``setup_for_scoring``."""

    def load_weights(self, directory: Path, weights: Literal["policy", "reference"]) -> None:
        """Read the weights that ``save`` or ``save_weights`` wrote, under any layout.

        Into the policy, for a trainer that only scores, or into what ``score`` takes for the reference: the policy
        then stays as it is.
        """

    def offload(self, keep_weights: bool = False) -> None:
        """Move gradients, optimizer state and, unless ``keep_weights``, weights to host memory; may be repeated."""

    def onload(self) -> None: ...

    def shutdown(self) -> None:
        """Leave the process groups."""
