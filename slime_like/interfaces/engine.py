"""The interface of a rollout engine: requests, generations, and the engine itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from slime_like.config import RunConfig
from slime_like.interfaces.supports import Supports
from slime_like.interfaces.weights import BucketMetadata, UpdateReceipt
from slime_like.plugins.entry_points import ENGINE_GROUP, load_installed
from slime_like.trajectory import Conversation

FinishReason: TypeAlias = Literal["stop", "length", "abort", "turns"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters.

    Attributes:
        temperature: 0 means greedy.
        min_p, top_k, top_p: 0.0, -1 and 1.0 switch them off; applied in this order, ``min_p`` relative to the likeliest
            token. Other values are rejected while ``training`` unless the adapter returns the supports, and logprobs
            over them.
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
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """True where tokens are drawn from a part of the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def wants_supports(self) -> bool:
        """True where what is sampled is trained on, and tokens are drawn from a part of the vocabulary."""
        return self.training and self.truncates


@dataclass(frozen=True, slots=True)
class ConversationTask:
    """The part of a prompt's row that an environment or an agent receives.

    Attributes:
        answer: ground truth.
        fields: the row's own settings, expressible in JSON.
        messages: the prompt as chat messages, for an agent.
    """

    answer: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()


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
        task: makes a conversation of every sample where ``rollout.environment`` or ``rollout.agent`` is set. Engines
            do not look at it: what reaches them is one request per turn.
    """

    request_id: str
    prompt_tokens: Sequence[int]
    sampling: SamplingParams
    num_samples: int = 1
    seed: int | None = None
    prompt_logprobs: bool = False
    task: ConversationTask | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """One training row of a rollout: a prompt as it was seen, and what followed it.

    Attributes:
        prompt_tokens: (p,) int64.
        token_ids: (n,) int64.
        logprobs: (n,) float32, 0 where ``loss_mask`` is False.
        weight_versions: (n,) int64.
        loss_mask: (n,) bool, True where the model sampled the token and this row trains it.
        supports: as of ``Generation``.
        finish_reason: of its last turn; ``None``: the rollout's.
    """

    prompt_tokens: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    weight_versions: np.ndarray
    loss_mask: np.ndarray
    supports: Supports | None = None
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Generation:
    """One response. In a conversation, ``token_ids`` are all of it after the prompt, observations included.

    Attributes:
        token_ids: (n,) int64, the sampled ids themselves, EOS included.
        logprobs: (n,) float32, log-softmax of the temperature-scaled logits over the whole vocabulary at the sampled
            id; at temperature 0, of the unscaled logits. 0 on observations.
        weight_versions: (n,) int64, the weight version that sampled each token, on observations that of the turn
            before.
        finish_reason: "stop", "length" (a limit of tokens), "abort", or "turns": the environment had not ended the
            conversation after its last turn.
        prompt_logprobs: (prompt_len - 1,) float32 if asked for.
        conversation: ``None`` where the response is a single turn of no environment.
        segments: rows of a rollout whose history is not one sequence. Where given, they are all that is trained, and
            ``token_ids``, ``logprobs`` and ``weight_versions`` are those of the last one. Empty: the generation itself
            is the one row.
        supports: what each token was drawn from, where training truncates the distribution; ``logprobs`` are then over
            these. Observations have none.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    weight_versions: np.ndarray
    finish_reason: FinishReason
    prompt_logprobs: np.ndarray | None = None
    conversation: Conversation | None = None
    segments: tuple[Segment, ...] = ()
    supports: Supports | None = None


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

    async def sleep(self, keep_weights: bool = True) -> None:
        """Give the device's memory back (colocated mode); running requests end as aborted.

        Also called with "weights" alone awake, when a weight update has failed: parts that are asleep stay so.

        Args:
            keep_weights: remember them; otherwise nothing can be sampled before the next update is finished.
        """

    async def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        """Take it again. With "weights" alone the engine can be updated; it samples when both are back."""

    async def stop(self) -> None:
        """End the engine and every process it started."""


def load_engine(name: str) -> type[RolloutEngine]:
    """The engine class registered as ``name``; raises as ``load_backend``."""
    return load_installed(ENGINE_GROUP, name, "rollout.engine")
