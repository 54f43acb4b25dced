"""The trainer: layout, optimizer, memory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_like.config.base import Section


class ParallelConfig(Section):
    """Size of every parallel axis. The number of trainer ranks is tensor * pipeline * context * data."""

    tensor: int = Field(1, ge=1, description="Tensor-parallel size.")
    pipeline: int = Field(1, ge=1, description="Pipeline-parallel size.")
    context: int = Field(1, ge=1, description="Context-parallel size.")
    data: int = Field(1, ge=1, description="Data-parallel size.")
    expert: int = Field(1, ge=1, description="Expert-parallel size (MoE models).")
    sequence: bool = Field(False, description="Sequence parallelism inside the tensor-parallel group.")
    virtual_pipeline: int = Field(1, ge=1, description="Model chunks per pipeline stage (interleaved schedule).")

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the decay.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay after the warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay; never applied to norms and biases.")
    final_weight_decay: float | None = Field(
        None,
        ge=0,
        description="Weight decay of the run's last optimizer step, to which it grows linearly, by as much every step; "
        "none keeps it as it is.",
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta2.")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    clip_grad: float = Field(1.0, gt=0, description="Global gradient-norm bound.")
    distributed: bool = Field(True, description="Shard optimizer state over data-parallel ranks.")
    offload: bool = Field(
        False,
        description="Keep main weights and moments in host memory and update them there, on the processor; with "
        "megatron needs `distributed` and `model.dtype: bfloat16`.",
    )
    overlap: bool = Field(
        False,
        description="Sum gradients over replicas during a step's last backward pass, and gather sharded weights during "
        "the next forward pass, instead of between them.",
    )
    overlap_bucket_params: int | None = Field(
        None, ge=1, description="Parameters per message of `overlap`; none is the larger of 40 M and 1 M per replica."
    )


class FsdpConfig(Section):
    """What the backend `fsdp` alone knows."""

    reshard_after_forward: bool = Field(
        True,
        description="Free a layer's gathered weights after its forward pass and gather them again for backward; false "
        "keeps them: less communication, but every rank then holds the whole model in `model.dtype`.",
    )
    accumulate: Literal["whole", "sharded"] = Field(
        "whole",
        description="Gradients between the micro-batches of a window. whole: every rank adds up whole gradients, in "
        "float32, and ranks sum them once per window. sharded: ranks sum them after every micro-batch, and none holds "
        "more than its shard.",
    )


class TrainerConfig(Section):
    """Trainer ranks."""

    backend: str = Field(
        "megatron",
        description="megatron; fsdp, which runs Hugging Face's own models under FSDP2; or another one's name "
        "(entry-point group slime_like.backends).",
    )
    parallel: ParallelConfig = Field(default_factory=lambda: ParallelConfig(), description="Parallel layout.")
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(), description="Optimizer.")
    fsdp: FsdpConfig = Field(default_factory=lambda: FsdpConfig(), description="Settings of the backend fsdp.")
    target_tokens_per_batch: int = Field(
        8192, ge=16, description="Token budget of one packed micro-batch; every prompt plus response must fit."
    )
    balance: Literal["tokens", "flops"] = Field(
        "tokens",
        description="What is spread evenly over data-parallel replicas: tokens, or FLOPs, in which attention grows "
        "with the square of a sequence's length.",
    )
    attention: Literal["auto", "transformer_engine", "ring_flash_attn", "ring", "allgather"] = Field(
        "auto",
        description="Attention, and how context ranks share it: Transformer Engine's (CUDA; also its layers), the "
        "llama3 path of the package ring-flash-attn, our zigzag ring, or our all-gather of keys and values; auto is "
        "Transformer Engine where it is installed and a CUDA device is there, else the ring. fsdp: allgather (auto) or "
        "ring_flash_attn.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="Activation recompute: of whole layers, or selective, of the core attention (megatron) or the MLP "
        "(fsdp).",
    )
    activation_offload: bool = Field(
        False,
        description="Keep what backward needs of the forward pass in host memory meanwhile; goes with any `recompute`.",
    )
    head_chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens per chunk of the logprob head; none is a twentieth of a micro-batch's, 64 to 1024, so that "
        "its memory is an eighth of what the logits would take, or as many as 1 MiB holds of them.",
    )
    rendezvous_port: int | None = Field(
        None, ge=1024, le=65535, description="Port on rank 0's host at which ranks meet; none chooses a free one."
    )
    start_timeout_s: float = Field(600.0, gt=0, description="Bound on the start of all ranks.")
    step_timeout_s: float = Field(3600.0, gt=0, description="Bound on one call of a rank, collectives included.")
    cpu_threads: int | None = Field(None, ge=1, description="Threads per rank on CPU; none shares the cores evenly.")
    cpu_kernels: Literal["auto", "off"] = Field(
        "auto",
        description="Operators of layers on a CPU. auto: where numba is installed, its kernels compute what they "
        "serve: layers of the backend megatron in float32 on at most two threads, and decoding by the engine "
        "transformers. off: torch's operators alone, as on a GPU.",
    )
