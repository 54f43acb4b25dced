"""Names and shapes of a complete model's tensors and factors, from its Hugging Face checkpoint."""

from pathlib import Path

from slime_like.config import ModelConfig
from slime_like.errors import CheckpointError
from slime_like.models.weight_files import WeightFilesError, model_shapes
from slime_like.weights.adapter import factor_shapes


def expected_tensors(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor in a full weight update of this model. Reads headers only.

    Raises:
        CheckpointError: the directory has no safetensors file, or a damaged one.
    """
    try:
        return model_shapes(Path(directory))
    except WeightFilesError as error:
        raise CheckpointError(str(error), code="weight-files", who=f"model.path={directory}") from error


def expected_factors(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every factor of a model on disk. Raises like ``expected_tensors``."""
    return factor_shapes(model.lora, expected_tensors(model.path))
