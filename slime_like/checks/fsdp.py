"""Which settings the backend ``fsdp`` cannot follow. Needs neither torch nor transformers."""

from collections.abc import Iterator

from slime_like.config.run import RunConfig
from slime_like.config.trainer import FsdpConfig, ParallelConfig, TrainerConfig

BACKEND = "fsdp"
_NO_RING = ("ring", "transformer_engine")


def fsdp_problems(config: RunConfig) -> Iterator[str]:
    """Settings that cannot be met, each with the remedy; of another backend, that it was given settings of fsdp."""
    trainer = config.trainer
    if trainer.backend == BACKEND:
        yield from axis_problems(config.trainer.parallel, "trainer.parallel")
        yield from _unsupported_settings(trainer)
    elif trainer.backend == "megatron" and trainer.fsdp != FsdpConfig():
        yield "trainer.fsdp is set, but trainer.backend=megatron does not read it; use trainer.backend=fsdp"


def axis_problems(parallel: ParallelConfig, field: str) -> Iterator[str]:
    """Axes that this backend does not have; ``field`` is where the layout stands in the configuration."""
    for axis in ("tensor", "pipeline", "expert", "virtual_pipeline"):
        size = getattr(parallel, axis)
        if size > 1:
            yield (
                f"{field}.{axis}={size}: trainer.backend=fsdp supports data and context ranks only, and shards "
                f"the model over all of them; set {axis} to 1 and raise data, or use trainer.backend=megatron"
            )
    if parallel.sequence:
        yield (
            f"{field}.sequence=true belongs to tensor parallelism, which trainer.backend=fsdp does not have; "
            "set it to false"
        )


def _unsupported_settings(trainer: TrainerConfig) -> Iterator[str]:
    if trainer.attention in _NO_RING:
        yield (
            f"trainer.attention={trainer.attention} is not supported by trainer.backend=fsdp; use auto (allgather), or "
            "ring_flash_attn"
        )
    if not trainer.optimizer.distributed:
        yield "trainer.optimizer.distributed=false: trainer.backend=fsdp always shards optimizer state; leave it true"
    if trainer.optimizer.overlap_bucket_params is not None:
        yield (
            "trainer.optimizer.overlap_bucket_params: with trainer.backend=fsdp every layer is a message; leave it out"
        )
    if trainer.activation_offload:
        yield (
            "trainer.activation_offload is not supported by trainer.backend=fsdp; use trainer.recompute=full, or "
            "trainer.backend=megatron"
        )
