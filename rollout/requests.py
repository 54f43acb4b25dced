"""Checks of requests before sampling, and derivation of seeds."""

from slime_like.config.rollout import MIN_TEMPERATURE
from slime_like.errors import EngineError
from slime_like.interfaces import GenerationRequest, SamplingParams
from slime_like.models.dimensions import ModelDimensions

_MASK = (1 << 64) - 1


def check_request(request: GenerationRequest, dimensions: ModelDimensions, max_model_len: int) -> None:
    """Refuse what cannot be served as asked.

    Raises:
        EngineError: names the request, the field and the remedy.
    """
    where = f"request {request.request_id}"
    prompt = request.prompt_tokens
    if len(prompt) == 0:
        raise EngineError(f"{where}: the prompt is empty; give at least one token")
    if min(prompt) < 0 or max(prompt) >= dimensions.vocab_size:
        raise EngineError(f"{where}: a prompt token lies outside the vocabulary of {dimensions.vocab_size}")
    if request.num_samples < 1:
        raise EngineError(f"{where}: num_samples={request.num_samples}; ask for at least 1")
    if len(prompt) + request.sampling.max_new_tokens > max_model_len:
        raise EngineError(
            f"{where}: {len(prompt)} prompt tokens and max_new_tokens={request.sampling.max_new_tokens} exceed the "
            f"engine's {max_model_len}; raise rollout.max_model_len or shorten one of them"
        )
    if any(not 0 <= token < dimensions.vocab_size for token in request.sampling.stop_token_ids):
        raise EngineError(f"{where}: a stop token id lies outside the vocabulary of {dimensions.vocab_size}")
    _check_sampling(request.sampling, where)


def stop_ids(sampling: SamplingParams, dimensions: ModelDimensions) -> tuple[int, ...]:
    """The ids that end a response: those of the request, or else the model's EOS ids."""
    return sampling.stop_token_ids or dimensions.eos_token_ids


def truncates(sampling: SamplingParams) -> bool:
    """True where top-p or top-k cut the sampled distribution."""
    return sampling.top_p < 1.0 or sampling.top_k > 0


def sample_seed(seed: int, index: int) -> int:
    """Seed of sample ``index``, in [0, 2**62).

    Consecutive samples get consecutive seeds from a scrambled start, so that the samples of seeds 1 and 2 never meet
    (SplitMix64's finaliser).
    """
    value = (seed + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (((value ^ (value >> 31)) >> 3) + index) & ((1 << 62) - 1)


def _check_sampling(sampling: SamplingParams, where: str) -> None:
    if sampling.max_new_tokens < 1:
        raise EngineError(f"{where}: max_new_tokens={sampling.max_new_tokens}; ask for at least 1")
    if sampling.temperature < 0 or 0 < sampling.temperature < MIN_TEMPERATURE:
        raise EngineError(f"{where}: temperature={sampling.temperature}; use 0 (greedy) or at least {MIN_TEMPERATURE}")
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"{where}: top_p={sampling.top_p}; use a value in (0, 1]")
    if sampling.training and truncates(sampling):
        raise EngineError(
            f"{where}: top_p={sampling.top_p} and top_k={sampling.top_k} change the sampled distribution, so its "
            "logprobs could not be trained on; use top_p=1 and top_k=-1 for training"
        )
