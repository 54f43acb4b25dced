"""Parts of requests and responses that are the same for all engines: checks, seeds, reasons, versions."""

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np

from slime_like.config.rollout import LARGEST_SUPPORT, MIN_TEMPERATURE
from slime_like.errors import EngineError
from slime_like.interfaces import GenerationRequest, SamplingParams, Supports
from slime_like.models.dimensions import ModelDimensions

FinishReason: TypeAlias = Literal["stop", "length", "abort"]

_MASK = (1 << 64) - 1
_NO_LOGPROB = -1e30
"""Engines write -inf, or the smallest number of its type."""
_MASS_ROUNDING = 1e-3


def check_request(
    request: GenerationRequest, dimensions: ModelDimensions, max_model_len: int, returns_supports: bool = False
) -> None:
    """Raise ``EngineError`` where it cannot be served as asked, with the field and the remedy.

    Args:
        returns_supports: the engine can say which tokens each token of training was drawn from.
    """

    def refusal(problem: str, remedy: str = "") -> EngineError:
        return EngineError(problem, code="bad-request", who=f"request {request.request_id}", remedy=remedy)

    sampling, most_tokens = request.sampling, request.sampling.max_new_tokens
    prompt = request.prompt_tokens
    if len(prompt) == 0:
        raise refusal("the prompt is empty", "give at least one token")
    if min(prompt) < 0 or max(prompt) >= dimensions.vocab_size:
        raise refusal(f"a prompt token is outside the vocabulary of {dimensions.vocab_size}")
    if request.num_samples < 1:
        raise refusal(f"num_samples={request.num_samples}", "ask for at least 1")
    if len(prompt) + most_tokens > max_model_len:
        raise refusal(
            f"{len(prompt)} prompt tokens and max_new_tokens={most_tokens} exceed the engine's {max_model_len}",
            "raise rollout.max_model_len or shorten one of them",
        )
    if any(not 0 <= token < dimensions.vocab_size for token in sampling.stop_token_ids):
        raise refusal(f"a stop token id is outside the vocabulary of {dimensions.vocab_size}")
    if most_tokens < 1:
        raise refusal(f"max_new_tokens={most_tokens}", "ask for at least 1")
    if sampling.temperature < 0 or 0 < sampling.temperature < MIN_TEMPERATURE:
        raise refusal(f"temperature={sampling.temperature}", f"use 0 (greedy) or at least {MIN_TEMPERATURE}")
    if not 0 < sampling.top_p <= 1:
        raise refusal(f"top_p={sampling.top_p}", "use a value in (0, 1]")
    if not 0 <= sampling.min_p <= 1:
        raise refusal(f"min_p={sampling.min_p}", "use a value in [0, 1]")
    is_known = returns_supports and 0 < sampling.top_k <= LARGEST_SUPPORT
    if sampling.wants_supports and not is_known:
        raise refusal(
            f"top_p={sampling.top_p}, top_k={sampling.top_k} and min_p={sampling.min_p} change the sampled "
            "distribution, so its logprobs could not be trained on",
            f"use top_p=1, top_k=-1 and min_p=0 for training, or top_k up to {LARGEST_SUPPORT} with an engine that "
            "returns supports",
        )


def stop_ids(sampling: SamplingParams, dimensions: ModelDimensions) -> tuple[int, ...]:
    """The ids that end a response: those of the request, or else the model's EOS ids."""
    return sampling.stop_token_ids or dimensions.eos_token_ids


def supports_of(token_ids: np.ndarray, logprobs: np.ndarray, engine: str) -> Supports:
    """Supports from an engine's likeliest tokens, whose logprobs are over what it drew from.

    Args:
        token_ids, logprobs: (n, w), in any order; what was left out has no probability.

    Raises:
        EngineError: these are not all tokens that it drew from.
    """
    is_kept, mass = logprobs > _NO_LOGPROB, np.exp(logprobs.astype(np.float64)).sum(1)
    if len(mass) and abs(mass - 1.0).max() > _MASS_ROUNDING:
        raise EngineError(
            f"{engine} drew a token from more than the {token_ids.shape[1]} likeliest ones (their probability is "
            f"{mass.min():.4f})",
            code="support-incomplete",
            remedy="many logits are equal: use another rollout.top_k, or, where the engine's head computes in "
            "bfloat16, let it compute in float32 (vLLM: rollout.engine_args.hf_overrides.head_dtype)",
        )
    return Supports(token_ids[is_kept].astype(np.int32), is_kept.sum(1).astype(np.int32))


def finish_reason(request: GenerationRequest, engine: str, reason: str | None, shown: Any) -> FinishReason:
    """The reason for which ``engine`` ended a response, in the interface's words; ``shown`` is its report of it."""
    if reason not in get_args(FinishReason):
        who = f"request {request.request_id}"
        raise EngineError(f"{engine} ended it with {shown}", code="finish-reason", who=who, remedy="see its log")
    return cast(FinishReason, reason)


def weight_versions(count: int, current: int, spans: Iterable[tuple[int, int, str]]) -> np.ndarray:
    """(count,) int64 from (start, end, version) spans; ``current`` where there is none."""
    versions = np.full(count, current, dtype=np.int64)
    for start, end, version in spans:
        versions[start:end] = int(version)
    return versions


def sample_seed(seed: int, index: int) -> int:
    """Seed of sample ``index``, in [0, 2**62).

    Consecutive samples get consecutive seeds from a scrambled start, so that the samples of seeds 1 and 2 never meet
    (SplitMix64's finaliser).
    """
    value = (seed + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (((value ^ (value >> 31)) >> 3) + index) & ((1 << 62) - 1)
