"""Requests from prompts, and trajectories from answers."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from slime_like.agents.responses import ResponseForm, response_form
from slime_like.config import AlgorithmConfig, DataConfig, EvaluationConfig, ModelConfig, RolloutConfig
from slime_like.config.rollout import AgentConfig
from slime_like.data.prompts import Prompt
from slime_like.errors import ConfigError, EngineError
from slime_like.interfaces import ConversationTask, Generation, GenerationRequest, PromptInput, SamplingParams, Segment
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.tokenization import with_template_variables
from slime_like.trajectory import GroupedUnscoredTrajectories, UnscoredTrajectory


def stop_tokens(rollout: RolloutConfig, model: ModelConfig) -> tuple[int, ...]:
    """Return the ids that end a response: ``rollout.stop_token_ids`` and, unless ignored, the model's EOS ids."""
    eos = () if rollout.ignore_eos else ModelDimensions.from_checkpoint(model.path).eos_token_ids
    ids = tuple(dict.fromkeys((*rollout.stop_token_ids, *eos)))
    if not ids and not rollout.stop:
        raise ConfigError([f"model.path={model.path}: the checkpoint has no EOS token id; set rollout.stop_token_ids"])
    return ids


def training_sampling(rollout: RolloutConfig, model: ModelConfig) -> SamplingParams:
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.bounded_top_k,
        min_p=rollout.min_p,
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=stop_tokens(rollout, model),
        stop=rollout.stop,
        ignore_eos=rollout.ignore_eos,
    )


def evaluation_sampling(evaluation: EvaluationConfig, rollout: RolloutConfig, model: ModelConfig) -> SamplingParams:
    return SamplingParams(
        temperature=evaluation.temperature,
        max_new_tokens=evaluation.max_new_tokens or rollout.max_new_tokens,
        stop_token_ids=stop_tokens(rollout, model),
        stop=rollout.stop,
        ignore_eos=rollout.ignore_eos,
        training=False,
    )


def build_requests(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    num_samples: int,
    seed: int,
    label: str,
    greedy: bool = False,
) -> list[GenerationRequest]:
    """Build one request per prompt, in order. Seeds depend only on the run's seed and the group id, so a resumed run
    samples the same as an uninterrupted one."""
    return [
        GenerationRequest(
            request_id=f"{label}-{prompt.group_id}",
            prompt=prompt.input,
            sampling=sampling,
            num_samples=num_samples,
            seed=int(np.random.SeedSequence([seed, prompt.group_id]).generate_state(1)[0]),
            task=ConversationTask(prompt.answer, prompt.environment or {}, tuple(prompt.messages or ())),
            greedy=greedy,
        )
        for prompt in prompts
    ]


def parts_of(request: GenerationRequest) -> list[GenerationRequest]:
    """Return the request for the samples and, if a greedy response is wanted, the request for it."""
    if not request.greedy:
        return [request]
    sampling = replace(request.sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, training=False)
    name, batch = f"{request.request_id}-greedy", request.batch
    last = replace(request, request_id=name, sampling=sampling, num_samples=1)
    return [
        replace(part, greedy=False, batch=batch and replace(batch, size=2 * batch.size, place=2 * batch.place + at))
        for at, part in enumerate((request, last))
    ]


def routes_per_token(algorithm: AlgorithmConfig, model: ModelConfig) -> tuple[int, int] | None:
    """Return the layers and choices of a token's routes, if engines must return them."""
    if algorithm.routing_replay != "rollout":
        return None
    dimensions = ModelDimensions.from_checkpoint(model.path)
    return len(dimensions.expert_layers), dimensions.moe_top_k


def require_routes(
    generations: Sequence[Generation], request: GenerationRequest, per_token: tuple[int, int], engine: str
) -> None:
    """Raise ``EngineError`` unless every response has its routes, without -1. One without a token needs none."""
    for generation in generations:
        routes = generation.fields.get("routes")
        expected = (len(request.prompt.token_ids) + len(generation.token_ids) - 1, *per_token)
        found = "none" if routes is None else f"{routes.dtype} {routes.shape}"
        if len(generation.token_ids) and (routes is None or found != f"int16 {expected}" or routes.min() < 0):
            raise EngineError(
                f"the routes of request {request.request_id} are {found}, not int16 {expected} from 0",
                code="bad-routes",
                who=f"rollout.engine={engine}",
                remedy="set algorithm.routing_replay to none or old, or use another engine",
            )


def to_group(
    prompt: Prompt, generations: Sequence[Generation], temperature: float, greedy: bool = False
) -> GroupedUnscoredTrajectories:
    """Build the group of one prompt's samples, with one row per segment of a sample. With ``greedy``, the last sample
    is only rewarded.

    Raises:
        EngineError: a response is empty, its logprobs or versions do not cover every token, or the last segment is not
            the generation's response.
    """
    each = [[*_rows(prompt, one, f"{prompt.group_id}-{at}", temperature)] for at, one in enumerate(generations)]
    apart = each.pop() if greedy else []
    rows = [row for rollout in each for row in rollout]
    tokens = sum(row.total_len for row in rows)
    ids = _copy(prompt.input.token_ids, np.int64)
    return GroupedUnscoredTrajectories(rows, prompt.group_id, tokens, ids, prompt.whole_row, apart)


def _rows(prompt: Prompt, generation: Generation, rollout_id: str, temperature: float) -> Iterator[UnscoredTrajectory]:
    """Yield the rows of one sample. The last row has the conversation, which indexes the generation's response."""
    segments = generation.segments or (_whole(prompt.input, generation),)
    if not np.array_equal(segments[-1].token_ids, generation.token_ids):
        raise EngineError(
            "the last segment of a generation differs from its token_ids",
            code="bad-response",
            who=f"rollout {rollout_id}",
        )
    for row, segment in enumerate(segments):
        sequence_id = rollout_id if len(segments) == 1 else f"{rollout_id}.{row}"
        _require_complete(segment, sequence_id)
        versions = _copy(segment.weight_versions, np.int64)
        yield UnscoredTrajectory(
            prompt_tokens=_copy(segment.prompt.token_ids, np.int64),
            response_tokens=_copy(segment.token_ids, np.int64),
            prompt_len=len(segment.prompt.token_ids),
            response_len=len(segment.token_ids),
            logprobs=_copy(segment.logprobs, np.float32),
            answer=prompt.answer,
            sequence_id=sequence_id,
            rollout_id=rollout_id,
            policy_version=int(versions[0]),
            group_id=prompt.group_id,
            source=prompt.source,
            loss_mask=_copy(segment.loss_mask, np.bool_),
            weight_versions=versions,
            support_ids=None if segment.supports is None else _copy(segment.supports.token_ids, np.int32),
            support_sizes=None if segment.supports is None else _copy(segment.supports.sizes, np.int32),
            temperature=temperature,
            finish_reason=(segment is not segments[-1] and segment.finish_reason) or generation.finish_reason,
            conversation=generation.conversation if segment is segments[-1] else None,
            greedy_reward=None,
            **{name: _copy(values) for name, values in segment.prompt.fields.items()},
            **{name: _copy(values) for name, values in segment.fields.items()},
        )


def _whole(prompt: PromptInput, generation: Generation) -> Segment:
    """Build the row of a response without segments. All tokens carry loss; in a conversation, only turns do."""
    loss_mask = np.full(len(generation.token_ids), generation.conversation is None)
    for start, end in generation.conversation.turns if generation.conversation is not None else ():
        loss_mask[start:end] = True
    return Segment(
        prompt,
        generation.token_ids,
        generation.logprobs,
        generation.weight_versions,
        loss_mask,
        generation.supports,
        fields=generation.fields,
    )


def _require_complete(segment: Segment, sequence_id: str) -> None:
    length, logprobs = len(segment.token_ids), len(segment.logprobs)
    versions, mask = len(segment.weight_versions), len(segment.loss_mask)
    if min(length, len(segment.prompt.token_ids)) == 0 or {logprobs, versions, mask} != {length}:
        raise EngineError(
            f"the engine returned {length} tokens, {logprobs} logprobs, {versions} versions and {mask} mask entries "
            f"after a prompt of {len(segment.prompt.token_ids)}; a row has a prompt and at least one token, and one of "
            "each per token",
            code="bad-response",
            who=f"sequence {sequence_id}",
        )
    if segment.supports is not None and not (
        len(segment.supports) == length and segment.supports.hold(segment.token_ids)[segment.loss_mask].all()
    ):
        raise EngineError(
            "the engine returned a token that is not in the support that it returned with it",
            code="bad-support",
            who=f"sequence {sequence_id}",
        )


def _copy(values: np.ndarray | Sequence[int], dtype: type[np.generic] | None = None) -> torch.Tensor:
    """Copy to a tensor. Ray's arrays are read-only."""
    return torch.from_numpy(np.array(values, dtype=dtype))


Answer = TypeVar("Answer")
Generate = Callable[[GenerationRequest], Awaitable[list[Generation]]]
"""Type of an engine's ``generate``."""


def turn_form(data: DataConfig, agent: AgentConfig, tokenizer: Any) -> ResponseForm:
    """Return the form of the run's turns. Its tokenizer gives the chat template the run's variables."""
    tokenizer = with_template_variables(tokenizer, data.chat_template_kwargs)
    return response_form(tokenizer, agent.tool_parser)


def turn_request(
    request: GenerationRequest, name: str, prompt: PromptInput, limit: int, turn: tuple[int, ...]
) -> GenerationRequest:
    """Build the engine's request for one turn of one sample of ``request``.

    Args:
        name: the turn's name within ``request``.
        prompt: everything before the turn.
        limit: limit on the turn's new tokens.
        turn: numbers of the sample and the turn. They alone determine the turn's seed, so a repeated rollout is the
            same in whatever order turns arrive.
    """
    seed = None if request.seed is None else int(np.random.SeedSequence([request.seed, *turn]).generate_state(1)[0])
    return replace(
        request,
        request_id=f"{request.request_id}/{name}",
        prompt=prompt,
        sampling=replace(request.sampling, max_new_tokens=limit),
        num_samples=1,
        seed=seed,
        prompt_logprobs=False,
        task=None,
        batch=None,
    )


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Gather all results in order; a failure or cancellation cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
