"""Megatron's side of the model families, one file per kind of layers, and the parts that they share.

``slime_like.models.families`` registers the families and names a file here for each.
"""

from importlib import import_module

from backends.megatron.families.family import MegatronFamily
from slime_like.errors import CheckpointError
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.family import FAMILIES


def family_of(dimensions: ModelDimensions) -> MegatronFamily:
    """Return Megatron's side of a model's family.

    Raises:
        CheckpointError: the family is not registered.
    """
    known = FAMILIES.get(dimensions.family)
    if known is None:
        reason = dimensions.attention.unsupported or f"model family {dimensions.family} is not registered"
        raise CheckpointError(
            f"{reason}, so there is no conversion to Megatron",
            code="no-weight-adapter",
            remedy="train it with trainer.backend=fsdp, or add the family in slime_like/models/families",
        )
    family: MegatronFamily = import_module(f"{__name__}.{known.megatron}").FAMILY
    return family
