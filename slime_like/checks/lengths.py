"""Checks that every sequence fits the model, the engine and a micro-batch, and that token ids exist."""

from collections.abc import Iterator

from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.models.dimensions import ModelDimensions

_BUDGET = "trainer.target_tokens_per_batch"


def stop_token_problems(rollout: RolloutConfig, dimensions: ModelDimensions) -> Iterator[str]:
    for token in rollout.stop_token_ids:
        if not 0 <= token < dimensions.vocab_size:
            yield f"rollout.stop_token_ids={token} is not a token of the model; use 0 to {dimensions.vocab_size - 1}"


def length_problems(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    most, longest = dimensions.max_position_embeddings, config.rollout.max_model_len
    prompt, extended = config.data.max_prompt_tokens, _yarn_remedy(dimensions)
    responses = {"rollout": config.rollout.max_new_tokens}
    if config.evaluation.files and config.evaluation.max_new_tokens is not None:
        responses["evaluation"] = config.evaluation.max_new_tokens
    for section, response in responses.items():
        yield from _too_long(prompt, section, response, "rollout.max_model_len", config.max_model_len, ", or raise it")
        yield from _too_long(prompt, section, response, "the model's max_position_embeddings", most, extended)
    if longest is not None and longest > most:
        problem = f"rollout.max_model_len={longest} is more than the model's max_position_embeddings"
        yield f"{problem}; use at most {most}{extended}"


def budget_problems(config: RunConfig) -> Iterator[str]:
    """Check the token budget. Rows of an agent may be as long as the engine's longest sequence."""
    longest, budget = config.max_model_len, config.trainer.target_tokens_per_batch
    if not config.rollout.agent.is_set:
        lengths = config.data.max_prompt_tokens, "rollout", config.rollout.max_new_tokens
        yield from _too_long(*lengths, _BUDGET, budget, ", or raise it")
    elif longest > budget:
        yield (
            f"rollout.max_model_len={longest} is more than {_BUDGET}={budget}, which must hold an agent's whole "
            "history; lower it, or raise the other"
        )


def _yarn_remedy(dimensions: ModelDimensions) -> str:
    """Return the other remedy for YaRN: engines serve ``max_position_embeddings`` and don't apply the factor to it."""
    scaling = dimensions.rope_scaling or {}
    original = scaling.get("original_max_position_embeddings", 0)
    reach = int(original * scaling.get("factor", 0))
    if scaling.get("rope_type") != "yarn" or reach <= dimensions.max_position_embeddings:
        return ""
    written = f"max_position_embeddings: {reach} and original_max_position_embeddings: {original}"
    return f", or for the whole range of YaRN write {written} to the model's config.json"


def _too_long(prompt: int, section: str, response: int, what: str, limit: int, otherwise: str) -> Iterator[str]:
    if prompt + response > limit:
        yield (
            f"data.max_prompt_tokens={prompt} and {section}.max_new_tokens={response} make {prompt + response} tokens, "
            f"more than {what}={limit}; lower them{otherwise}"
        )
