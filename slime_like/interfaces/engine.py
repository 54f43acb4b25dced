"""The interface of a rollout engine: requests, generations, and the engine itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from slime_like.config import RunConfig
from slime_like.interfaces.samples import PromptInput, Supports
from slime_like.interfaces.weights import BucketMetadata, Manifest, UpdateReceipt
from slime_like.plugins.resolve import ENGINE_GROUP, load_installed
from slime_like.system.network import interface_of
from slime_like.trajectory import Conversation

FinishReason: TypeAlias = Literal["stop", "length", "abort", "turns"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters.

    Attributes:
        temperature: 0 means greedy.
        min_p, top_k, top_p: 0.0, -1 and 1.0 turn them off. They apply in this order; ``min_p`` is relative to the
        likeliest token. With ``training``, other values require an adapter that returns the supports and logprobs over
        them.
        max_new_tokens: length limit of the response.
        stop_token_ids: sampling one of these ends the response, which includes it. So does the model's EOS.
        stop: texts that end the response, which keeps them and all of the token that completes one.
        ignore_eos: EOS does not end the response.
        training: True for rollouts that will be trained on.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    training: bool = True
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """True if tokens are sampled from only part of the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def wants_supports(self) -> bool:
        """True if the samples are trained on and come from only part of the vocabulary."""
        return self.training and self.truncates


@dataclass(frozen=True, slots=True)
class ConversationTask:
    """The part of a prompt's row that an environment or an agent receives.

    Attributes:
        answer: ground truth.
        fields: the row's settings, JSON-serializable.
        messages: the prompt as chat messages, for an agent.
    """

    answer: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Requests that are sent to an engine together.

    An engine that waits for all of them computes the same numbers whenever and in whatever order they arrive.

    Attributes:
        name: unique in the engine.
        size: number of requests.
        place: the request's place among them, from 0.
    """

    name: str
    size: int
    place: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt and how to sample ``num_samples`` generations from it.

    Attributes:
        request_id: unique within the run; names the request in the engine.
        prompt: the prompt; an engine rejects fields that it does not use.
        sampling: sampling parameters.
        num_samples: number of responses.
        seed: sample i uses a seed derived from ``(seed, i)``; the same seed gives the same ids on the same engine.
        prompt_logprobs: also return the teacher-forced logprob (temperature 1) of every prompt token but the first.
        task: turns every sample into a conversation if ``rollout.environment`` or ``rollout.agent`` is set. Engines
            ignore it, because they receive one request per turn.
        greedy: one more response, at temperature 0, after the others. Engines receive it as a request of its own.
        batch: the requests that this one is sent with. ``None`` if it comes alone, like a turn of a conversation.
    """

    request_id: str
    prompt: PromptInput
    sampling: SamplingParams
    num_samples: int = 1
    seed: int | None = None
    prompt_logprobs: bool = False
    task: ConversationTask | None = None
    greedy: bool = False
    batch: RequestBatch | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """One training row of a rollout: a prompt as the model saw it, and the tokens that followed.

    Attributes:
        prompt: the prompt.
        token_ids: (n,) int64.
        logprobs: (n,) float32, 0 where ``loss_mask`` is False.
        weight_versions: (n,) int64.
        loss_mask: (n,) bool, True where the model sampled the token and this row trains it.
        supports: as in ``Generation``.
        finish_reason: of the row's last turn; ``None`` means the rollout's.
        fields: as in ``Generation``.
    """

    prompt: PromptInput
    token_ids: np.ndarray
    logprobs: np.ndarray
    weight_versions: np.ndarray
    loss_mask: np.ndarray
    supports: Supports | None = None
    finish_reason: FinishReason | None = None
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(slots=True)
class Generation:
    """One response. In a conversation, ``token_ids`` holds everything after the prompt, including observations.

    Attributes:
        token_ids: (n,) int64, the sampled ids themselves, including EOS.
        logprobs: (n,) float32, log-softmax of the temperature-scaled logits over the whole vocabulary at the sampled
            id; unscaled logits at temperature 0. Observations have 0.
        weight_versions: (n,) int64, the weight version that sampled each token; observations have the previous turn's.
        finish_reason: "stop", "length" (a token limit), "abort", or "turns": the last turn was used up before the
            environment ended the conversation.
        prompt_logprobs: (prompt_len - 1,) float32 if requested.
        conversation: ``None`` if the response is a single turn without an environment.
        segments: rows of a rollout whose history is not one sequence. If present, only these are trained, and
            ``token_ids``, ``logprobs`` and ``weight_versions`` belong to the last one. If empty, the generation is the
            row.
        supports: the tokens that each token was drawn from, if training truncates the distribution; ``logprobs`` are
            then over these. Observations have none.
        fields: further tensors of the row by name, each a ``TensorField`` over "inputs" of ``SampledFields``.
        drafts: with speculative decoding, the number of passes that checked drafted tokens, and of accepted tokens.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    weight_versions: np.ndarray
    finish_reason: FinishReason
    prompt_logprobs: np.ndarray | None = None
    conversation: Conversation | None = None
    segments: tuple[Segment, ...] = ()
    supports: Supports | None = None
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    drafts: tuple[int, int] = (0, 0)

    def extending(self, earlier: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the fields after a turn with ``earlier`` ones, which keep what was recorded when they were sampled."""
        return {
            name: np.concatenate([earlier[name], values[len(earlier[name]) :]]) if name in earlier else values
            for name, values in self.fields.items()
        }


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Health of an engine. ``outstanding_tokens`` are still promised to requests."""

    alive: bool
    weight_version: int
    running_requests: int
    outstanding_tokens: int
    process_ids: tuple[int, ...] = field(default=())


PauseMode = Literal["abort", "keep"]


@dataclass(frozen=True, slots=True)
class EngineNode:
    """The ranks of an engine on one of its nodes.

    Attributes:
        number: 0 for the node of the engine's first rank, which receives all calls.
        count: nodes of the engine.
        address: this node's address.
        host, port: the store through which the ranks of several nodes meet.
    """

    number: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    host: str = ""
    port: int = 0

    @property
    def spans(self) -> bool:
        return self.count > 1

    @property
    def interface(self) -> str:
        """Network interface on which the engine's ranks reach each other."""
        return (interface_of(self.address) if self.spans else None) or "lo"

    @property
    def store(self) -> dict[str, str]:
        """Variables by which torch's ``env://`` and ``tcp://`` join the store, instead of serving another one."""
        variables = {"MASTER_ADDR": self.host, "MASTER_PORT": str(self.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return variables if self.spans else {}


WHOLE = EngineNode()
"""An engine on one node."""


class RolloutEngine(Protocol):
    """One inference engine on one or more devices. All methods are coroutines of one event loop.

    Errors: every method raises ``EngineError`` with one sentence. Engines never return made-up data.
    """

    def __init__(self, config: RunConfig, engine_index: int) -> None: ...

    async def start(self) -> None:
        """Load the model in ``config.model.path`` as weight version 0."""

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Return all ``num_samples`` responses of one request, in sample order. Many requests may run concurrently.

        A canceled call ends its request in the engine.
        """

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling. "keep" freezes running requests. "abort" ends them: ``generate`` returns what was sampled."""

    async def resume(self) -> None:
        """Resume sampling. Requests frozen by "keep" continue under the current weights, with recomputed caches."""

    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        """Join the weight transport before the first update."""

    async def begin_update(self, version: int, manifest: Manifest) -> None:
        """Open an update to ``version`` with the tensors of ``manifest``. Fails while the weights are asleep.

        Fails, too, if the manifest of an update of the whole model has other tensors than the model: a tensor missing
        from an export would stay stale.
        """

    async def update(self, bucket: BucketMetadata) -> None:
        """Fetch one bucket, hash the received bytes, and load it."""

    async def finish_update(self, version: int) -> UpdateReceipt:
        """Make the new weights current, flush all caches, and return the hashes. Fails if the update lacks a tensor."""

    async def health(self) -> EngineHealth: ...

    async def sleep(self, keep_weights: bool = True) -> None:
        """Release the device's memory (colocated mode). Running requests end as aborted.

        Also called when a weight update failed with only "weights" awake; sleeping parts then stay asleep.

        Args:
            keep_weights: keep a copy of the weights; otherwise sampling must wait for the next finished update.
        """

    async def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        """Reclaim device memory. With only "weights" awake, the engine accepts updates; with both, it samples."""

    async def stop(self) -> None:
        """Stop the engine and every process it started."""


def load_engine(name: str) -> type[RolloutEngine]:
    """Return the engine class registered as ``name``; raises like ``load_backend``."""
    return load_installed(ENGINE_GROUP, name, "rollout.engine")
