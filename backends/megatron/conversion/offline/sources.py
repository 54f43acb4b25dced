"""A Megatron checkpoint as tensors under Hugging Face's names, one parameter at a time."""

from pathlib import Path

from torch import Tensor

from backends.megatron.conversion.export import merge_shards
from backends.megatron.conversion.offline.megatron_files import MegatronCheckpoint
from backends.megatron.conversion.offline.plan import ParameterPlan, plan_ranks
from slime_like.config import ParallelConfig, RunConfig
from slime_like.interfaces.conversion import TensorInfo
from slime_like.models.dimensions import ModelDimensions


def whole_parameters(config: RunConfig, dimensions: ModelDimensions) -> list[ParameterPlan]:
    """Every parameter that is exported, as one rank alone has it."""
    alone = config.model_copy(update={"trainer": config.trainer.model_copy(update={"parallel": ParallelConfig()})})
    (plan,) = plan_ranks(alone, dimensions)
    return [parameter for parameter in plan.parameters if parameter.placement.rule.exported]


def hugging_face_tensors(plan: ParameterPlan, values: Tensor) -> dict[str, Tensor]:
    """A whole parameter's tensors under Hugging Face's names; views where nothing has to move."""
    return dict(zip(plan.placement.source_names(), merge_shards(plan.placement, [values]), strict=True))


class MegatronSource:
    """A Megatron checkpoint; tensors that make up one parameter are read together."""

    def __init__(self, config: RunConfig, checkpoint: Path) -> None:
        plans = whole_parameters(config, ModelDimensions.from_checkpoint(config.model.path))
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
        """Names must be one of ``groups``."""
        plan = self._plans[names[0]]
        return hugging_face_tensors(plan, self._checkpoint.read(plan))
