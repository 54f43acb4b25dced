"""The trainer: layout, optimizer, memory."""

from typing import Any, Literal

from pydantic import Field, field_validator

from slime_like.config.base import Section


class ParallelConfig(Section):
    """Size of every parallel axis. The number of trainer ranks is tensor * pipeline * context * data."""

    tensor: int = Field(1, ge=1, description="Tensor-parallel size.")
    pipeline: int = Field(1, ge=1, description="Pipeline-parallel size.")
    context: int = Field(1, ge=1, description="Context-parallel size.")
    data: int = Field(1, ge=1, description="Data-parallel size. auto: fill the cluster.")
    expert: int = Field(1, ge=1, description="Expert-parallel size.")
    sequence: bool = Field(False, description="Sequence parallelism inside the tensor-parallel group.")
    virtual_pipeline: int = Field(1, ge=1, description="Model chunks per pipeline stage.")

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0, le=1, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the decay.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay after the warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay, except for norms and biases.")
    final_weight_decay: float | None = Field(None, ge=0)
    """Weight decay of the last step, reached linearly; none: constant."""
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta2.")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    clip_grad: float = Field(1.0, gt=0, description="Global gradient-norm bound.")
    distributed: bool = Field(True, description="Shard optimizer state over data-parallel ranks.")
    offload: bool = False
    """Keep optimizer state in host memory, and update on the CPU."""
    overlap: bool = False
    """Sum gradients during backward, and gather weights during forward."""
    overlap_bucket_params: int | None = Field(None, ge=1)
    """Parameters per message of `overlap`."""


class FsdpConfig(Section):
    """Settings of the backend `fsdp`."""

    reshard_after_forward: bool = True
    """Free gathered weights after a layer's forward pass."""
    accumulate: Literal["whole", "sharded"] = "whole"
    """Each rank keeps float32 gradients of the whole model, or only its shard."""


class TrainerConfig(Section):
    """Trainer ranks."""

    backend: str = "megatron"
    """megatron, fsdp (Hugging Face's models under FSDP2) or a custom backend."""
    parallel: ParallelConfig = Field(ParallelConfig(), description="Parallel layout.")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="Optimizer.")
    fsdp: FsdpConfig = Field(FsdpConfig(), description="Settings of the backend fsdp.")
    backend_args: dict[str, Any] = Field(default_factory=dict, description="Settings of a custom backend.")
    target_tokens_per_batch: int = Field(8192, ge=16)
    """Token budget of one packed micro-batch; every sequence must fit."""
    share_prefixes: Literal[False, "prompts", "tree"] = False
    """Compute shared prefixes once per micro-batch: equal prompts, or also histories of an agent."""
    balance: Literal["tokens", "flops"] = "tokens"
    """Quantity that is balanced over data-parallel replicas."""
    attention: Literal["auto", "transformer_engine", "ring_flash_attn", "ring", "allgather"] = "auto"
    """Attention and its context parallelism. auto: by machine and backend."""
    recompute: Literal["none", "full", "auto"] | int = "none"
    """Layers that are recomputed in backward. N: the first N of every stage or model chunk. auto: as few as fit."""
    activation_offload: bool = False
    """Keep saved activations in host memory."""
    head_chunk_tokens: int | None = Field(None, ge=1)
    """Tokens whose logits exist at the same time."""
    rendezvous_port: int | None = Field(None, ge=1024, le=65535)
    """Port on rank 0's host where ranks meet."""
    start_timeout_s: float = Field(600.0, gt=0, description="Timeout of the start of all ranks.")
    step_timeout_s: float = Field(3600.0, gt=0, description="Timeout of one call of a rank, collectives included.")
    cpu_threads: int | None = Field(None, ge=1, description="Threads per rank on CPU; none shares a node's cores.")

    @field_validator("recompute", mode="before")
    @classmethod
    def _layers(cls, value: Any) -> Any:
        text = str(value)
        if text in ("none", "full", "auto"):
            return text
        if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
            raise ValueError("must be none, full, auto or a number of layers from 1 on")
        return int(text)

    def recomputed_layers(self, layers: int) -> int:
        """Return how many of the ``layers`` of a stage are recomputed; none while ``auto`` is not replaced."""
        if isinstance(self.recompute, int):
            return min(self.recompute, layers)
        return layers if self.recompute == "full" else 0
