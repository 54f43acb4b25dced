"""Megatron's side of ``slime-like convert``."""

import math
from pathlib import Path

from torch import Tensor

from backends.common.hugging_face.converter import HuggingFaceConverter
from backends.megatron.conversion.export import merge_shards
from backends.megatron.families import family_of
from backends.megatron.offline.megatron_files import MegatronCheckpoint
from backends.megatron.offline.plan import plan_ranks
from backends.megatron.offline.to_megatron import to_megatron
from slime_like.config import LoraConfig, ModelConfig, ParallelConfig, TrainerConfig
from slime_like.interfaces.conversion import ConversionOptions, ConversionSummary, Report, TensorInfo, TensorSource
from slime_like.models.dimensions import ModelDimensions


class MegatronConverter(HuggingFaceConverter):
    """See ``slime_like.interfaces.conversion.Converter``."""

    @property
    def _base(self) -> ModelConfig:
        """The model without factors."""
        return self.model.model_copy(update={"lora": LoraConfig()})

    def prove(self) -> dict[str, tuple[int, ...]]:
        dimensions = ModelDimensions.from_checkpoint(self.model.path)
        plan_ranks(self._base, _without_replicas(self.trainer), dimensions)
        return {name: tuple(shape) for name, shape in family_of(dimensions).hf_shapes(dimensions).items()}

    def to_checkpoint(self, output: Path, options: ConversionOptions, report: Report) -> ConversionSummary:
        return to_megatron(self._base, self.trainer, output, options, report)

    def _open(self, checkpoint: Path) -> TensorSource:
        return MegatronSource(self.model, self.trainer, checkpoint)


def _without_replicas(trainer: TrainerConfig) -> TrainerConfig:
    """Return the layout with the fewest ranks that hold every shard: only replicas that experts are spread over."""
    layout = trainer.parallel
    fewest = {"context": 1, "data": layout.expert // math.gcd(layout.expert, layout.tensor)}
    return trainer.model_copy(update={"parallel": layout.model_copy(update=fewest)})


class MegatronSource:
    """A Megatron checkpoint, of factors if ``model.lora`` is set. Tensors of one parameter are read together."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, checkpoint: Path) -> None:
        one_rank = trainer.model_copy(update={"parallel": ParallelConfig()})
        dimensions = ModelDimensions.from_checkpoint(model.path)
        (plan,) = plan_ranks(model, one_rank, dimensions)
        plans = [parameter for parameter in plan.parameters if parameter.placement.rule.exported]
        self._checkpoint = MegatronCheckpoint(checkpoint, plans)
        self._plans = {plan.placement.source_names()[0]: plan for plan in plans}
        self.tensors = {
            name: TensorInfo(str(self._checkpoint.dtype(plan)).removeprefix("torch."), shape)
            for plan in plans
            for name, shape in zip(plan.placement.source_names(), plan.placement.shapes, strict=True)
        }

    @property
    def groups(self) -> list[list[str]]:
        return [plan.placement.source_names() for plan in self._plans.values()]

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Read tensors. ``names`` must be one of ``groups``."""
        plan = self._plans[names[0]]
        tensors = merge_shards(plan.placement, [self._checkpoint.read(plan)])
        return dict(zip(plan.placement.source_names(), tensors, strict=True))
