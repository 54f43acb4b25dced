"""A response while it is sampled, and the draw of its next token."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rollout.drawing import Limits, draw
from rollout.requests import FinishReason, StopTexts
from slime_like.interfaces import Generation, SamplingParams, Supports


@dataclass(slots=True, eq=False)
class Sample:
    """One response and its own random stream, so the rest of the batch does not change what it draws."""

    prompt: list[int]
    sampling: SamplingParams
    stop_ids: frozenset[int]
    stream: random.Random
    wants_prompt_logprobs: bool = False
    stop_texts: StopTexts | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    supports: list[np.ndarray] = field(default_factory=list)
    wants_routes: bool = False
    routes: list[np.ndarray] = field(default_factory=list)  # of every token that was read
    prompt_logprobs: np.ndarray | None = None
    finish_reason: FinishReason | None = None

    @property
    def context(self) -> list[int]:
        return self.prompt + self.token_ids

    @property
    def is_to_score(self) -> bool:
        """True while its requested prompt logprobs are missing."""
        return self.wants_prompt_logprobs and self.prompt_logprobs is None

    def append(self, token_id: int, logprob: float, version: int) -> None:
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(version)
        completes = self.stop_texts is not None and self.stop_texts.end(self.token_ids, self.sampling.stop)
        if completes or token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.sampling.max_new_tokens:
            self.finish_reason = "length"

    def keep_routes(self, routes: np.ndarray) -> None:
        """Add the routes (context, layers, choices) of new tokens. Tokens read before keep their first routes."""
        if self.wants_routes:
            self.routes.append(routes[sum(map(len, self.routes)) :])

    def to_generation(self) -> Generation:
        assert self.finish_reason is not None
        return Generation(
            token_ids=np.asarray(self.token_ids, dtype=np.int64),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            weight_versions=np.asarray(self.versions, dtype=np.int64),
            finish_reason=self.finish_reason,
            prompt_logprobs=self.prompt_logprobs,
            supports=Supports.of(self.supports) if self.sampling.wants_supports else None,
            fields={"routes": np.concatenate(self.routes)} if self.routes else {},
        )


def draw_tokens(logits: Tensor, samples: Sequence[Sample]) -> tuple[list[int], list[float]]:
    """Draw one token per row of ``logits`` (B, V).

    Each draw inverts the cumulative distribution (in float64) at one uniform number of the sample's own stream, so it
    does not depend on the rest of the batch. Greedy rows (temperature 0) take the largest logit.

    Returns:
        Token ids, and their logprobs over the whole vocabulary, at temperature 1 for greedy rows. For truncated
        training rows, the logprob is over the support, which the sample keeps.
    """
    given, device = [sample.sampling for sample in samples], logits.device
    temperatures = torch.tensor([sampling.temperature or 1.0 for sampling in given], device=device)
    logprobs = (logits.float() / temperatures[:, None]).log_softmax(dim=-1)
    uniform = torch.tensor([sample.stream.random() for sample in samples], dtype=torch.float64, device=device)
    limits = _limits(given, logits) if any(sampling.truncates for sampling in given) else None
    supported = torch.tensor([sampling.wants_supports for sampling in given], device=device)
    tokens = draw(logprobs, uniform, limits, supported)
    for row, sample in enumerate(samples):
        if sample.sampling.wants_supports:
            sample.supports.append(logprobs[row].isfinite().nonzero()[:, 0].to("cpu", torch.int32).numpy())
    greedy = torch.tensor([sampling.temperature == 0 for sampling in given], device=device)
    tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()


def _limits(given: Sequence[SamplingParams], logits: Tensor) -> Limits:
    device, vocab_size = logits.device, logits.shape[-1]
    return Limits(
        torch.tensor([sampling.top_k if sampling.top_k > 0 else vocab_size for sampling in given], device=device),
        torch.tensor([sampling.top_p for sampling in given], dtype=torch.float64, device=device),
        torch.tensor([sampling.min_p for sampling in given], dtype=torch.float64, device=device),
    )
