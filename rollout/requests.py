"""Parts of requests and responses that are the same for all engines: checks, seeds, reasons, versions."""

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np

from slime_like.checks.sampling import LARGEST_SUPPORT
from slime_like.config.rollout import MIN_TEMPERATURE
from slime_like.errors import EngineError
from slime_like.interfaces import GenerationRequest, SamplingParams
from slime_like.models.dimensions import ModelDimensions

FinishReason: TypeAlias = Literal["stop", "length", "abort"]

_MASK = (1 << 64) - 1


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
    if needs_supports(sampling) and not (returns_supports and 0 < sampling.top_k <= LARGEST_SUPPORT):
        raise refusal(
            f"top_p={sampling.top_p} and top_k={sampling.top_k} change the sampled distribution, so its logprobs "
            "could not be trained on",
            f"use top_p=1 and top_k=-1 for training, or top_k up to {LARGEST_SUPPORT} with the transformers engine",
        )


def stop_ids(sampling: SamplingParams, dimensions: ModelDimensions) -> tuple[int, ...]:
    """The ids that end a response: those of the request, or else the model's EOS ids."""
    return sampling.stop_token_ids or dimensions.eos_token_ids


def needs_supports(sampling: SamplingParams) -> bool:
    """True where what is sampled is trained on, and tokens were drawn from a part of the vocabulary."""
    return sampling.training and truncates(sampling)


def truncates(sampling: SamplingParams) -> bool:
    """True where top-p or top-k cut the sampled distribution."""
    return sampling.top_p < 1.0 or sampling.top_k > 0


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
