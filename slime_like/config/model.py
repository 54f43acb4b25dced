"""Which model, in which precision."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from slime_like.config.base import Section
from slime_like.config.trainer import ParallelConfig


class ModelConfig(Section):
    """The policy's starting point. Every dimension is read from the checkpoint's own ``config.json``."""

    path: Path = Field(description="Hugging Face checkpoint directory the policy starts from.")
    weights: Path | None = Field(
        None,
        description="Checkpoint that the trainer takes the policy's weights from instead: what `slime-like convert "
        "to-megatron` wrote, or a run's checkpoints/step-N (of which the weights alone are used). `path` still gives "
        "dimensions and tokenizer, and what engines hold until the first sync.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Precision of weights and activations, in trainer and engine alike."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the checkpoint.")


class ReferenceConfig(Section):
    """The reference policy of the KL term. Used only when a KL coefficient is above 0."""

    path: Path | None = Field(
        None, description="Hugging Face checkpoint of the reference; none means the policy as it starts."
    )
    placement: Literal["trainer", "workers"] = Field(
        "trainer",
        description="Who scores with it: the trainer ranks, which swap its weights in (so that it must have the "
        "policy's sizes), or workers on devices of their own, which score groups while others are being sampled.",
    )
    update_interval: int = Field(
        0,
        ge=0,
        description="After every so many steps the policy becomes the reference; 0 keeps the one that the run starts "
        "with. Workers may score groups that were sampled ahead (`rollout.max_staleness`) with an earlier one.",
    )
    workers: int = Field(1, ge=1, description="For placement workers: how many; a group goes to the least busy one.")
    parallel: ParallelConfig = Field(
        default_factory=lambda: ParallelConfig(), description="For placement workers: the layout of each."
    )
    max_worker_restarts: int = Field(
        2,
        ge=0,
        description="For placement workers: how many are started anew after they failed, over the whole run; what they "
        "had goes to others, or waits. The run ends when none is left.",
    )
