"""Which ways of sampling a training step can be built on: whole distributions, ahead of training, streamed."""

from collections.abc import Iterator

from slime_like.config.algorithm import BATCH_ADVANTAGES, GROUP_ADVANTAGES
from slime_like.config.rollout import LARGEST_SUPPORT
from slime_like.config.run import RunConfig

VLLM_MAX_TEMPERATURE = 2.0
"""vLLM's ``SamplingParams._verify_args`` (vllm/sampling_params.py, from 0.32.0) rejects a request above it."""


def temperature_problem(config: RunConfig, field: str, temperature: float) -> str | None:
    """Why the engine does not sample at the temperature, with the remedy; ``None`` where it does."""
    if config.rollout.engine != "vllm" or temperature <= VLLM_MAX_TEMPERATURE:
        return None
    return (
        f"{field}={temperature} is more than rollout.engine=vllm samples at; use at most {VLLM_MAX_TEMPERATURE:g}, "
        "or rollout.engine: sglang"
    )


def sampling_problems(config: RunConfig) -> Iterator[str]:
    """Training needs samples of the whole distribution, in groups that can be compared; ahead of it only with care."""
    rollout, algorithm, ahead = config.rollout, config.algorithm, config.rollout.max_staleness
    yield from _truncation_problems(config)
    if problem := temperature_problem(config, "rollout.temperature", rollout.temperature):
        yield problem
    if rollout.samples_per_prompt == 1 and algorithm.advantage in GROUP_ADVANTAGES:
        yield (
            f"rollout.samples_per_prompt=1 gives algorithm.advantage={algorithm.advantage} nothing to compare, so that "
            "every advantage is 0; use at least 2, or advantage: reinforce_pp"
        )
    buffer = algorithm.overlong_buffer
    if buffer is not None and buffer > rollout.max_new_tokens:
        yield (
            f"algorithm.overlong_buffer={buffer} is more than rollout.max_new_tokens={rollout.max_new_tokens}, below "
            "which the penalty grows; use at most that"
        )
    if ahead > 0 and config.cluster.placement == "colocated":
        yield (
            f"rollout.max_staleness={ahead} lets engines and trainers work at once, but cluster.placement=colocated "
            "has them take turns on the same devices; use placement: separate, or max_staleness: 0"
        )
    if ahead > 0 and "importance_correction" not in algorithm.model_fields_set:
        yield (
            f"rollout.max_staleness={ahead} trains on samples of older weights, which biases the gradient unless "
            "algorithm.importance_correction corrects for it; set it to truncate or mask, or to none if that is meant"
        )
    if rollout.oversample > 1 and ahead > 0:
        yield (
            f"rollout.oversample={rollout.oversample:g} aborts what is late, but with rollout.max_staleness={ahead} it "
            "is trained later instead; use oversample: 1, or max_staleness: 0"
        )
    if rollout.drop_zero_spread and rollout.samples_per_prompt == 1:
        yield (
            "rollout.drop_zero_spread=true drops every group of rollout.samples_per_prompt=1; use at least 2 samples, "
            "or drop_zero_spread: false"
        )


_SUPPORTING = ("vllm", "sglang", "transformers")


def _truncation_problems(config: RunConfig) -> Iterator[str]:
    """Truncated samples are trained on over the tokens that they were drawn from, where an engine says which."""
    rollout = config.rollout
    if rollout.bounded_top_k == -1:
        return
    cut = f"rollout.top_p={rollout.top_p:g}, top_k={rollout.top_k} and min_p={rollout.min_p:g}"
    whole = "or use top_p: 1, top_k: -1 and min_p: 0"
    if rollout.top_k > LARGEST_SUPPORT:
        yield f"{cut}: training reads what a distribution was cut to; use top_k up to {LARGEST_SUPPORT}, {whole}"
    if rollout.top_k == 1 or rollout.min_p == 1:
        yield f"{cut}: every sample of a prompt is its likeliest response, with no gradient; use more, {whole}"
    if rollout.engine not in _SUPPORTING:
        names = ", ".join(_SUPPORTING)
        yield f"{cut}: rollout.engine={rollout.engine} does not say what it cut to; use one of {names}, {whole}"
    if (backend := config.trainer.backend) not in ("megatron", "fsdp"):
        yield f"{cut}: trainer.backend={backend} does not read supports; use megatron or fsdp, {whole}"


def rejected_for_several_rows(config: RunConfig) -> Iterator[str]:
    """Settings that rollouts of several rows cannot have: rows lie in different packs, on different ranks.

    For configurations whose rollouts may have several rows; others may have these settings.
    """
    remedies = {"loss": "use one per token, e.g. ppo_clip or cispo", "importance_level": "use token"}
    for setting in config.algorithm.per_sequence:
        yield (
            f"algorithm.{setting} needs all tokens of a sequence at once, but rollouts of several rows are trained row "
            f"by row; {remedies.get(setting.partition('=')[0], 'set it to none')}"
        )


def streaming_problems(config: RunConfig) -> Iterator[str]:
    """Can a step's gradient be added up before its last sample is known?"""
    if not config.rollout.stream:
        return
    algorithm, remedy = config.algorithm, "or rollout.stream: false"
    if config.cluster.placement == "colocated":
        yield (
            "rollout.stream=true runs trainers and engines at the same time, but with cluster.placement=colocated they "
            f"use the same devices in turn; use placement: separate, {remedy}"
        )
    if algorithm.epochs * algorithm.minibatches > 1:
        yield (
            f"rollout.stream=true trains while others are sampled, but several updates need the whole batch: "
            f"algorithm.epochs={algorithm.epochs}, algorithm.minibatches={algorithm.minibatches}; set both to "
            f"1, {remedy}"
        )
    if algorithm.advantage in BATCH_ADVANTAGES:
        yield (
            f"rollout.stream=true needs advantages before the batch is complete, and algorithm.advantage="
            f"{algorithm.advantage} normalises over all of it; use one that compares within groups, {remedy}"
        )
    if algorithm.kl_reward_coef > 0:
        yield (
            f"rollout.stream=true computes advantages before the KL is known, but algorithm.kl_reward_coef="
            f"{algorithm.kl_reward_coef:g} subtracts it from the rewards; use kl_coef instead, {remedy}"
        )
    if algorithm.importance_normalize:
        yield (
            "rollout.stream=true trains before all importance weights are known, and algorithm.importance_normalize="
            f"true divides by their mean; set it to false, {remedy}"
        )
    if algorithm.moe_aux_loss_coef > 0:
        yield (
            f"algorithm.moe_aux_loss_coef={algorithm.moe_aux_loss_coef:g} adds a loss with a separate denominator, "
            "and with rollout.stream=true neither is known while gradients are added up; set it to 0, " + remedy
        )
    if config.debug.shuffle_advantages:
        yield (
            "debug.shuffle_advantages=true permutes the advantages of a whole batch, which rollout.stream=true does "
            f"not wait for; set it to false, {remedy}"
        )
