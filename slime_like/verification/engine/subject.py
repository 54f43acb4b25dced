"""An engine under verification, run without a cluster, and the reference that it is compared with."""

import asyncio
import itertools
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
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
from slime_like.models.tower import language_names, loading_options
from slime_like.orchestration.rollout.sync_probe import BFLOAT16_BOUND
from slime_like.weights.transports.registry import open_sender

T = TypeVar("T")
Tamper = Callable[[BucketMetadata], None]


class DrivenEngine:
    """Runner of one started engine's coroutines on one loop, with a sender of weights; ``close`` stops the engine.

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
        """Update all weights; return receipt and sent hashes. By default, ``manifest`` describes ``weights``."""
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
def start_engine(engine: RolloutEngine) -> Iterator[asyncio.AbstractEventLoop]:
    """Start the engine, and yield its event loop. When the block ends, tasks that are left in it are canceled."""
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield runner.get_loop()


_BOUNDS = {"float32": 1e-4, "bfloat16": BFLOAT16_BOUND}
_EAGER: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}  # others do not support float64


class ReferenceModel:
    """Hugging Face's forward pass of a one-file checkpoint, without batches and caches.

    It is in float32, or in float64 if weights are rounded.

    Args:
        dtype: precision of the engine, ``float32`` or ``bfloat16``; weights are rounded to it.

    Attributes:
        weights: weights by name, as a trainer of this precision sends them.
        dtype: precision of the engine.
        bound: upper bound on ``gap`` for a correct engine.
    """

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        every = load_file(directory / "model.safetensors")
        read = {name: every[name] for name in language_names(directory, every)}
        self.directory = directory
        self.dtype, self.bound = dtype, _BOUNDS[dtype]
        self.weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in read.items()}
        self._options = loading_options(directory)
        self.vocab_size: int = self._options["config"].vocab_size
        self.use({})

    def use(self, weights: Mapping[str, Tensor]) -> None:
        """Replace some or all tensors of ``weights``. transformers loads them, because it stores experts in another way
        than checkpoints do."""
        self.weights = {**self.weights, **weights}
        state = {name: tensor.clone() for name, tensor in self.weights.items()}
        self._model = (
            transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(self._options["config"])]
            .from_pretrained(None, state_dict=state, dtype=self.dtype, **self._options, **_EAGER)
            .to(torch.float32 if self.dtype == "float32" else torch.float64)
        )

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], response: Sequence[int] = ()) -> Tensor:
        """Return logits (len(response) + 1, V) of the tokens after the prompt and after each response token."""
        found: Tensor = self._model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 :]
        return found

    def logprobs(self, prompt: Sequence[int], response: np.ndarray, temperature: float) -> np.ndarray:
        """Return logprobs (len(response),) of temperature-scaled logits; at temperature 0, of unscaled logits."""
        logits = self.logits(prompt, response.tolist())[:-1] / (temperature or 1.0)
        found: np.ndarray = logits.log_softmax(-1).gather(1, torch.from_numpy(response)[:, None])[:, 0].numpy()
        return found

    @torch.no_grad()
    def routes(self, prompt: Sequence[int], response: np.ndarray) -> np.ndarray:
        """Return the experts (tokens - 1, layers with experts, choices) of every token but the last."""
        routers = [module for name, module in self._model.named_modules() if name.endswith(".mlp.gate")]
        chosen: list[Tensor] = []
        hooks = [router.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for router in routers]
        self._model(torch.tensor([[*prompt, *response[:-1]]]))
        for hook in hooks:
            hook.remove()
        return torch.stack(chosen, dim=1).numpy()

    def gap(self, found: np.ndarray, expected: np.ndarray, temperature: float = 1.0) -> float:
        """Return the gap between an engine's logprobs (n,) and the expected ones, relative to expected rounding.

        In float32 it is the largest difference, in nats. In bfloat16, whose largest difference says little, it is the
        median in standard deviations of the vocabulary's logprobs.
        """
        gaps = np.abs(found - expected)
        if np.isnan(gaps).any():
            return np.inf
        if self.dtype == "float32":
            return float(gaps.max()) / max(1.0, 0.5 / (temperature or 1.0))
        spread = float(self.logits(range(3, 35))[0].log_softmax(-1).std())
        return float(np.median(gaps)) * (temperature or 1.0) / spread

    def is_alike(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
        """Return whether pairs of samples are as equal as they should be. In bfloat16, where rounding can select a
        different token and so change all later ones, most pairs must start with the same tokens."""
        if self.dtype == "float32":
            return all(one == other for one, other in pairs)
        return 2 * sum(one[:3] == other[:3] for one, other in pairs) > len(pairs)


COLD = 0.05
"""Temperature of long responses, so they rarely contain their stop token."""
TOKENS = 16
"""Tokens of a response, or of a subset with its own gap. A smaller subset would have a random median, and a larger one
would include tokens that an expert does not affect."""
_LONG = 200
"""Tokens of a response that lasts long enough for an action in its middle."""


class ClaimFailed(Exception):
    """Error of an engine that does not satisfy a claim; the message describes what was found."""


@dataclass(slots=True)
class Subject:
    """An engine, the weights that it should serve, and its prompts.

    Attributes:
        others: different weights for the same model.
        routed: the engine records the routes of experts.
        halfway_s: seconds until the middle of a lasting response, as measured and corrected by every attempt to
            interrupt one; 0 before.
    """

    engine: DrivenEngine
    reference: ReferenceModel
    others: dict[str, Tensor]
    prompts: Sequence[list[int]]
    routed: bool = False
    halfway_s: float = 0.0

    def gap(self, prompt: list[int], generation: Generation, temperature: float) -> float:
        expected = self.reference.logprobs(prompt, generation.token_ids, temperature)
        return self.reference.gap(generation.logprobs, expected, temperature)

    def load(self, weights: dict[str, Tensor]) -> None:
        receipt, sent = self.engine.run(self.engine.update(weights))
        if receipt.checksums != sent:
            raise ClaimFailed("the hashes of the received tensors differ from those of the sent tensors")
        self.reference.use(weights)

    def swap(self) -> None:
        before = dict(self.reference.weights)
        self.reference.use(self.others)
        self.others = before

    def lasting(self, prompt: list[int]) -> GenerationRequest:
        return self.engine.request(prompt, max_new_tokens=_LONG, temperature=COLD, ignore_eos=True)

    def probe(self, where: np.ndarray | None = None) -> float:
        """Return the largest ``Reference.gap`` of three sets: prompts' tokens in the mask ``where``, other tokens of
        prompts, and a few tokens sampled after each prompt."""
        options: dict[str, Any] = {"max_new_tokens": 4, "prompt_logprobs": True, "seed": 1}
        requests = [self.engine.request(prompt, **options) for prompt in self.prompts]
        parts: list[tuple[np.ndarray, ...]] = []
        for prompt, (generation,) in zip(self.prompts, self.engine.generate_all(requests), strict=True):
            ids = np.concatenate((prompt[1:], generation.token_ids)).astype(np.int64)
            expected = self.reference.logprobs(prompt[:1], ids, 1.0)
            assert generation.prompt_logprobs is not None  # asked for
            parts.append((generation.prompt_logprobs, generation.logprobs, *np.split(expected, [len(prompt) - 1])))
        found, sampled, expected, after = (np.concatenate(part) for part in zip(*parts, strict=True))
        some = np.ones(len(found), bool) if where is None else where
        pairs = [(found[some], expected[some]), (found[~some], expected[~some]), (sampled, after)]
        return max(self.reference.gap(*pair) for pair in pairs if len(pair[0]))
