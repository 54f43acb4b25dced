"""Sections of the trainer: layout, optimizer, memory."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from slime_like.config.base import Section

FSDP = "fsdp"
"""Name of the FSDP2 backend."""


class ParallelConfig(Section):
    """Sizes of the parallel axes. There are tensor * pipeline * context * data ranks."""

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
    offload: bool = Field(False, description="Keep optimizer state in host memory, and update on the CPU.")
    overlap: bool = Field(False, description="Sum gradients during backward, and gather weights during forward.")
    overlap_bucket_params: int | None = Field(None, ge=1, description="Parameters per message of `overlap`.")

    @property
    def depends_on_length(self) -> bool:
        """Whether the schedule depends on the number of steps. Such a run cannot be extended."""
        return self.decay != "constant" or self.final_weight_decay is not None

    def conflicts(self) -> Iterator[str]:
        if self.min_lr > self.lr:
            yield f"min_lr={self.min_lr:g} is above lr={self.lr:g}; use at most that"
        final = self.final_weight_decay
        if final is not None and final < self.weight_decay:
            problem = f"is below weight_decay={self.weight_decay:g}, but weight decay can only grow"
            yield f"final_weight_decay={final:g} {problem}; use at least that"


class FsdpConfig(Section):
    """Settings of the backend `fsdp`."""

    reshard_after_forward: bool = Field(True, description="Free gathered weights after a layer's forward pass.")
    accumulate: Literal["auto", "whole", "sharded"] = "auto"
    """Each rank keeps float32 gradients of the whole model, or only its shard, which are summed in every micro-batch.
    auto: sharded if the whole ones do not fit."""


class FusionConfig(Section):
    """Fused kernels of other packages in the backend `megatron`. auto: on a GPU, if the package is installed."""

    moe_dispatch: Literal["auto", "off"] = "auto"
    """DeepEP's exchange of tokens between the ranks of experts."""
    moe_permute: Literal["auto", "off"] = "auto"
    """Transformer Engine's order of tokens by expert."""
    weight_gradients: Literal["auto", "off"] = "auto"
    """APEX's addition of weight gradients to their float32 sums."""


class TrainerConfig(Section):
    """Trainer ranks."""

    backend: str = "megatron"
    """megatron, fsdp (Hugging Face's models under FSDP2) or a custom backend."""
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    fsdp: FsdpConfig = FsdpConfig()
    fusion: FusionConfig = FusionConfig()
    backend_args: dict[str, Any] = Field(default_factory=dict, description="Settings of a custom backend.")
    target_tokens_per_batch: int = Field(8192, ge=16)
    """Token budget of one packed micro-batch; every sequence must fit."""
    share_prefixes: Literal[False, "prompts", "tree"] = False
    """Compute shared prefixes once per micro-batch: equal prompts, or also an agent's histories."""
    balance: Literal["tokens", "flops"] = Field("tokens", description="Quantity balanced over data-parallel replicas.")
    attention: Literal["auto", "transformer_engine", "ring_flash_attn", "ring", "allgather"] = "auto"
    """Attention and its context parallelism. auto: by machine and backend."""
    attention_kernels: Literal["auto", "torch", "fa3", "fa4"] = "auto"
    """Kernels of attention on a GPU, except Transformer Engine's: torch's FlashAttention 2, or FlashAttention 3 or 4.
    auto: 3 on Hopper if it is installed, else torch's."""
    fp8: Literal["none", "current", "blockwise"] = "none"
    """Products of Transformer Engine's layers in FP8 (`megatron`, Hopper or newer). current: one scale per tensor.
    blockwise: one per 128 elements of activations, and per 128 x 128 of weights. Head and experts keep 16 bits."""
    fp8_bf16_layers: int = Field(0, ge=0, description="First and as many last layers whose products stay in 16 bits.")
    recompute: Literal["none", "full", "auto"] | int = "none"
    """Layers recomputed in backward. N: the first N of a stage or model chunk. auto: as few as fit."""
    activation_offload: bool = Field(False, description="Keep saved activations in host memory.")
    router_bias_rate: float = Field(0.0, ge=0)
    """Step of sigmoid routers' biases against their experts' load. 0: frozen."""
    head_chunk_tokens: int | None = Field(None, ge=1, description="Tokens whose logits are in memory at once.")
    rendezvous_port: int | None = Field(None, ge=1024, le=65535, description="Port on rank 0's host where ranks meet.")
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
            raise ValueError("must be none, full, auto or a number of layers, at least 1")
        return int(text)

    def conflicts(self) -> Iterator[str]:
        if self.backend == FSDP:
            yield from self._fsdp_conflicts()
        if self.backend != "megatron" and self.fusion.changed:
            yield "fusion is set, but only trainer.backend=megatron uses it; remove it"
        if self.backend == "megatron":
            if self.fsdp.changed:
                yield "fsdp is set, but trainer.backend=megatron does not use it; set trainer.backend=fsdp"
            if self.optimizer.offload and not self.optimizer.distributed:
                # Megatron's other optimizers replace the parameters, so the host optimizer would update old copies.
                yield "optimizer.offload needs trainer.optimizer.distributed, even on one rank; set distributed: true"
        if self.fp8 != "none":
            yield from self._fp8_conflicts()
        elif self.fp8_bf16_layers:
            yield f"fp8_bf16_layers={self.fp8_bf16_layers}: all products are in 16 bits; set trainer.fp8, or remove it"
        if self.backend in ("megatron", FSDP) and self.backend_args:
            yield f"backend_args are for custom backends, not for trainer.backend={self.backend}; remove them"
        if self.share_prefixes:
            setting = f"share_prefixes={self.share_prefixes}"
            if self.backend not in ("megatron", FSDP):
                yield f"{setting} is not supported by trainer.backend={self.backend}; set it to false"
            if self.attention == "transformer_engine":
                yield f"{setting} is not supported by trainer.attention=transformer_engine; use auto (allgather)"
        yield from self.layout_conflicts(self.parallel)

    def _fp8_conflicts(self) -> Iterator[str]:
        setting = f"fp8={self.fp8} needs Transformer Engine's layers"
        if self.backend != "megatron":
            yield f"{setting}, which trainer.backend={self.backend} lacks; use none, or the backend megatron"
        elif self.attention not in ("auto", "transformer_engine"):
            yield f"{setting}, but trainer.attention={self.attention} chooses others; use attention: auto"

    def layout_conflicts(self, parallel: ParallelConfig) -> Iterator[str]:
        """Yield conflicts with a layout: the trainer's, or the reference workers'."""
        ring = self.attention in ("ring", "ring_flash_attn")
        if self.share_prefixes and parallel.context > 1 and ring:
            problem = f"with trainer.share_prefixes={self.share_prefixes} does not support {self.attention} attention"
            yield f"parallel.context={parallel.context} {problem}; use trainer.attention=auto (allgather)"
        for axis in ("tensor", "pipeline", "expert", "virtual_pipeline"):
            if self.backend == FSDP and (size := getattr(parallel, axis)) > 1:
                remedy = f"set {axis} to 1 and raise data, or use trainer.backend=megatron"
                yield f"parallel.{axis}={size}: trainer.backend=fsdp has only data and context ranks; {remedy}"
        if self.backend == FSDP and parallel.sequence:
            yield "parallel.sequence=true needs tensor parallelism, which trainer.backend=fsdp lacks; set it to false"

    def _fsdp_conflicts(self) -> Iterator[str]:
        attention, bucket = self.attention, self.optimizer.overlap_bucket_params
        for setting, is_set, remedy in (
            (f"attention={attention}", attention in ("ring", "transformer_engine"), "use auto, or ring_flash_attn"),
            ("optimizer.distributed=false", not self.optimizer.distributed, "use true"),
            (f"optimizer.overlap_bucket_params={bucket}", bucket is not None, "remove it: every layer is a message"),
            ("activation_offload=true", self.activation_offload, "use trainer.recompute=full"),
        ):
            if is_set:
                yield f"{setting} is not supported by trainer.backend=fsdp; {remedy}"

    @property
    def is_planned(self) -> bool:
        """True if some settings are left for a plan of the run's memory to choose."""
        return self.recompute == "auto" or (self.backend == FSDP and self.fsdp.accumulate == "auto")

    def recomputed_layers(self, layers: int) -> int:
        """Return how many of a stage's ``layers`` are recomputed. ``auto`` counts as none until it is replaced."""
        if isinstance(self.recompute, int):
            return min(self.recompute, layers)
        return layers if self.recompute == "full" else 0
