"""How rollouts are generated and rewarded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from slime_like.config.base import Section

MIN_TEMPERATURE = 0.01
"""Lowest temperature above greedy that engines sample with as asked."""

ENVIRONMENT = "environment"
"""Stands for the rewards that ``rollout.environment`` gave on the way: nothing is left to compute."""


class EnvironmentConfig(Section):
    """Conversations: an environment answers the model's turns, and what it says carries no loss. A response is then
    everything after the prompt, and `rollout.max_new_tokens` bounds all of it."""

    name: str | None = Field(
        None,
        description="Environment: calculator, or import path `package.module:name`; none means responses of one turn.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the environment.")
    max_turns: int = Field(4, ge=1, description="Turns of the model in one conversation.")
    max_turn_tokens: int | None = Field(
        None, ge=1, description="Length limit of one turn, in tokens; none means what is left of the response."
    )
    max_observation_tokens: int = Field(
        256, ge=1, description="Tokens kept of what the environment says in one step, not counting the template's."
    )
    template: str | None = Field(
        None,
        description="Text around an observation, from the end of one turn to the beginning of the next, with "
        "{observation} in it; none takes it from the chat template, as what a tool says.",
    )
    workers: int = Field(1, ge=1, description="Worker processes of every engine.")
    start_timeout_s: float = Field(120.0, gt=0, description="Bound on a worker's start.")
    timeout_s: float = Field(
        10.0, gt=0, description="Bound on one step, also on its CPU time; over it the sample gets reward 0."
    )
    memory_mb: int = Field(1024, ge=128, description="Address-space limit of one worker, beyond its start-up size.")


class RolloutConfig(Section):
    """Inference engines and sampling."""

    engine: str = Field(
        "vllm", description="Engine name (entry-point group slime_like.engines): vllm, sglang, transformers."
    )
    python: Path | None = Field(
        None,
        description="Python of another environment that engines live in, where their packages do not fit beside the "
        "trainer's. It needs this distribution in the same version, without the extra `train`, and the engine; none "
        "is the environment of the run.",
    )
    num_engines: int = Field(1, ge=1, description="Engines to start; requests go to the least loaded one.")
    tensor: int = Field(1, ge=1, description="Tensor parallelism inside one engine.")
    prompts_per_step: int = Field(64, ge=1, description="Prompt groups per training step.")
    samples_per_prompt: int = Field(8, ge=1, description="Responses per prompt (the group size).")
    max_new_tokens: int = Field(256, ge=1, description="Length limit of a response, in tokens.")
    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, description="Sampling temperature of training rollouts.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus sampling; training needs 1.")
    top_k: int = Field(-1, ge=-1, description="Top-k sampling; training needs -1 (off).")
    stop_token_ids: tuple[int, ...] = Field(
        (), description="Token ids that end a response; none means the model's EOS ids."
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Longest sequence an engine serves; none means prompt limit plus response limit."
    )
    max_concurrent_requests: int = Field(1024, ge=1, description="Requests one engine is given at a time.")
    max_staleness: int = Field(
        0,
        ge=0,
        description="Weight versions that training may be ahead of the weights that sampled a response's first token. "
        "0 is strictly on-policy: sampling and training take turns. Above 0 they run side by side, new weights reach "
        "responses in the middle, and the batch of a step is whichever groups are ready first.",
    )
    stream: bool = Field(
        False,
        description="Train on the samples of a step while others of it are still being generated: micro-batches go to "
        "the trainers as they fill, and one division at the end makes the update that of the whole batch. For one "
        "update per step whose advantages need no more than their own group.",
    )
    oversample: float = Field(
        1.0,
        ge=1,
        description="Prompt groups sampled per group trained; when enough are ready the others are aborted. Needs "
        "max_staleness 0.",
    )
    drop_zero_spread: bool = Field(
        False,
        description="Drop groups whose samples all have the same reward, less the overlong penalty, and sample others "
        "in their place (DAPO's dynamic sampling).",
    )
    max_drops_per_step: int = Field(
        1000,
        ge=1,
        description="Groups that drop_zero_spread may drop for one step; beyond that the run ends: a task that is "
        "always or never solved teaches nothing.",
    )
    max_engine_restarts: int = Field(
        2,
        ge=0,
        description="Engines started anew after they died, over the whole run. Their requests go to other engines, "
        "from the beginning. 0 ends the run with the first death.",
    )
    environment: EnvironmentConfig = Field(
        default_factory=lambda: EnvironmentConfig(), description="What answers the model between its turns."
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments passed to the engine as they are, refused if unknown."
    )
    start_timeout_s: float = Field(300.0, gt=0, description="Bound on an engine's start.")
    request_timeout_s: float = Field(600.0, gt=0, description="Bound on one request.")


class RewardFunction(Section):
    """One reward function and its weight in the sum."""

    name: str = Field(
        description="Registered name (math_verify, format, length, http, majority), import path "
        "`package.module:name`, or environment: the sum of what rollout.environment gave."
    )
    weight: float = Field(1.0, description="Weight in the total reward.")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")


class RewardConfig(Section):
    """Reward functions and the processes they run in."""

    functions: tuple[RewardFunction, ...] = Field(
        (RewardFunction(name="math_verify"),),
        min_length=1,
        description="Reward functions; the total is their weighted sum.",
    )
    workers: int = Field(1, ge=1, description="Reward worker processes.")
    start_timeout_s: float = Field(120.0, gt=0, description="Bound on a reward worker's start.")
    timeout_s: float = Field(
        5.0,
        gt=0,
        description="Bound on scoring one response, or one group where a function is given whole groups; over it the "
        "sample, or the group, gets reward 0.",
    )
    memory_mb: int = Field(
        2048, ge=128, description="Address-space limit of one reward worker, beyond its start-up size."
    )

    @property
    def computed(self) -> tuple[RewardFunction, ...]:
        """The functions that reward workers call: all but the environment's own reward."""
        return tuple(function for function in self.functions if function.name != ENVIRONMENT)


class SyncConfig(Section):
    """How weights travel from trainer to engines."""

    transport: Literal["auto", "shared_memory", "gloo", "nccl", "cuda_ipc", "directory"] = Field(
        "auto",
        description="How bucket bytes travel; auto is shared_memory inside a host and gloo between hosts on CPUs, nccl "
        "between GPUs, and cuda_ipc where one engine shares the trainers' GPUs.",
    )
    directory: Path | None = Field(
        None, description="For transport directory: a directory that trainers and engines both see."
    )
    bucket_mb: float = Field(256.0, gt=0, description="Largest bucket, in MiB (a single larger tensor travels alone).")
    delta: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Send only elements that changed, bit for bit what a whole sync gives, at the price of a copy of "
        "the weights in host memory on both sides; auto is for 16-bit models over gloo or a directory.",
    )
    verify: bool = Field(True, description="Compare hashes of every tensor, and a logprob probe, after every sync.")
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="Bound on the probe's engine-to-trainer gap. In float32 on the largest difference of a logprob "
        "(default 1e-4); in bfloat16, whose rounding grows with the logits, on the root mean square of the differences "
        "over the standard deviation of the trainer's logprobs (default 0.15).",
    )
    timeout_s: float = Field(300.0, gt=0, description="Bound on one sync.")
