"""What cannot be trained with ``trainer.share_prefixes``. Needs no torch."""

from collections.abc import Iterator

from slime_like.config.run import RunConfig

_BACKENDS = ("megatron", "fsdp")
_WITHOUT_CONTEXT = ("ring", "ring_flash_attn")


def prefix_problems(config: RunConfig) -> Iterator[str]:
    """Settings that shared prefixes exclude, each with the remedy."""
    trainer = config.trainer
    if trainer.share_prefixes is False:
        return
    setting = f"trainer.share_prefixes={trainer.share_prefixes}"
    if trainer.backend not in _BACKENDS:
        yield f"{setting} is not supported by trainer.backend={trainer.backend}; set it to false"
    if trainer.attention == "transformer_engine":
        yield (
            f"{setting} merges partial results of attention, and trainer.attention=transformer_engine returns them "
            "without the sums that takes; use trainer.attention=auto, which then is allgather"
        )
    layouts = [("trainer.parallel", trainer.parallel)]
    if config.reference_workers:
        layouts.append(("reference.parallel", config.reference.parallel))
    for field, layout in layouts:
        if layout.context > 1 and trainer.attention in _WITHOUT_CONTEXT:
            yield (
                f"{setting} with {field}.context={layout.context} is not supported by trainer.attention="
                f"{trainer.attention}, which sends keys around; use trainer.attention=auto, which then is allgather"
            )
