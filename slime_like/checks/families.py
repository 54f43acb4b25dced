"""What trainers do not support of a model's architecture. Sizes only: no torch."""

from collections.abc import Iterator

from slime_like.config.run import RunConfig
from slime_like.models.dimensions import ModelDimensions


def family_problems(config: RunConfig, dimensions: ModelDimensions) -> Iterator[str]:
    """Yield why the configured trainer cannot train this model, each with the remedy.

    What sizes do not show is checked on transformers' modules when the trainer starts.
    """
    coefficient = config.algorithm.moe_aux_loss_coef
    if coefficient > 0 and dimensions.num_experts == 0:
        yield f"algorithm.moe_aux_loss_coef={coefficient:g}, but the model has no experts to balance; set it to 0"
    if dimensions.latent is not None and config.trainer.attention == "transformer_engine":
        yield (
            "trainer.attention=transformer_engine is not supported for latent attention (DeepSeek-V3's); use auto, "
            "ring or allgather"
        )
    if dimensions.foreign is None:
        return
    if config.trainer.backend == "megatron":
        yield (
            f"{dimensions.foreign}, which trainer.backend=megatron does not support; use trainer.backend=fsdp, which "
            "trains Hugging Face's own model"
        )
        return
    reach, longest = dimensions.attention_reach, config.max_model_len
    if reach is not None and not config.supervised and longest > reach:
        yield (
            f"sequences may have {longest} tokens (data.max_prompt_tokens, rollout.max_new_tokens), but layers of "
            f"{config.model.path} attend to {reach} at most (sliding_window or attention_chunk_size of its "
            f"config.json), which packed attention does not support; keep both within {reach} tokens, where it makes "
            "no difference"
        )
    if coefficient > 0:
        yield (
            f"algorithm.moe_aux_loss_coef={coefficient:g}: how routers of {config.model.path} "
            "choose is not known, so that they cannot be balanced; set it to 0"
        )
