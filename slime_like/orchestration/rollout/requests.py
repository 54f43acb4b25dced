"""Requests from prompts, and trajectories from the answers."""

from collections.abc import Sequence

import numpy as np
import torch

from slime_like.config import RunConfig
from slime_like.data.prompts import Prompt
from slime_like.errors import ConfigError, EngineError
from slime_like.interfaces import Conversation, ConversationTask, Generation, GenerationRequest, SamplingParams
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import GroupedUnscoredTrajectories, UnscoredTrajectory


def stop_tokens(config: RunConfig) -> tuple[int, ...]:
    """Ids that end a response: ``rollout.stop_token_ids``, else the model's EOS ids."""
    ids = config.rollout.stop_token_ids or ModelDimensions.from_checkpoint(config.model.path).eos_token_ids
    if not ids:
        raise ConfigError(
            [f"model.path={config.model.path}: the checkpoint names no EOS token id; set rollout.stop_token_ids"]
        )
    return ids


def training_sampling(config: RunConfig) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=stop_tokens(config),
    )


def evaluation_sampling(config: RunConfig) -> SamplingParams:
    evaluation = config.evaluation
    return SamplingParams(
        temperature=evaluation.temperature,
        max_new_tokens=evaluation.max_new_tokens or config.rollout.max_new_tokens,
        stop_token_ids=stop_tokens(config),
        training=False,
    )


def build_requests(
    prompts: Sequence[Prompt], sampling: SamplingParams, num_samples: int, seed: int, label: str
) -> list[GenerationRequest]:
    """One request per prompt, in order. The seed depends on the run's seed and the group id alone, so that a resumed
    run samples what an uninterrupted one would have."""
    return [
        GenerationRequest(
            request_id=f"{label}-{prompt.group_id}",
            prompt_tokens=prompt.tokens,
            sampling=sampling,
            num_samples=num_samples,
            seed=int(np.random.SeedSequence([seed, prompt.group_id]).generate_state(1)[0]),
            task=ConversationTask(prompt.answer, prompt.environment or {}),
        )
        for prompt in prompts
    ]


def to_group(prompt: Prompt, generations: Sequence[Generation], temperature: float) -> GroupedUnscoredTrajectories:
    """The samples of one prompt as a group.

    Raises:
        EngineError: a response is empty, or its logprobs and versions do not cover it token for token.
    """
    prompt_tokens = torch.tensor(prompt.tokens, dtype=torch.int64)
    trajectories = [
        _to_trajectory(prompt, prompt_tokens, generation, index, temperature)
        for index, generation in enumerate(generations)
    ]
    return GroupedUnscoredTrajectories(trajectories, prompt.group_id, sum(t.total_len for t in trajectories))


def _to_trajectory(
    prompt: Prompt, prompt_tokens: torch.Tensor, generation: Generation, index: int, temperature: float
) -> UnscoredTrajectory:
    length = len(generation.token_ids)
    sequence_id = f"{prompt.group_id}-{index}"
    if length == 0 or len(generation.logprobs) != length or len(generation.weight_versions) != length:
        raise EngineError(
            f"the engine returned {length} tokens, {len(generation.logprobs)} logprobs and "
            f"{len(generation.weight_versions)} versions; a response has at least one token and one "
            "of each per token",
            code="bad-response",
            who=f"sequence {sequence_id}",
        )
    versions = _copy(generation.weight_versions, np.int64)
    return UnscoredTrajectory(
        prompt_tokens=prompt_tokens,
        response_tokens=_copy(generation.token_ids, np.int64),
        prompt_len=len(prompt_tokens),
        response_len=length,
        logprobs=_copy(generation.logprobs, np.float32),
        answer=prompt.answer,
        sequence_id=sequence_id,
        policy_version=int(versions[0]),
        group_id=prompt.group_id,
        loss_mask=_loss_mask(length, generation.conversation),
        weight_versions=versions,
        temperature=temperature,
        finish_reason=generation.finish_reason,
        conversation=generation.conversation,
    )


def _copy(values: np.ndarray, dtype: type[np.generic]) -> torch.Tensor:
    """A copy: Ray's arrays are read-only."""
    return torch.from_numpy(np.array(values, dtype=dtype))


def _loss_mask(length: int, conversation: Conversation | None) -> torch.Tensor:
    """(length,) True where the model sampled the token."""
    if conversation is None:
        return torch.ones(length, dtype=torch.bool)
    mask = torch.zeros(length, dtype=torch.bool)
    for start, end in conversation.turns:
        mask[start:end] = True
    return mask
