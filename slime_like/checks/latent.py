"""What cannot be done with DeepSeek-V3's kind of model. Sizes only: no torch, no package is looked for."""

from collections.abc import Iterator

from slime_like.config.trainer import TrainerConfig
from slime_like.models.dimensions import ModelDimensions


def latent_problems(trainer: TrainerConfig, dimensions: ModelDimensions) -> Iterator[str]:
    """Why ``trainer`` cannot train latent attention, with the remedy."""
    if dimensions.latent is not None and trainer.attention == "transformer_engine":
        yield (
            "trainer.attention=transformer_engine is not supported for latent attention (DeepSeek-V3's); use auto, "
            "ring or allgather"
        )
