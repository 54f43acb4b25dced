"""Checks of a model's architecture that need only its sizes, not torch."""

from collections.abc import Iterator
from pathlib import Path

from slime_like.config.run import RunConfig
from slime_like.config.trainer import TrainerConfig
from slime_like.models.dimensions import FAMILIES, OTHER, ModelDimensions


def family_problems(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    """Yield why the configured trainer cannot train this model, each with the remedy.

    The trainer checks transformers' modules when it starts.
    """
    coefficient, replay = config.algorithm.moe_aux_loss_coef, config.algorithm.routing_replay
    rate = config.trainer.router_bias_rate
    if coefficient > 0 and dimensions.num_experts == 0:
        yield f"algorithm.moe_aux_loss_coef={coefficient:g}, but the model has no experts to balance; set it to 0"
    if replay != "none" and (dimensions.num_experts == 0 or dimensions.family == OTHER):
        yield f"algorithm.routing_replay={replay}, but {config.model.path} has no experts of a known family; use none"
    if rate > 0 and not dimensions.moe_sigmoid:
        yield f"trainer.router_bias_rate={rate:g}, but the model has no sigmoid routers of a known family; use 0"
    if (special := dimensions.attention.special) and config.trainer.attention == "transformer_engine":
        yield f"trainer.attention=transformer_engine is not supported for {special}; use auto"
    if config.trainer.share_prefixes and dimensions.attention.linear is not None:
        yield (
            f"trainer.share_prefixes={config.trainer.share_prefixes}: layers with linear attention keep one state per "
            "sequence, which cannot branch; set it to false"
        )
    window = dimensions.attention.window
    slides = window is not None and (config.supervised or config.max_model_len > window)
    yield from _window_problems(config.trainer, config.model.path, dimensions, slides)
    if config.trainer.backend == "megatron":
        reason = dimensions.attention.unsupported
        if reason is None and not FAMILIES[dimensions.family].megatron:
            reason = f"{config.model.path} is a model of type {dimensions.family}"
        if dimensions.capped_logits:
            reason = f"{config.model.path} caps its logits (final_logit_softcapping)"
        if reason is not None:
            yield (
                f"{reason}, which trainer.backend=megatron does not support; use trainer.backend=fsdp, which trains "
                "Hugging Face's model"
            )
        return
    if dimensions.attention.unsupported is None:
        return
    reach, longest = dimensions.attention.reach, config.max_model_len
    if reach is not None and not config.supervised and longest > reach:
        yield (
            f"sequences may have {longest} tokens (data.max_prompt_tokens, rollout.max_new_tokens), but layers of "
            f"{config.model.path} attend to chunks of {reach} (attention_chunk_size in its config.json), which packed "
            f"attention does not support; lower the two settings to {reach} tokens in all"
        )
    if coefficient > 0:
        yield f"algorithm.moe_aux_loss_coef={coefficient:g} does not support {config.model.path}; set it to 0"


def _window_problems(trainer: TrainerConfig, path: Path, dimensions: ModelDimensions, slides: bool) -> Iterator[str]:
    """Yield conflicts with sinks, and with windows if sequences may be longer (``slides``)."""
    window = dimensions.attention.window
    if slides and trainer.share_prefixes:
        yield (
            f"trainer.share_prefixes={trainer.share_prefixes}: layers of {path} have a sliding window of "
            f"{window} tokens, which shared prefixes do not support; set it to false"
        )
    context, attention = trainer.parallel.context, trainer.attention
    has_sinks = dimensions.attention.sinks and attention == "ring_flash_attn"
    if context > 1 and (has_sinks or (slides and attention in ("ring", "ring_flash_attn"))):
        yield (
            f"trainer.attention={attention} over trainer.parallel.context={context} ranks does not support "
            f"{'attention sinks' if has_sinks else f'a sliding window of {window} tokens'}; use auto (allgather)"
        )
