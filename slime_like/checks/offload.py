"""Requirements of ``trainer.optimizer.offload``. Needs neither torch nor Megatron."""

from collections.abc import Iterator

from slime_like.config.run import RunConfig


def megatron_offload_problems(config: RunConfig) -> Iterator[str]:
    """Of the backend megatron only: others have separate host optimizers."""
    if config.trainer.backend == "megatron":
        yield from offload_problems(config)


def offload_problems(config: RunConfig) -> Iterator[str]:
    """Why Megatron cannot keep optimizer state in host memory, each with the remedy."""
    settings = config.trainer.optimizer
    if not settings.offload:
        return
    if not settings.distributed:
        # Megatron's other optimizers replace the parameters under the host optimizer, which would update stale copies.
        yield "trainer.optimizer.offload needs trainer.optimizer.distributed, also on one rank; set distributed: true"
    if config.model.dtype == "float32":
        yield (
            "trainer.optimizer.offload: Megatron's host optimizer takes no float32 weights; set model.dtype: bfloat16 "
            "(main weights are float32 all the same)"
        )
