"""A checkpoint with more than its trained language model: stored names, and the rest as it came."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from backends.common.hugging_face.conversion import in_files
from backends.common.hugging_face.files import HfCheckpoint
from slime_like.config import ModelConfig
from slime_like.interfaces import Manifest, WeightBucket, WeightExport
from slime_like.models.tower import has_tower


def stored_names(directory: Path) -> dict[str, str]:
    """Map the language model's names to those in the checkpoint's files, which engines load, too."""
    with HfCheckpoint(directory) as checkpoint:
        return checkpoint.stored


def renamed(buckets: Iterable[WeightBucket], names: Mapping[str, str]) -> Iterator[WeightBucket]:
    return (WeightBucket([(names[name], tensor) for name, tensor in bucket.tensors]) for bucket in buckets)


def as_stored(export: WeightExport, model: ModelConfig) -> WeightExport:
    """Return an export of the language model, but not of its factors, under the stored names of its checkpoint."""
    if model.lora.sends_factors or not has_tower(model.path):
        return export
    names, manifest = stored_names(model.path), export.manifest
    if manifest is not None:
        manifest = Manifest({names[name]: info for name, info in manifest.tensors.items()}, manifest.updates)
    return WeightExport(manifest, renamed(export.buckets, names))


def kept_names(directory: Path) -> list[str]:
    """Return the names of stored tensors that are not the language model's; none without weights."""
    if not _has_weights(directory):
        return []
    with HfCheckpoint(directory) as checkpoint:
        return sorted(checkpoint.kept)


def kept_buckets(directory: Path, max_bytes: int) -> Iterator[WeightBucket]:
    """Yield these tensors, bit for bit, at most ``max_bytes`` at a time."""
    if not _has_weights(directory):
        return
    with HfCheckpoint(directory) as checkpoint:
        for names in in_files(sorted(checkpoint.kept), checkpoint.kept_nbytes, max_bytes):
            yield WeightBucket([(name, checkpoint.kept[name][...]) for name in names])


def _has_weights(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))
