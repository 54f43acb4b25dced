"""Requests and responses as all engines handle them: checks, seeds, finish reasons, versions."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np

from slime_like.config.rollout import LARGEST_SUPPORT, MIN_TEMPERATURE
from slime_like.errors import EngineError
from slime_like.interfaces import GenerationRequest, SamplingParams, Supports
from slime_like.models.dimensions import ModelDimensions

FinishReason: TypeAlias = Literal["stop", "length", "abort"]

_MASK = (1 << 64) - 1
_NO_LOGPROB = -1e30
"""Engines return -inf, or the smallest number of the type."""
_MASS_ROUNDING = 1e-3


def check_request(
    request: GenerationRequest,
    dimensions: ModelDimensions,
    max_model_len: int,
    returns_supports: bool = False,
    prompt_fields: Collection[str] = (),
) -> None:
    """Check that the request can be served as asked.

    Args:
        returns_supports: the engine returns the support of each token for training.
        prompt_fields: fields of prompts that the engine uses.

    Raises:
        EngineError: names the field and the remedy.
    """

    def rejection(problem: str, remedy: str = "") -> EngineError:
        return EngineError(problem, code="bad-request", who=f"request {request.request_id}", remedy=remedy)

    sampling, prompt = request.sampling, request.prompt.token_ids
    new_tokens, vocab_size = sampling.max_new_tokens, dimensions.vocab_size
    if len(prompt) == 0:
        raise rejection("the prompt is empty", "give at least one token")
    if others := sorted(request.prompt.fields.keys() - set(prompt_fields)):
        raise rejection(f"the engine does not use the prompt's {', '.join(others)}", "choose another rollout.engine")
    if any(not 0 <= token < vocab_size for token in (min(prompt), max(prompt), *sampling.stop_token_ids)):
        raise rejection(f"a prompt token or stop token is outside the vocabulary of {vocab_size}")
    if request.num_samples < 1 or new_tokens < 1:
        raise rejection(f"num_samples={request.num_samples}, max_new_tokens={new_tokens}", "ask for at least 1 each")
    if len(prompt) + new_tokens > max_model_len:
        problem = f"{len(prompt)} prompt tokens and max_new_tokens={new_tokens} exceed the engine's {max_model_len}"
        raise rejection(problem, "raise rollout.max_model_len or shorten one of them")
    if sampling.temperature < 0 or 0 < sampling.temperature < MIN_TEMPERATURE:
        raise rejection(f"temperature={sampling.temperature}", f"use 0 (greedy) or at least {MIN_TEMPERATURE}")
    if not 0 < sampling.top_p <= 1:
        raise rejection(f"top_p={sampling.top_p}", "use a value in (0, 1]")
    if not 0 <= sampling.min_p <= 1:
        raise rejection(f"min_p={sampling.min_p}", "use a value in [0, 1]")
    if sampling.wants_supports and not (returns_supports and 0 < sampling.top_k <= LARGEST_SUPPORT):
        cut = f"top_p={sampling.top_p}, top_k={sampling.top_k} and min_p={sampling.min_p}"
        remedy = f"top_k up to {LARGEST_SUPPORT} with an engine that returns supports"
        problem = f"{cut} change the sampled distribution, so its logprobs could not be trained on"
        raise rejection(problem, f"use top_p=1, top_k=-1 and min_p=0 for training, or {remedy}")


def stop_ids(sampling: SamplingParams, dimensions: ModelDimensions) -> tuple[int, ...]:
    """Return the ids that end a response: the request's and, unless ignored, the model's EOS ids."""
    eos = () if sampling.ignore_eos else dimensions.eos_token_ids
    return tuple(dict.fromkeys((*sampling.stop_token_ids, *eos)))


class StopTexts:
    """Search for stop strings in sampled ids. Special tokens are text there.

    SGLang takes it as a request's tokenizer. The attributes keep SGLang from ending a response at a tokenizer's EOS.
    """

    eos_token_id = additional_stop_token_ids = None

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def end(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Return whether the last of these ids completes one of the strings."""
        tail = self.decode(token_ids[-1 - stop_window(stop) :])
        return any(text in tail for text in stop)


def stop_window(stop: Iterable[str]) -> int:
    """Return the most tokens that a stop string has: one per byte."""
    return max(len(text.encode()) for text in stop)


def supports_of(token_ids: np.ndarray, logprobs: np.ndarray, engine: str) -> Supports:
    """Build supports from an engine's likeliest tokens. Their logprobs are over the truncated distribution.

    Args:
        token_ids, logprobs: (n, w), in any order; tokens outside the support have logprob ``-inf``.

    Raises:
        EngineError: the support has more tokens than these.
    """
    is_kept, mass = logprobs > _NO_LOGPROB, np.exp(logprobs.astype(np.float64)).sum(1)
    if len(mass) and abs(mass - 1.0).max() > _MASS_ROUNDING:
        likeliest = f"the {token_ids.shape[1]} likeliest ones (their probability is {mass.min():.4f})"
        problem = f"{engine} drew a token from more than {likeliest}, because many logits are equal"
        head = "a head in float32 (vLLM: rollout.engine_args.hf_overrides.head_dtype)"
        raise EngineError(problem, code="support-incomplete", remedy=f"use another rollout.top_k, or {head}")
    return Supports(token_ids[is_kept].astype(np.int32), is_kept.sum(1).astype(np.int32))


def finish_reason(request: GenerationRequest, engine: str, reason: str | None, shown: Any) -> FinishReason:
    """Return the engine's finish ``reason`` if the interface knows it. Errors show ``shown``."""
    if reason not in get_args(FinishReason):
        who = f"request {request.request_id}"
        raise EngineError(
            f"{engine} ended the response with {shown}", code="finish-reason", who=who, remedy="see its log"
        )
    return cast(FinishReason, reason)


def weight_versions(count: int, current: int, spans: Iterable[tuple[int, int, str]]) -> np.ndarray:
    """Return versions (count,) int64 from (start, end, version) spans; ``current`` outside of them."""
    versions = np.full(count, current, dtype=np.int64)
    for start, end, version in spans:
        versions[start:end] = int(version)
    return versions


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of sample ``index``, in [0, 2**62).

    Consecutive samples get consecutive seeds. The first one is scrambled by SplitMix64's finalizer, so the samples of
    seeds 1 and 2 do not overlap.
    """
    value = (seed + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (((value ^ (value >> 31)) >> 3) + index) & ((1 << 62) - 1)
