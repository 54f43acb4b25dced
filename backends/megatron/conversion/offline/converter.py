"""Megatron's side of ``slime-like convert``."""

import math
from pathlib import Path

from backends.common.hugging_face.converter import HuggingFaceConverter
from backends.megatron.conversion.families import family_of
from backends.megatron.conversion.offline.plan import plan_ranks
from backends.megatron.conversion.offline.sources import MegatronSource
from backends.megatron.conversion.offline.to_megatron import to_megatron
from slime_like.config import RunConfig
from slime_like.interfaces.conversion import ConversionOptions, ConversionSummary, Report, TensorSource
from slime_like.models.dimensions import ModelDimensions


class MegatronConverter(HuggingFaceConverter):
    """See ``slime_like.interfaces.conversion.Converter``."""

    def prove(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        dimensions = ModelDimensions.from_checkpoint(config.model.path)
        plan_ranks(_without_replicas(config), dimensions)
        return {name: tuple(shape) for name, shape in family_of(dimensions).hf_shapes(dimensions).items()}

    def to_checkpoint(
        self, config: RunConfig, output: Path, options: ConversionOptions, report: Report
    ) -> ConversionSummary:
        return to_megatron(config, output, options, report)

    def open_checkpoint(self, config: RunConfig, checkpoint: Path) -> TensorSource:
        return MegatronSource(config, checkpoint)


def _without_replicas(config: RunConfig) -> RunConfig:
    """The fewest ranks that hold every shard of the layout: replicas only as far as experts are spread over them."""
    layout = config.trainer.parallel
    fewest = {"context": 1, "data": layout.expert // math.gcd(layout.expert, layout.tensor)}
    trainer = config.trainer.model_copy(update={"parallel": layout.model_copy(update=fewest)})
    return config.model_copy(update={"trainer": trainer})
