"""The policy and the reference."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from slime_like.config.base import Section
from slime_like.config.trainer import ParallelConfig


class ModelConfig(Section):
    """The policy's starting point. Every dimension is read from the checkpoint's own ``config.json``."""

    path: Path = Field(description="Hugging Face checkpoint directory of the initial policy.")
    weights: Path | None = Field(
        None,
        description="Checkpoint with the policy's initial weights: output of `slime-like convert to-megatron`, or a "
        "run's checkpoints/step-N. `path` still provides dimensions, tokenizer and the engines' first "
        "weights.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Precision of weights and activations in trainer and engine."
    )
    trust_remote_code: bool = Field(False, description="Run Python code from the checkpoint.")


class ReferenceConfig(Section):
    """The reference policy of the KL term. Used only when a KL coefficient is above 0."""

    path: Path | None = Field(None, description="Hugging Face checkpoint of the reference; none: the initial policy.")
    placement: Literal["trainer", "workers"] = Field(
        "trainer",
        description="trainer: the trainer ranks swap in its weights, which must have the policy's sizes. workers: "
        "separate devices, which score groups while others are being sampled.",
    )
    update_interval: int = Field(
        0,
        ge=0,
        description="Steps after which the policy becomes the reference; 0 keeps the initial one. Workers may score "
        "groups sampled ahead (`rollout.max_staleness`) with an earlier one.",
    )
    workers: int = Field(1, ge=1, description="Number of reference workers; a group goes to the least busy one.")
    parallel: ParallelConfig = Field(ParallelConfig(), description="Layout of each reference worker.")
    max_worker_restarts: int = Field(
        2,
        ge=0,
        description="Restarts of failed reference workers in a run; their groups go to others, or wait. The run "
        "fails if none is left.",
    )
