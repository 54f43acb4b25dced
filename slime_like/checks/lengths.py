"""Every sequence must fit the model, the engine and a micro-batch; token ids must exist."""

from collections.abc import Iterator

from slime_like.config.run import RunConfig
from slime_like.models.dimensions import ModelDimensions

_RAISE, _BUDGET = ", or raise it", "trainer.target_tokens_per_batch"


def stop_token_problems(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    for token in config.rollout.stop_token_ids:
        if not 0 <= token < dimensions.vocab_size:
            yield (
                f"rollout.stop_token_ids={token} is not a token of the model; "
                f"its ids are 0 to {dimensions.vocab_size - 1}"
            )


def length_problems(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    yield from _served(config, "rollout", config.rollout.max_new_tokens, dimensions)
    response, longest = config.evaluation.max_new_tokens, config.rollout.max_model_len
    if config.evaluation.files and response is not None:
        yield from _served(config, "evaluation", response, dimensions)
    if longest is not None and longest > dimensions.max_position_embeddings:
        yield (
            f"rollout.max_model_len={longest} is more than the model's "
            f"max_position_embeddings={dimensions.max_position_embeddings}; use at most that"
        )


def budget_problems(config: RunConfig) -> Iterator[str]:
    """Rows of an agent may be as long as the engine's longest sequence."""
    longest, budget, field = config.max_model_len, config.trainer.target_tokens_per_batch, _BUDGET
    if not config.rollout.agent.is_set:
        yield from _too_long(config, "rollout", config.rollout.max_new_tokens, field, budget, _RAISE)
    elif longest > budget:
        yield (
            f"rollout.max_model_len={longest} is more than {field}={budget}, which must hold a rollout.agent's whole "
            "history; lower it, or raise the other"
        )


def _served(config: RunConfig, section: str, response: int, dimensions: ModelDimensions) -> Iterator[str]:
    yield from _too_long(config, section, response, "rollout.max_model_len", config.max_model_len, _RAISE)
    most = dimensions.max_position_embeddings
    yield from _too_long(config, section, response, "the model's max_position_embeddings", most, "")


def _too_long(config: RunConfig, section: str, response: int, what: str, limit: int, otherwise: str) -> Iterator[str]:
    prompt = config.data.max_prompt_tokens
    if prompt + response > limit:
        yield (
            f"data.max_prompt_tokens={prompt} and {section}.max_new_tokens={response} make {prompt + response} tokens, "
            f"more than {what}={limit}; lower them{otherwise}"
        )
