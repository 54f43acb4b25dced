"""A response on its way: what it has so far, and how its next token is drawn."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rollout.requests import FinishReason
from slime_like.interfaces import Generation, SamplingParams, Supports


@dataclass(slots=True, eq=False)
class Sample:
    """One response and its random stream, so that neighbours in a batch do not change what it draws."""

    prompt: list[int]
    sampling: SamplingParams
    stop_ids: frozenset[int]
    stream: random.Random
    wants_prompt_logprobs: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    supports: list[np.ndarray] = field(default_factory=list)
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
        if token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.sampling.max_new_tokens:
            self.finish_reason = "length"

    def to_generation(self) -> Generation:
        assert self.finish_reason is not None
        return Generation(
            token_ids=np.asarray(self.token_ids, dtype=np.int64),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            weight_versions=np.asarray(self.versions, dtype=np.int64),
            finish_reason=self.finish_reason,
            prompt_logprobs=self.prompt_logprobs,
            supports=Supports.of(self.supports) if self.sampling.wants_supports else None,
        )


def draw_tokens(logits: Tensor, samples: Sequence[Sample]) -> tuple[list[int], list[float]]:
    """One token per row of ``logits`` (B, V), and its logprob over the whole vocabulary; of a truncated row of training
    over its support, which the sample keeps.

    The draw inverts the cumulative distribution (in float64) at one uniform number of the sample's own stream, so it
    does not depend on who else is in the batch. Greedy rows (temperature 0) take the largest logit; their logprob is
    that of the unscaled logits.
    """
    given = [sample.sampling.temperature for sample in samples]
    temperatures = torch.tensor([temperature or 1.0 for temperature in given], device=logits.device)
    logprobs = (logits.float() / temperatures[:, None]).log_softmax(dim=-1)
    probabilities = logprobs.double().exp_()
    for row, sample in enumerate(samples):
        if sample.sampling.truncates:
            _truncate(probabilities[row], sample.sampling)
        if sample.sampling.wants_supports:
            support = probabilities[row].nonzero()[:, 0]
            sample.supports.append(support.to("cpu", torch.int32).numpy())
            logprobs[row] -= logprobs[row, support].logsumexp(0)
    cumulative = probabilities.cumsum_(dim=-1)
    uniform = torch.tensor([s.stream.random() for s in samples], dtype=torch.float64, device=logits.device)
    drawn = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]
    tokens = drawn.clamp_max_(logits.shape[-1] - 1)
    if 0 in given:
        greedy = torch.tensor([temperature == 0 for temperature in given], device=logits.device)
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()


def _truncate(probabilities: Tensor, sampling: SamplingParams) -> None:
    """Zero, in place, what min-p, then top-k, then top-p leave out of one row."""
    if sampling.min_p > 0:
        probabilities[probabilities < sampling.min_p * probabilities.max()] = 0.0
    if 0 < sampling.top_k < probabilities.numel():
        kept = probabilities.topk(sampling.top_k)
        probabilities.zero_().scatter_(0, kept.indices, kept.values)
    if sampling.top_p < 1.0:
        ordered = probabilities.sort(descending=True)
        before = ordered.values.cumsum(0) - ordered.values
        outside = before >= sampling.top_p * ordered.values.sum()
        probabilities[ordered.indices[outside]] = 0.0
