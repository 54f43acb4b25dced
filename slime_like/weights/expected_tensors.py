"""Names and shapes of a complete model's tensors, from its Hugging Face checkpoint."""

from collections.abc import Collection, Mapping
from pathlib import Path

from slime_like.config import ModelConfig
from slime_like.errors import CheckpointError, WeightSyncError
from slime_like.interfaces import Manifest
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


def require_model(manifest: Manifest, model: Mapping[str, tuple[int, ...]], engine: str) -> None:
    """Reject the manifest of an update of the whole model that lacks tensors, or has unknown or misshapen ones."""
    expected = {f"{name} {shape}" for name, shape in model.items()}
    require_complete({f"{name} {info.shape}" for name, info in manifest.tensors.items()}, expected, engine)


def require_complete(received: Collection[str], expected: Collection[str], engine: str) -> None:
    """Reject an update that lacks tensors or contains unknown ones.

    Raises:
        WeightSyncError: names the first few tensors.
    """
    missing = sorted(set(expected) - set(received))
    unknown = sorted(set(received) - set(expected))
    problems = [
        f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for kind, names in (("missing", missing), ("unknown", unknown))
        if names
    ]
    if problems:
        raise WeightSyncError(
            f"weight update of {engine} is incomplete: {' and '.join(problems)}",
            code="incomplete-update",
            remedy="send all buckets, with Hugging Face names, before the update is finished",
        )
